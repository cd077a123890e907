"""Optimizers, samplers and losses by their names on the command line."""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import xsoftmax as xs

from .errors import UsageError

OPTIMIZERS = {"adam": xs.optim.RowAdam, "sgd": xs.optim.RowSGD, "adagrad": xs.optim.RowAdagrad}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEARNING_RATES = {"adam": 2e-3, "sgd": 5.0, "adagrad": 0.02}

NOISES = ["uniform", "unigram", "midx"]
SAMPLERS = [
    "unigram", "uniform", "log_uniform", "in_batch", "midx", "midx_pq", "midx_learnable",
    "midx_learnable_pq", "lsh", "sphere", "rff"
]


def build_optimizer(args: argparse.Namespace,
                    parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options = {
        "lr": args.lr, "stochastic_rounding": args.stochastic_rounding,
        "state_dtype": DTYPES[args.state_dtype]
    }
    if args.row_wise:
        options["row_wise"] = True
    return OPTIMIZERS[args.optimizer](parameters, **options)


Loss = xs.LinearLoss | xs.BeamTreeLoss | xs.HierarchicalSoftmaxLoss


def build_loss(args: argparse.Namespace, name: str, counts: Tensor, dim: int, bias: bool,
               classes: str, tree: xs.LabelTree | None = None) -> Loss:
    """Creates a loss.

    Args:
        name: "sampled", "exact", "cane" or "hierarchical".
        counts: the frequency of each class in the training data; in decreasing order if a head is
            used.
        dim: the width of a query.
        classes: the name of the classes in errors.
        tree: a tree of the classes, for "hierarchical", and for "cane" with a beam search.
    """
    num_classes = len(counts)
    if name == "exact":
        return xs.LinearCrossEntropyLoss(dim, num_classes, bias=bias)
    if name == "hierarchical":
        return xs.HierarchicalSoftmaxLoss(dim, tree, bias=bias)
    if name == "cane":
        try:
            return build_cane(args, counts, dim, bias, tree)
        except ValueError as error:
            raise UsageError(str(error)) from error
    options = {"estimator": args.estimator, "bias": bias}
    if args.sampler == ["in_batch"]:
        # The candidates are the targets of the step, which include the frequent classes. So there
        # is no number of samples to choose, and no head.
        return xs.SampledSoftmaxLoss(dim, num_classes, sampler="in_batch", **options)
    if args.head + max(args.samples) > num_classes:
        raise UsageError(
            f"--head {args.head} and --samples {max(args.samples)} together exceed the "
            f"{num_classes} {classes}: "
            "take fewer, or --loss exact")
    try:
        samplers = [
            build_sampler(args, kind, counts, dim, num_samples, bias=bias, private=args.private)
            for kind, num_samples in zip(args.sampler, args.samples)
        ]
        sampler = samplers[0] if len(samplers) == 1 else xs.samplers.UnionSampler(*samplers)
        return xs.SampledSoftmaxLoss(dim, num_classes, sampler=sampler, head_classes=args.head,
                                     **options)
    except ValueError as error:  # an option outside the range that a sampler supports
        raise UsageError(str(error)) from error


def build_cane(args: argparse.Namespace, counts: Tensor, dim: int, bias: bool,
               tree: xs.LabelTree | None) -> xs.CaneLoss | xs.BeamTreeLoss:
    """Creates a CANE loss. With "routed", its candidates come from a tree with one layer of subsets
    (Han et al., 2018, section 5)."""
    noise = args.noise
    # A uniform noise is sampled outside the candidates directly. Other samplers have up to four
    # tries per noise.
    if noise != "uniform":
        noise = build_sampler(args, noise, counts, dim, 4 * args.noises, bias=bias, private=True,
                              distinct=False)
    options = {
        "num_noises": args.noises, "noise_sampler": noise, "noise_reduction": args.noise_reduction,
        "bias": bias
    }
    if args.candidates_from == "beam":
        return xs.BeamTreeLoss(dim, tree, num_candidates=args.candidates, beam=args.beam, **options)
    if args.candidates_from == "routed":
        tree = xs.LabelTree.from_frequencies(counts.clamp(min=1), args.subsets)
        # Balancing would change rows that are also those of a tied embedding.
        balance = None if args.untied else 0
        return xs.BeamTreeLoss(dim, tree, num_candidates=args.candidates, routed=True,
                               balance_every=balance, **options)
    if args.candidates_from == "head":
        return xs.CaneLoss(dim, len(counts), candidates=args.candidates, **options)
    if args.candidates_from == "bigram":
        if args.candidates > len(counts):
            raise ValueError(f"--candidates: expected at most the {len(counts)} classes, got "
                             f"{args.candidates}")
        return xs.CaneLoss(dim, len(counts), **options)  # each call passes the candidates
    near = build_sampler(args, "midx", counts, dim, args.candidates, bias=bias, private=True,
                         distinct=True)
    return xs.CaneLoss(dim, len(counts), candidates=near, **options)


def codebook_loss(loss: Loss, hidden: Tensor) -> Tensor | float:
    """Returns the loss that trains the codewords of learnable samplers; 0 without them."""
    samplers = [
        part for part in loss.modules() if isinstance(part, xs.samplers.LearnableMidxSampler)
    ]
    if not samplers:
        return 0.0
    queries, table = hidden.detach().flatten(0, -2), [
        None if part is None else part.detach() for part in (loss.linear.weight, loss.linear.bias)
    ]
    return sum(sampler.codebook_loss(queries, *table) for sampler in samplers)


@dataclass(frozen=True)
class SamplerOptions:
    """Options of adaptive samplers, as the command line has them."""

    codewords: int = 64
    distinct: bool = False
    refresh_every: int = 500


def build_sampler(options: SamplerOptions | argparse.Namespace, kind: str, counts: Tensor, dim: int,
                  num_samples: int, *, bias: bool, private: bool,
                  distinct: bool | None = None) -> xs.samplers.Sampler:
    """Creates a sampler.

    Args:
        kind: one of SAMPLERS, except in_batch.
        num_samples: the number of samples per step, or per query.
        bias: whether the output layer has a bias.
        private: draw separate samples for each query, with any sampler.
        distinct: sample without replacement. None: the sampler's default; for midx, --distinct.
    """
    num_classes, shared = len(counts), False if private else None  # None: the sampler's default
    if kind == "unigram":
        # At least 1, so that classes that occur only in the validation data are sampled too.
        return xs.samplers.UnigramSampler(counts.clamp(min=1), num_samples, power=0.75,
                                          shared=shared, distinct=distinct)
    if kind.startswith("midx"):
        distinct = options.distinct if distinct is None else distinct
        make = xs.samplers.LearnableMidxSampler if "learnable" in kind else xs.samplers.MidxSampler
        return make(num_classes, dim, num_samples, kind="pq" if kind.endswith("pq") else "rq",
                    codewords=options.codewords, bias=bias, distinct=distinct,
                    refresh_every=options.refresh_every)
    if kind in ("lsh", "sphere", "rff"):
        return xs.samplers.make_sampler(kind, num_classes, num_samples, dim=dim, bias=bias,
                                        refresh_every=options.refresh_every)
    return xs.samplers.make_sampler(kind, num_classes, num_samples, shared=shared)
