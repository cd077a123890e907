"""Compares losses over a tree of classes, and CANE over a plain table, with what they replace.

    python benchmarks/trees.py [--threads 2] [--repeats 21]
                               [--only step,predict,hierarchical,cane,matcher] [--json [FILE]]

Steps consist of forward pass, backward pass and, if the figure says so, RowAdam, on random queries.
Samples are drawn inside the timed region. The targets of the beam tree are among its candidates, so
that the noises are scored, which is its most expensive case. A step's share of balancing is
included. The naive rival is that of output_layer.py.
"""

import math
from typing import Callable

import torch

import xsoftmax as xs
from output_layer import NaiveSampled, figure, make_batch, make_table
from common.records import run_benches
from common.timing import interleave, share

QUERIES, WIDTH, CLASSES = 256, 256, 1_000_000


def step(loss: torch.nn.Module, with_optimizer: bool = True) -> Callable[[], None]:
    input, target = make_batch(QUERIES, WIDTH, loss.num_classes)
    if isinstance(loss, xs.BeamTreeLoss):
        target = loss.predict(input.detach())
    optimizer = xs.optim.RowAdam(loss.parameters()) if with_optimizer else None

    def run() -> None:
        input.grad = None
        loss.zero_grad()
        loss(input, target).backward()
        if optimizer is not None:
            optimizer.step()

    return run


def beam_tree(classes: int, candidates: int = 5) -> xs.BeamTreeLoss:
    return xs.BeamTreeLoss(WIDTH, xs.LabelTree.random(classes, 10), num_candidates=candidates,
                           num_noises=5)


def bench_step(args) -> list[dict]:
    """A training step of the beam tree"""
    nce = xs.SampledSoftmaxLoss(WIDTH, CLASSES, sampler="uniform", num_samples=10, shared=False,
                                estimator="nce")
    trees = {"beam tree": beam_tree(CLASSES), "beam tree, 10,000 classes": beam_tree(10_000)}
    medians = interleave({name: step(loss)
                          for name, loss in trees.items()} | {"NCE": step(nce)}, args.repeats)
    for name, loss in trees.items():  # add a step's share of balancing
        medians[name] += share(loss.balance, loss.balance_every)
    return [
        figure(
            "beam tree, 5 candidates + 5 noise samples, N 1M, D 256, with optimizer / NCE, 10 "
            "private noise samples", medians, "beam tree", "NCE"),
        figure("the same, N 1M / N 10,000", medians, "beam tree", "beam tree, 10,000 classes")
    ]


def bench_predict(args) -> list[dict]:
    """The best five of a million classes"""
    loss, table = beam_tree(CLASSES), make_table(CLASSES, WIDTH)
    input = torch.randn(QUERIES, WIDTH)
    with torch.no_grad():
        medians = interleave(
            {
                "beam search": lambda: loss.topk(input, 5), "matmul + topk": lambda:
                (input @ table.T).topk(5)
            }, max(3, args.repeats // 4), warmup=1)
    return [
        figure("top-5 prediction by beam search, N 1M, D 256 / matmul + topk", medians,
               "beam search", "matmul + topk")
    ]


def bench_hierarchical(args) -> list[dict]:
    """A hierarchical softmax"""
    runs = {
        "hierarchical": step(xs.HierarchicalSoftmaxLoss(WIDTH, xs.LabelTree.random(CLASSES, 10)),
                             False), "exact": step(xs.LinearCrossEntropyLoss(WIDTH, CLASSES), False)
    }
    medians = interleave(runs, max(3, args.repeats // 4), warmup=1)
    return [
        figure("hierarchical softmax, b 10, N 1M, D 256 / exact loss in blocks", medians,
               "hierarchical", "exact")
    ]


def bench_cane(args) -> list[dict]:
    """CANE over a plain table"""
    naive = NaiveSampled(make_table(CLASSES, WIDTH))
    input, target = make_batch(QUERIES, WIDTH, CLASSES)
    log_count = torch.tensor(math.log(61 / CLASSES))

    def rival() -> None:
        input.grad = naive.embedding.weight.grad = None
        naive.shared(input, target, torch.randint(CLASSES, (61,)), log_count).backward()

    ours = xs.CaneLoss(WIDTH, CLASSES, candidates=torch.randperm(CLASSES)[:60], num_noises=1)
    medians = interleave({"CANE": step(ours, False), "naive": rival}, args.repeats)
    return [
        figure("CANE, 60 shared candidates + 1 noise sample, N 1M, D 256 / naive uniform shared 61",
               medians, "CANE")
    ]


def matcher_step(classes: int, encoder: torch.nn.Module | None) -> Callable[[], None]:
    """Returns a step on the last layer, with 16 children per node and 16 labels per leaf, for 64
    queries of 32 words each, or their encodings, with 5 target labels."""
    tree = xs.LabelTree.from_vectors(torch.randn(classes, 8), 16, 3,
                                     torch.Generator().manual_seed(0), max_leaf_size=16)
    matcher = xs.HierarchicalMatcher(WIDTH, tree)
    while matcher.next_layer():
        pass
    torch.nn.init.normal_(matcher.edges.weight, std=WIDTH**-0.5)
    input = torch.randn(64, WIDTH, requires_grad=True) if encoder is None else torch.randn(
        64, 32, WIDTH)
    target = torch.randint(classes, (64, 5))
    optimizer = xs.optim.RowAdam(
        [*matcher.parameters(), *(encoder.parameters() if encoder else [])])

    def run() -> None:
        optimizer.zero_grad()
        input.grad = None
        matcher(input if encoder is None else encoder(input).mean(1), target).backward()
        optimizer.step()

    return run


def bench_matcher(args) -> list[dict]:
    """The layer of a neural matcher"""
    layers = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True), 2,
        enable_nested_tensor=False)
    figures = []
    for name, encoder in (("under a Transformer of 2 layers", layers), ("alone", None)):
        medians = interleave(
            {f"N {classes:,}": matcher_step(classes, encoder)
             for classes in (10_000, CLASSES)}, args.repeats)
        figures.append(
            figure(f"hierarchical matcher {name}, with optimizer, beam 10: N 1M / N "
                   "10,000", medians, "N 1,000,000", "N 10,000"))
    return figures


BENCHES = {
    "step": bench_step, "predict": bench_predict, "hierarchical": bench_hierarchical,
    "cane": bench_cane, "matcher": bench_matcher
}

if __name__ == "__main__":
    run_benches(
        __doc__, BENCHES, question="What do trees of classes cost, in training and in "
        "prediction?",
        against="NCE with 10 noise samples in this library; a matrix product and topk in PyTorch; "
        "the exact loss; sampled softmax in PyTorch")
