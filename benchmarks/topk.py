"""Compares `topk` with scoring all classes, log_softmax and torch.topk, eager and compiled.

    python benchmarks/topk.py [--threads 2] [--repeats 21] [--only classes,seen] [--json [FILE]]

256 queries of width 64, 100,000 classes. All return log probabilities and ids. With "seen", 200
random ids are left out for each query, as a recommender leaves out the items that a user already
has; the rivals set their logits to -inf.
"""

from typing import Optional

import torch
from torch import Tensor

import xsoftmax as xs
from common.records import run_benches
from common.timing import interleave

QUERIES, WIDTH, CLASSES, SEEN = 256, 64, 100_000, 200


def figures(args, exclude: Optional[Tensor]) -> list[dict]:
    """Returns the ratios to both rivals for several k."""
    loss = xs.LinearCrossEntropyLoss(WIDTH, CLASSES).eval()
    torch.nn.init.normal_(loss.linear.weight, std=0.5)
    input, found = torch.randn(QUERIES, WIDTH), []

    def plain(k: int) -> tuple[Tensor, Tensor]:
        logits = loss.linear(input)
        if exclude is not None:
            logits = logits.scatter(1, exclude, float("-inf"))
        return tuple(torch.log_softmax(logits, 1).topk(k))

    # One function is compiled anew for each k; beyond a limit torch would run it eagerly.
    torch.compiler.reset()
    compiled = torch.compile(plain, dynamic=False)
    for k in (1, 10, 100, 1000):
        with torch.no_grad():
            medians = interleave(
                {
                    "eager": lambda k=k: plain(k), "compiled": lambda k=k: compiled(k),
                    "topk": lambda k=k: loss.topk(input, k, exclude=exclude)
                }, args.repeats)
        text = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in medians.items())
        found += [{
            "figure": f"k = {k:,} / {rival}", "value": round(medians["topk"] / medians[rival], 3),
            "medians": text
        } for rival in ("eager", "compiled")]
    return found


def bench_classes(args) -> list[dict]:
    """The best k classes"""
    return figures(args, None)


def bench_seen(args) -> list[dict]:
    """The best k classes without 200 that were seen"""
    return figures(args, torch.rand(QUERIES, CLASSES).topk(SEEN).indices)


if __name__ == "__main__":
    run_benches(
        __doc__, {"classes": bench_classes, "seen": bench_seen},
        question="How long do the best classes of a plain table take?",
        against=f"F.linear, log_softmax and torch.topk, torch {torch.__version__}, eager and "
        "under torch.compile")
