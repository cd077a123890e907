"""Trains the GPT of examples/gpt with several output layers for the same time, and compares their
exact validation losses.

    python benchmarks/gpt.py --data novels --out out/gpt [--minutes 20] [--loss plain sampled midx]
                             [--threads 1] [--json [FILE]] [-- OPTIONS of examples/gpt/train.py]

The output layers take turns between evaluations, so a machine that becomes slower slows all of
them. Evaluation and compilation do not count as training time. The same command continues after an
interruption. The last table is the advice of `xs.advise` for a batch of the first trained model.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

import xsoftmax as xs
from common import ROOT
from common.processes import interruptible, run_program
from common.records import add_json, plot, report, table
from common.timing import interleave

from examples.gpt import train as gpt
from examples.gpt.report import points_of, seconds_to_reach

NAMES = {
    "plain": "F.linear + F.cross_entropy", "exact": "xs.LinearCrossEntropyLoss",
    "sampled": "xs.SampledSoftmaxLoss, unigram", "midx": "xs.SampledSoftmaxLoss, MIDX",
    "liger": "Liger", "cce": "Cut Cross-Entropy"
}


def train(args: argparse.Namespace) -> dict:
    """Trains, or goes on, and returns the metrics of the example."""
    checkpoint = args.out / "checkpoint.pt"
    command = [
        sys.executable,
        str(ROOT / "examples/gpt/train.py"), *example_arguments(args), "--loss", *args.loss,
        "--output",
        str(args.out), "--checkpoint",
        str(checkpoint), *(["--resume"] if checkpoint.is_file() else [])
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "log.txt", "a") as log:
        code = run_program(command, stdout=log, stderr=log)
    if code != 0:
        raise SystemExit(f"{' '.join(command)}: exit {code}, see {args.out / 'log.txt'}")
    return json.loads((args.out / "history.json").read_text())


def example_arguments(args: argparse.Namespace) -> list[str]:
    return [
        *(["--data", args.data] if args.data else []), "--max-minutes",
        str(args.minutes), "--threads",
        str(args.threads), "--eval-epochs", "1e9", *args.options
    ]


def advice(args: argparse.Namespace) -> list[dict]:
    """Returns the advice on a batch of the model that the first loss trained, best first."""
    torch.set_num_threads(args.threads)
    options = gpt.parse_arguments([*example_arguments(args), "--loss", "exact"])
    text = gpt.load_text(options)
    run = gpt.Run("exact", text, options)
    state = torch.load(args.out / "checkpoint.pt", weights_only=True)["runs"][args.loss[0]]
    run.encoder.load_state_dict(state["encoder"])
    with torch.no_grad():
        run.table.weight.copy_(state["loss"]["linear.weight"])
    inputs, targets = run.windows["train"].batch(0, options.batch_size, slice(None))

    def hidden() -> torch.Tensor:
        with gpt.autocast(options):
            return run.encoder(inputs)

    seconds = interleave({"model": lambda: hidden().sum().backward()}, 5, 1)["model"]
    found = xs.advise(run.loss,
                      hidden().detach().float(), targets, counts=text.counts, seconds=60,
                      model_ms=1e3 * seconds)
    return [{
        "xs.advise": row.name, "ms per step": f"{row.ms:.0f}", "bias": f"{row.bias:.3f}",
        "noise": f"{row.noise:.2f}", "error": f"{row.error:.3f}"
    } for row in found.rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="as in examples/gpt/train.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the run; kept "
                        "between calls")
    parser.add_argument("--minutes", type=float, default=20, help="training time of each output "
                        "layer (default: %(default)s)")
    parser.add_argument("--loss", nargs="+", choices=NAMES, default=["plain", "sampled", "midx"])
    parser.add_argument("--threads", type=int, default=1)
    add_json(parser)
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.options = argv[end + 1:]
    found = train(args)
    text, runs = found["text"], found["runs"]
    curves = {NAMES[run["loss"]]: points_of(run) for run in runs}
    first = NAMES["plain"] if "plain" in args.loss else NAMES[args.loss[0]]
    goal = curves[first][-1]
    rows, marks = [], range(1, 1 + max(map(len, curves.values())))
    for run in runs:
        name, points = NAMES[run["loss"]], curves[NAMES[run["loss"]]]
        reached = seconds_to_reach(points, goal["loss"])
        losses = {
            f"{args.minutes * mark / len(marks):.3g} min": f"{point['loss']:.3f}"
            for mark, point in zip(marks, points)
        }
        rows.append({
            "output layer": name, "ms per step": f"{1e3 * run['train_seconds'] / run['steps']:.0f}",
            "tokens": f"{run['tokens']:,}", **losses, "test": f"{run['test_loss']:.3f}",
            f"time to {first}'s loss / its time": f"{reached / goal['seconds']:.2f}"
            if reached else "not reached"
        })
    sizes = {
        "text": text["name"].rpartition("/")[2], "tokens": f"{text['num_tokens']:,} {text['unit']}",
        "training text": f"{text['sizes']['train']:,} tokens"
    }
    report(
        args, __doc__, question="Does a GPT reach a lower loss in the same time with samples?",
        against="F.linear + F.cross_entropy under torch.compile, fused AdamW", threads=args.threads,
        tables=[table(rows), table([sizes]), table(advice(args))], plot=plot(
            "seconds of training", "validation loss, nats per token", {
                name: [(point["seconds"], point["loss"]) for point in points]
                for name, points in curves.items()
            }))


if __name__ == "__main__":
    interruptible(main)
