"""Training steps and predictions of every loss with every sampler, to be compiled and exported."""

import dataclasses
import json
from typing import Callable, Dict, Optional, Tuple

import torch

import xsoftmax as xs
from combinations import COMBINATIONS, D, N, Q
from xsoftmax import samplers

K = 2  # predictions per query


@dataclasses.dataclass
class Traced:
    make: Callable[[], torch.nn.Module]  # in float32, on the CPU, seeded
    # of a training step, on a device; the first input requires a gradient
    inputs: Callable[[str], Tuple]
    predict: Optional[Callable] = None  # predictions in eval(): (loss, *inputs) -> tensors
    fullgraph: bool = True
    exports: bool = True  # can be exported in training mode


class Predictions(torch.nn.Module):
    """Predictions of a loss as a forward pass."""
    def __init__(self, call, loss):
        super().__init__()
        self.call, self.loss = call, loss

    def forward(self, *inputs):
        return self.call.predict(self.loss, *inputs)


def seeded(make):
    def seed_and_make():
        torch.manual_seed(0)
        return make()

    return seed_and_make


def hidden(device):
    return torch.randn(Q, D, device=device, requires_grad=True)


def ids(device, *shape, low=0):
    return torch.randint(low, N, shape, device=device)


def batch(device):
    return hidden(device), ids(device, Q)


def several(device):
    return hidden(device), ids(device, Q, 3)


def of_table(loss, input, target, *rest):
    return loss(input, target), *loss.topk(input, K), loss.predict(input), loss.log_prob(input)


def best_labels(loss, input, *rest):
    return (
        *loss.topk(input, K),
        *loss.topk(input, K, exclude=torch.arange(3 * Q, device=input.device).view(Q, 3) % N - 1),
        loss.predict(input),
    )


def soft_batch(device):
    return hidden(device), ids(device, Q, 3, low=-1), torch.rand(Q, 3, device=device)


class Soft(torch.nn.Module):
    """A loss with soft targets."""
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, input, target, target_prob):
        return self.loss(input, target, target_prob=target_prob)


class Hard(Soft):
    """A loss with negatives of the caller."""
    def forward(self, input, target, negatives):
        return self.loss(input, target, negatives=negatives)


class Towers(Soft):
    """Two towers, with more negatives."""
    def forward(self, query, item, item_id, vectors, ids):
        return self.loss(query, item, item_id, (vectors, ids))


def tower_batch(device):
    return hidden(device), torch.randn(Q, D, device=device), ids(device, Q)


def nearest_items(loss, query, item, *rest):
    return loss(query, item, *rest), *loss.topk(query, item, K)


def sampled(**options):
    return xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=6, **options)


def matcher():
    made = xs.HierarchicalMatcher(D, xs.LabelTree.random(N, 3), beam=2)
    while made.next_layer():
        pass
    return made


_CAPPED = dict(
    label_smoothing=0.1,
    logit_scale=0.5,
    softcap=3.0,
    z_loss=0.1,
    weight=torch.linspace(0.5, 2.0, N),
)

OTHERS: Dict[str, Traced] = {
    "exact": Traced(lambda: xs.LinearCrossEntropyLoss(D, N, bias=True), batch, of_table),
    "exact, without options": Traced(lambda: xs.LinearCrossEntropyLoss(D, N, reduction="sum"),
                                     batch, best_labels),
    "exact, transformed": Traced(
        lambda: xs.LinearCrossEntropyLoss(D, N, reduction="none", **_CAPPED), batch, of_table),
    "exact, several positives": Traced(lambda: xs.LinearCrossEntropyLoss(D, N), several),
    "exact, soft": Traced(lambda: Soft(xs.LinearCrossEntropyLoss(D, N)), soft_batch),
    "sampled, several positives": Traced(lambda: sampled(), several, of_table),
    "sampled, soft": Traced(lambda: Soft(sampled()), soft_batch),
    "sampled, negatives": Traced(lambda: Hard(sampled()), lambda device:
                                 (*batch(device), ids(device, 5))),
    "two towers": Traced(lambda: xs.TwoTowerLoss(N), tower_batch, nearest_items),
    "two towers, memory": Traced(
        lambda: xs.TwoTowerLoss(N, estimator="ranking", similarity="cosine", temperature=0.5, memory
                                =9, dim=D),
        tower_batch,
        nearest_items,
    ),
    "two towers, uniform negatives": Traced(
        lambda: Towers(xs.TwoTowerLoss(N)),
        lambda device: (*tower_batch(device), torch.randn(4, D, device=device), ids(device, 4)),
    ),
    "two towers, hard negatives": Traced(
        lambda: Towers(xs.TwoTowerLoss(counts=samplers.StreamingCounts(None, buckets=50))),
        lambda device: (
            *tower_batch(device),
            torch.randn(Q, 2, D, device=device),
            ids(device, Q, 2),
        ),
    ),
    # The layer in training is read on the host, which breaks the graph.
    "matcher": Traced(
        matcher,
        lambda device: (hidden(device), ids(device, Q, 4, low=-1)),
        best_labels,
        fullgraph=False,
        exports=False,
    ),
}


def _of_combination(made):
    return Traced(lambda: made.make(torch.float32), batch, of_table)


def each_part():
    """Returns {name: combination}, the first of every sampler and of every loss."""
    first = {}
    for name, made in COMBINATIONS.items():
        first.setdefault(
            json.dumps(
                [made.loss, made.sampler, made.candidates]
                if made.loss == "SampledSoftmaxLoss" else [made.loss],
                default=str,
            ),
            name,
        )
    return {name: COMBINATIONS[name] for name in first.values()}


# One combination of each loss except SampledSoftmaxLoss.
KINDS = [name for name, made in each_part().items() if made.loss != "SampledSoftmaxLoss"]
TRACED: Dict[str, Traced] = {name: _of_combination(made)
                             for name, made in each_part().items()} | {
                                 name: dataclasses.replace(call, make=seeded(call.make))
                                 for name, call in OTHERS.items()
                             }
