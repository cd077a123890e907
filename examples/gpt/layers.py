"""The output layers of the comparison: the losses of this library, and what they replace."""

import argparse
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from examples.common.errors import UsageError

EXACT = {"plain", "exact", "liger", "cce"}  # every row of the table has a gradient
LAYERS = ("plain", "exact", "sampled", "midx", "liger", "cce")
ABOUT = ("plain: F.linear and F.cross_entropy; exact: xs.LinearCrossEntropyLoss; sampled and midx: "
         "xs.SampledSoftmaxLoss with the most frequent tokens and samples of the others, shared "
         "unigram or private MIDX; liger, cce: Liger's and Apple's fused exact losses (packages "
         "liger-kernel and cut-cross-entropy, on CUDA)")


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None, z_loss: float,
               reduction: str) -> Tensor:
    """The exact loss as it is usually written. Products are in the dtype of autocast."""
    logits = F.linear(hidden, weight).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target, reduction=reduction)
    if z_loss > 0:
        squared = logits.logsumexp(1).square()
        loss = loss + z_loss * (squared.sum() if reduction == "sum" else squared.mean())
    return loss


class Rival(nn.Module):
    """Another implementation of the exact loss, with the table as `linear`. It is evaluated by this
    library's exact loss, as the others are.

    Args:
        function: takes hidden states [Q, width], the table, targets [Q] and the reduction.
    """
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, str], Tensor], width: int,
                 num_tokens: int, softcap: float | None, z_loss: float):
        super().__init__()
        self.function, self.softcap, self.z_loss = function, softcap, z_loss
        self.reduction = "mean"
        self.linear = nn.Linear(width, num_tokens, bias=False)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        if not self.training:
            return xs.functional.linear_cross_entropy(hidden, self.linear.weight, target,
                                                      reduction=self.reduction,
                                                      softcap=self.softcap, z_loss=self.z_loss)
        return self.function(hidden.flatten(0, -2), self.linear.weight, target.flatten(),
                             self.reduction)


def build_plain(args: argparse.Namespace, width: int, num_tokens: int) -> Rival:
    compute = torch.compile(plain_loss) if args.compile else plain_loss
    return Rival(
        lambda hidden, weight, target, reduction: compute(hidden, weight, target, args.softcap, args
                                                          .z_loss, reduction), width, num_tokens,
        args.softcap, args.z_loss)


def build_liger(args: argparse.Namespace, width: int, num_tokens: int) -> Rival:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def compute(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        results = LigerFusedLinearCrossEntropyFunction.apply(hidden.to(dtype), weight.to(dtype),
                                                             target, None, None, -100, args.z_loss,
                                                             0.0, reduction, args.softcap)
        return results[0]

    return Rival(compute, width, num_tokens, args.softcap, args.z_loss)


def build_cce(args: argparse.Namespace, width: int, num_tokens: int) -> Rival:
    from cut_cross_entropy import linear_cross_entropy

    if args.z_loss > 0:
        raise UsageError("--loss cce: expected no --z-loss, which it lacks")

    def compute(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        return linear_cross_entropy(hidden.to(dtype), weight.to(dtype), target,
                                    softcap=args.softcap, reduction=reduction)

    return Rival(compute, width, num_tokens, args.softcap, args.z_loss)


def build_layer(args: argparse.Namespace, name: str, counts: Tensor, width: int) -> nn.Module:
    """Creates an output layer of LAYERS for tokens with these counts [num_tokens]."""
    num_tokens = len(counts)
    rivals = {"plain": build_plain, "liger": build_liger, "cce": build_cce}
    if name in rivals:
        try:
            return rivals[name](args, width, num_tokens)
        except ImportError as error:
            raise UsageError(f"--loss {name}: {error}") from error
    options = {"softcap": args.softcap, "z_loss": args.z_loss}
    if name == "exact":
        return xs.LinearCrossEntropyLoss(width, num_tokens, **options)
    head, samples = (args.head, args.samples) if name == "sampled" else (args.midx_head,
                                                                         args.midx_samples)
    if head + samples > num_tokens:
        raise UsageError(
            f"--loss {name}: expected at most {num_tokens}, the number of tokens of the "
            f"text, as head and samples together, got {head} and {samples}")
    if name == "sampled":
        sampler = xs.samplers.UnigramSampler(counts.clamp(min=1), args.samples, power=args.power)
    else:
        try:
            sampler = xs.samplers.MidxSampler(num_tokens, width, args.midx_samples,
                                              codewords=args.codewords,
                                              refresh_every=args.refresh_every)
        except ValueError as error:  # an option outside the range that the sampler supports
            raise UsageError(f"--loss {name}: {error}") from error
    return xs.SampledSoftmaxLoss(width, num_tokens, sampler=sampler,
                                 head_classes=counts.topk(head).indices, **options)
