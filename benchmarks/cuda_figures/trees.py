"""Training steps and searches of label trees."""

from typing import Optional

import torch

import xsoftmax as xs

from .bench import Bench, training_step
from .sampled import our_loss


def part_trees(bench: Bench) -> None:
    input, target = bench.batch(bench.tree_queries)
    tree = xs.LabelTree.random(bench.classes, 10)
    beam = xs.BeamTreeLoss(bench.width, tree, num_candidates=5, num_noises=5).to(bench.device)
    reached = beam.predict(input.detach())  # the most expensive case: targets are candidates
    nce = our_loss(bench, 10, False, estimator="nce")

    def step(loss: torch.nn.Module, labels: torch.Tensor, optimizer: Optional[type] = None):
        parameters = list(loss.parameters())
        return training_step(lambda: loss(input, labels), input, parameters, optimizer
                             and optimizer(parameters))

    runs = {
        "beam tree": step(beam, reached, xs.optim.RowAdam),
        "NCE-10": step(nce, target, xs.optim.RowAdam)
    }
    seconds = bench.steps(runs)
    title = "beam tree, 5 candidates + 5 noise samples, N 1M, Q 256"
    bench.ratio(f"{title}: step / NCE-10", seconds, "beam tree", "NCE-10", "3")
    bench.launches(title, runs, seconds)
    table = bench.table(bench.classes, bench.width)
    with torch.no_grad():
        seconds = bench.steps({
            "beam search": lambda: beam.topk(input, 5), "matmul + topk": lambda:
            (input @ table.T).topk(5)
        })
    bench.ratio("top-5 by beam search, N 1M, Q 256 / matmul + topk", seconds, "beam search",
                "matmul + topk")
    del beam, runs
    exact = xs.LinearCrossEntropyLoss(bench.width, bench.classes, device=bench.device)
    hierarchical = xs.HierarchicalSoftmaxLoss(bench.width, tree).to(bench.device)
    seconds = bench.steps(
        {"hierarchical": step(hierarchical, target), "exact": step(exact, target)})
    bench.ratio("hierarchical softmax, b 10, N 1M, Q 256, forward + backward / exact loss", seconds,
                "hierarchical", "exact")
