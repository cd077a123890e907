"""Measures how far the proposals of samplers are from the softmax of a language model.

    python benchmarks/sampler_distance.py --data ptb --out out/distance [--epochs 4] [--untrained]
                                          [--samples 20] [--threads 1] [--json [FILE]]

The model is trained with the exact loss by examples/language_model, or has random weights
(--untrained); its queries are those of the first batch of the validation text. KL is KL(q || p) of
proposal q and softmax p. Its bound, after Chen et al. (2025), Theorems 3 to 5, is the range of
s - log q over the classes with scores s: 2 max |s| bounds the range of uniform samples, and the
residual scores that of MIDX. The gradient's bias has the bound sqrt((d - 1) / (M + 1)) with
d = E_p[p / q] and M samples, in units of the largest gradient of a score (Theorem 6). Both bounds
are means over queries; bias and noise are relative to the exact gradient. The plot shows the
samples of each proposal by frequency.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import xsoftmax as xs
from pictures import plot
from records import add_json, report, table
from study import ROOT

from examples.common.losses import build_sampler
from examples.language_model import compare_samplers

SAMPLERS = ("uniform", "unigram", "lsh", "sphere", "rff", "midx_pq", "midx")
BLOCK = 256  # queries whose probabilities are in memory at once


def checkpoint_of(args: argparse.Namespace) -> Path:
    """Trains the model, if it is not trained yet, and returns its checkpoint."""
    path = args.out / ("untrained.ckpt" if args.untrained else "trained.ckpt")
    if not path.is_file():
        args.out.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            str(ROOT / "examples/language_model/train.py"), "--data", args.data, "--min-count", "1",
            "--loss", "exact", "--epochs",
            str(1e-6 if args.untrained else args.epochs), "--lr",
            "1e-30" if args.untrained else "0.004", "--width", "128", "--layers", "1", "--dropout",
            "0.2", "--schedule", "cosine", "--threads",
            str(args.threads), "--output",
            str(args.out / "model"), "--checkpoint",
            str(path)
        ]
        with open(args.out / "log.txt", "a") as log:
            code = subprocess.run(command, stdout=log, stderr=log).returncode
        if code:
            raise SystemExit(f"{' '.join(command)}: exit {code}, see {args.out / 'log.txt'}")
    return path


def bound_of_kl(loss: xs.SampledSoftmaxLoss, exact: xs.LinearLoss, queries: Tensor) -> float:
    """Returns the mean range of s - log q."""
    total = 0.0
    for part in queries.split(BLOCK):
        residual = exact.log_prob(part).double() - xs.proposal_log_prob(loss, part).double()
        total += float((residual.amax(1) - residual.amin(1)).sum())
    return total / len(queries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as in examples/language_model/train.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--codewords", type=int, default=64)
    parser.add_argument("--draws", type=int, default=64, help="samples of each gradient")
    parser.add_argument("--threads", type=int, default=1)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run, corpus = compare_samplers.load_run(checkpoint_of(args))
    queries, target = compare_samplers.hidden_states(run, batches=1)
    linear, classes = run.loss.linear, len(corpus.counts)
    ranks = sorted({round(classes**(i / 99)) for i in range(100)})

    def shares(probability: Tensor) -> list[tuple[float, float]]:
        found = probability.cumsum(0)
        return [(rank, round(float(found[rank - 1]), 5)) for rank in ranks]

    with torch.no_grad():
        curves = {"softmax": shares(compare_samplers.mean_probability(run.loss.log_prob, queries))}
        rows = []
        for kind in SAMPLERS:
            torch.manual_seed(0)
            options = argparse.Namespace(codewords=args.codewords, distinct=False, refresh_every=0)
            sampler = build_sampler(options, kind, corpus.counts, linear.in_features, args.samples,
                                    bias=linear.bias is not None, private=True)
            loss = xs.SampledSoftmaxLoss.from_linear(linear, sampler=sampler)
            loss.sampler.refresh(linear.weight, linear.bias)
            found = xs.diagnose(loss, queries, target, draws=args.draws)
            curves[kind] = shares(
                compare_samplers.mean_probability(lambda part: xs.proposal_log_prob(loss, part),
                                                  queries))
            rows.append({
                "sampler": kind, "KL": f"{found.kl:.3f}",
                "bound of KL": f"{bound_of_kl(loss, run.loss, queries):.2f}",
                "gradient bias": f"{found.gradient_bias:.3f}",
                "bound of bias": f"{math.sqrt(math.expm1(found.renyi) / (args.samples + 1)):.2f}",
                "gradient noise": f"{found.gradient_noise:.2f}",
                "log Z bias": f"{found.log_z_bias:.3f}"
            })
    model = "untrained" if args.untrained else f"{args.epochs:g} epochs"
    report(
        args, __doc__, question="How far is each sampler's proposal from the softmax?",
        against="the softmax over all classes", threads=args.threads, tables=[
            table(
                rows, f"{Path(corpus.name).name}, {classes:,} words, {model}, "
                f"{args.samples} samples, {args.codewords} codewords")
        ], plot=plot("the most frequent words", "share of the samples", curves, log="x"))


if __name__ == "__main__":
    main()
