"""Measures how far the proposals of samplers are from the softmax of a language model.

    python benchmarks/sampler_distance.py --data ptb --out out/distance [--epochs 4] [--untrained]
                                          [--samples 20] [--threads 1] [--json [FILE]]

The model is trained with the exact loss by examples/language_model, or has random weights
(--untrained); its queries are those of the first batch of the validation text. KL is KL(q || p) of
proposal q and softmax p. Its bound, after Chen et al. (2025), Theorems 3 to 5, is the range of
s - log q over the classes with scores s: 2 max |s| bounds the range of uniform samples, and the
residual scores that of MIDX. Renyi is the divergence log d with d = E_p[p / q], the paper's "KL
loss" (Table 5). The gradient's bias has the bound sqrt((d - 1) / (M + 1)) with M samples, in units
of the largest gradient of a score (Theorem 6). All are means over queries; bias and noise are
relative to the exact gradient.

Besides the samplers of the paper there are other weights of the sphere kernel, other temperatures
of RFF, and MIDX whose codebooks learned from an epoch of the training text with the model fixed.
The plot shows the samples of each proposal of the paper by frequency.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import xsoftmax as xs
from common import ROOT
from common.files import checksum
from common.methods import PAPER_SAMPLERS
from common.processes import interruptible, run_program
from common.records import add_json, plot, report, table

from examples.common.losses import SamplerOptions, build_sampler, codebook_loss
from examples.common.training import load_run
from examples.language_model import compare_samplers, train


def checkpoint_of(args: argparse.Namespace) -> Path:
    """Trains the model, or goes on, and returns its checkpoint."""
    # The example takes no step count of 0: one step at this rate changes no weight.
    epochs, lr = (1e-6, 1e-30) if args.untrained else (args.epochs, 4e-3)
    model = "untrained" if args.untrained else f"epochs{epochs:g}"
    folder = args.out / f"{Path(args.data).name}.{checksum(args.data)}.{model}"
    path, finished = folder / "model.ckpt", folder / "finished"
    if not finished.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "--data": args.data, "--min-count": 1, "--loss": "exact", "--optimizer": "adam",
            "--epochs": epochs, "--lr": lr, "--schedule": "cosine", "--width": 128, "--layers": 1,
            "--dropout": 0.2, "--threads": args.threads, "--output": folder, "--checkpoint": path
        }
        command = [
            sys.executable,
            str(ROOT / "examples/language_model/train.py"),
            *(str(word) for option in options.items() for word in option),
            *(["--resume"] if path.is_file() else [])
        ]
        with open(folder / "log.txt", "a") as log:
            code = run_program(command, stdout=log, stderr=log)
        if code:
            raise SystemExit(f"{' '.join(command)}: exit {code}, see {folder / 'log.txt'}")
        finished.touch()
    return path


# Kinds of samplers and their arguments, by name.
SAMPLERS: dict[str, tuple[str, dict]] = {
    kind: (kind, {})
    for kind in PAPER_SAMPLERS
} | {
    f"sphere, weight {weight:,g}": ("sphere", {"alpha": weight})
    for weight in (0.01, 1.0, 10_000.0)
} | {f"rff, temperature {tau:g}": ("rff", {"tau": tau})
     for tau in (1.0, 16.0)
     } | {kind: (kind, {})
          for kind in ("midx_learnable_pq", "midx_learnable")}


def sampled_loss(name: str, args: argparse.Namespace, run: train.Run,
                 counts: Tensor) -> xs.SampledSoftmaxLoss:
    """Returns a loss over the table of the model, whose sampler has an index of that table."""
    torch.manual_seed(0)
    linear, (kind, arguments) = run.loss.linear, SAMPLERS[name]
    dim, bias = linear.in_features, linear.bias is not None
    if arguments:
        sampler = xs.samplers.make_sampler(kind, len(counts), args.samples, dim=dim, bias=bias,
                                           refresh_every=0, **arguments)
    else:
        options = SamplerOptions(codewords=args.codewords, refresh_every=0)
        sampler = build_sampler(options, kind, counts, dim, args.samples, bias=bias, private=True)
    # Use one estimator for all: "ranking", the default of some samplers, follows another gradient.
    loss = xs.SampledSoftmaxLoss.from_linear(linear, sampler=sampler, estimator="sampled_softmax")
    loss.sampler.refresh(linear.weight, linear.bias)
    if "learnable" in kind:
        learn_codebooks(loss, run, args.codebook_steps)
        loss.sampler.refresh(linear.weight, linear.bias)
    return loss


def learn_codebooks(loss: xs.SampledSoftmaxLoss, run: train.Run, steps: int) -> None:
    """Trains the codebooks of a sampler on the first batches of the training text."""
    optimizer, state = torch.optim.Adam(loss.sampler.parameters(), lr=4e-3), []
    for i in range(min(steps, len(run.parts["train"]))):
        hidden, state = run.encoder(run.parts["train"][i][0], state)
        optimizer.zero_grad()
        with torch.enable_grad():
            codebook_loss(loss, hidden).backward()
        optimizer.step()


def bounds(loss: xs.SampledSoftmaxLoss, exact: xs.LinearLoss, queries: Tensor,
           samples: int) -> tuple[float, float]:
    """Returns the means over queries of the bounds of KL and of the gradient's bias."""
    kl_bound = bias_bound = 0.0
    for part in queries.split(compare_samplers.QUERY_BLOCK):
        log_p, log_q = (log.double()
                        for log in (exact.log_prob(part), xs.proposal_log_prob(loss, part)))
        residual = log_p - log_q
        kl_bound += float((residual.amax(1) - residual.amin(1)).sum())
        excess = (log_p + residual).logsumexp(1).expm1().clamp(min=0)
        bias_bound += float((excess / (samples + 1)).sqrt().sum())
    return kl_bound / len(queries), bias_bound / len(queries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as in examples/language_model/train.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--codewords", type=int, default=64)
    parser.add_argument("--codebook-steps", type=int, default=sys.maxsize,
                        help="batches of training text from which codebooks learn (default: all)")
    parser.add_argument("--draws", type=int, default=64, help="samples of each gradient")
    parser.add_argument("--threads", type=int, default=1)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run, corpus = load_run(checkpoint_of(args), train)
    queries, target = compare_samplers.hidden_states(run, batches=1)
    classes = len(corpus.counts)
    ranks = sorted({round(classes**(i / 99)) for i in range(100)})

    def shares(probability: Tensor) -> list[tuple[float, float]]:
        found = probability.cumsum(0)
        return [(rank, round(float(found[rank - 1]), 5)) for rank in ranks]

    with torch.no_grad():
        curves = {"softmax": shares(compare_samplers.mean_probability(run.loss.log_prob, queries))}
        rows = []
        for name in SAMPLERS:
            loss = sampled_loss(name, args, run, corpus.counts)
            found = xs.diagnose(loss, queries, target, draws=args.draws)
            if name in PAPER_SAMPLERS:
                curves[name] = shares(
                    compare_samplers.mean_probability(lambda part: xs.proposal_log_prob(loss, part),
                                                      queries))
            kl_bound, bias_bound = bounds(loss, run.loss, queries, args.samples)
            rows.append({
                "sampler": name, "KL": f"{found.kl:.3f}", "bound of KL": f"{kl_bound:.2f}",
                "Renyi": f"{found.renyi:.3f}", "gradient bias": f"{found.gradient_bias:.3f}",
                "bound of bias": f"{bias_bound:.3g}",
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
    interruptible(main)
