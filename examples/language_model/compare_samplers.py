"""Compares samplers with the softmax of a trained model: a table (xs.diagnose), and a plot of the
words that each sampler draws.

    python examples/language_model/train.py --loss exact --checkpoint out/model.ckpt
    python examples/language_model/compare_samplers.py --checkpoint out/model.ckpt --samples 20
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import xsoftmax as xs

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common.arguments import positive, report_errors
from examples.common.errors import UsageError
from examples.common.losses import SAMPLERS, SamplerOptions, build_sampler
from examples.common.report import drawing, markdown, write_text
from examples.common.training import load_run
from examples.language_model import data, train

QUERY_BLOCK = 256  # number of queries whose probabilities [queries, words] are in memory at once


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    # Without the sampler whose candidates are the batch's targets, and without learnable codewords,
    # which only training makes different from midx's.
    samplers = [name for name in SAMPLERS if name != "in_batch" and "learnable" not in name]
    parser.add_argument("--checkpoint", metavar="PATH", type=Path, required=True,
                        help="checkpoint written by train.py")
    parser.add_argument("--sampler", nargs="+", choices=samplers, default=samplers,
                        help="default: all")
    parser.add_argument("--samples", type=positive(int), default=20, help="samples per word "
                        "(default: %(default)s)")
    parser.add_argument("--codewords", type=positive(int), default=64, help="codewords of each "
                        "midx codebook (default: "
                        "%(default)s)")
    parser.add_argument("--distinct", action="store_true", help="midx samples without replacement "
                        "for each query")
    parser.add_argument(
        "--head", type=int, default=0, help="number of most frequent words that "
        "are always scored (default: %(default)s)")
    parser.add_argument("--estimator", choices=torch.ops.xsoftmax.estimator_names(),
                        default="sampled_softmax", help="of all samplers (default: %(default)s)")
    parser.add_argument("--draws", type=positive(int), default=32, help="how often each sampler "
                        "draws (default: "
                        "%(default)s)")
    parser.add_argument("--batches", type=positive(int), default=1, help="number of batches of "
                        "validation text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("out/samplers"),
                        help="default: %(default)s")
    return parser.parse_args(argv)


@torch.no_grad()
def hidden_states(run: train.Run, batches: int) -> tuple[Tensor, Tensor]:
    """Returns queries [Q, D] and their words [Q] from the first batches of the validation text."""
    run.encoder.eval()
    parts, state = [], []
    for i in range(min(batches, len(run.parts["valid"]))):
        inputs, targets, _ = run.parts["valid"][i]
        hidden, state = run.encoder(inputs, [] if run.args.stateless else state)
        parts.append((hidden.flatten(0, 1), targets.flatten()))
    hidden, target = (torch.cat(part) for part in zip(*parts))
    counted = target != data.Batches.IGNORED
    return hidden[counted], target[counted]


@torch.no_grad()
def mean_probability(log_prob, queries: Tensor) -> Tensor:
    """Returns the mean probability of each word [N] over the queries."""
    return sum(log_prob(part).double().exp().sum(0)
               for part in queries.split(QUERY_BLOCK)) / len(queries)


def compare(args: argparse.Namespace) -> int:
    run, corpus = load_run(args.checkpoint, train)
    if not isinstance(run.loss, xs.LinearLoss):
        raise UsageError("--checkpoint: expected a model whose words have rows of their own, got "
                         f"one of {type(run.loss).__name__}")
    linear = run.loss.linear
    if args.draws < 2:
        raise UsageError(f"--draws: expected at least 2, got {args.draws}")
    if args.head < 0 or args.head + args.samples > linear.out_features:
        raise UsageError("--head and --samples: expected 0 or more, and no more than the "
                         f"{linear.out_features} words of {corpus.name} together, "
                         f"got {args.head} and {args.samples}")
    queries, target = hidden_states(run, args.batches)
    curves = {"softmax": mean_probability(run.loss.log_prob, queries)}
    rows = []
    for kind in tqdm(args.sampler, disable=not sys.stderr.isatty()):
        torch.manual_seed(args.seed)
        options = SamplerOptions(args.codewords, args.distinct, refresh_every=0)
        try:
            sampler = build_sampler(options, kind, corpus.counts, linear.in_features, args.samples,
                                    bias=True, private=True)
        except ValueError as error:  # an option outside the range that a sampler supports
            raise UsageError(str(error)) from error
        loss = xs.SampledSoftmaxLoss.from_linear(linear, sampler=sampler, head_classes=args.head,
                                                 estimator=args.estimator)
        loss.sampler.refresh(linear.weight, linear.bias)
        report = xs.diagnose(loss, queries, target, draws=args.draws)
        curves[kind] = mean_probability(lambda part: xs.proposal_log_prob(loss, part), queries)
        rows.append({"sampler": kind} | {
            name.replace("_", " "): f"{value:.3g}"
            for name, value in dataclasses.asdict(report).items()
        })
    table = markdown(rows)
    args.output.mkdir(parents=True, exist_ok=True)
    write_text(args.output / "samplers.md", table)
    plot(curves, f"{len(queries):,} queries of {corpus.name}", args.output / "samplers.png")
    print(f"{table}\n{args.output}: samplers.md, samplers.png")
    return 0


def plot(curves: dict[str, Tensor], title: str, path: Path):
    """Plots the fraction of samples among the r most frequent words against r; the softmax in
    black."""
    with drawing(path) as axes:
        for name, probability in curves.items():
            black = {"color": "black", "linewidth": 2} if name == "softmax" else {}
            axes.plot(range(1,
                            len(probability) + 1),
                      probability.cumsum(0).cpu(), label=name, **black)
        axes.set_xscale("log")
        axes.set_xlabel("words by falling frequency")
        axes.set_ylabel("cumulative probability of a draw, mean over queries")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend()


def main(argv: list[str] | None = None) -> int:
    return report_errors(compare, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
