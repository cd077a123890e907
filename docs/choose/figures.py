"""Draws the figures of docs/choose, one per page, from measured data.

    # measures all, about ten minutes on a quiet machine
    python docs/choose/figures.py --measure
    # measures one
    python docs/choose/figures.py --measure loss
    # draws them again from the JSON files
    python docs/choose/figures.py
"""

import argparse
import copy
import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
from matplotlib.ticker import StrMethodFormatter
from torch import nn

import xsoftmax as xs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = HERE / "figures"
sys.path += [str(ROOT / "benchmarks"), str(ROOT)]
import advise as language  # noqa: E402  (benchmarks/advise.py: a small language model)
from common.pictures import picture  # noqa: E402  (benchmarks/common/pictures.py)
from common.timing import interleave, machine  # noqa: E402

from examples.language_model.data import load_corpus  # noqa: E402

CLASSES = (1_000, 10_000, 100_000, 1_000_000)
WIDTH, QUERIES = 64, 256


def step_of(loss, optimizer=None):
    """Times a training step: forward pass, backward pass and optimizer."""
    torch.manual_seed(0)
    hidden, target = torch.randn(QUERIES, WIDTH), torch.randint(loss.num_classes, (QUERIES,))
    optimizer = (optimizer or xs.optim.RowAdam)(loss.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(hidden.requires_grad_(), target).backward()
        optimizer.step()

    return step


class Plain(nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        self.num_classes, self.linear = classes, nn.Linear(width, classes, bias=False)

    def forward(self, input, target):
        return nn.functional.cross_entropy(self.linear(input), target)


def milliseconds(runs: dict, repeats: int) -> dict:
    return {
        name: 1e3 * seconds
        for name, seconds in interleave(runs, repeats, warmup=2, clock=time.process_time).items()
    }


def measure_loss() -> dict:
    rows = []
    for classes in CLASSES:
        losses = {
            "nn.Linear + nn.CrossEntropyLoss": (Plain(WIDTH, classes), torch.optim.Adam),
            "LinearCrossEntropyLoss": (xs.LinearCrossEntropyLoss(WIDTH, classes), None),
            "SampledSoftmaxLoss": (xs.SampledSoftmaxLoss(WIDTH, classes, sampler="uniform",
                                                         num_samples=min(512, classes // 2)), None)
        }
        rows.append({
            "classes": classes,
            **milliseconds({name: step_of(*parts)
                            for name, parts in losses.items()}, 3 if classes > 100_000 else 7)
        })
    return {"rows": rows}


def trained(steps: int = 300):
    """Returns (corpus, encoder, loss, counts) of a briefly trained language model."""
    torch.manual_seed(0)
    corpus = load_corpus(None, max_tokens=1_000_000)
    counts = corpus.counts.clamp(min=1)
    encoder = language.Encoder(len(counts))
    loss = xs.SampledSoftmaxLoss(language.WIDTH, len(counts), bias=True,
                                 sampler=xs.samplers.UnigramSampler(counts, 512), head_classes=512)
    language.train(encoder, loss, corpus.train, 0, steps=steps)
    return corpus, encoder, loss, counts


def measure_sampler() -> dict:
    done = subprocess.run([sys.executable, ROOT / "benchmarks/advise.py", "--json"],
                          capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure_draws() -> dict:
    corpus, encoder, loss, counts = trained()
    words, target = next(language.batches(corpus.train, torch.Generator().manual_seed(1)))
    advice = xs.advise(loss,
                       encoder(words).detach(), target, 60, counts=counts,
                       samplers=["unigram", "uniform"], draws=[32, 128, 512, 2048])
    return {
        "classes": len(counts),
        "rows": [{"loss": row.name, "ms": row.ms, "bias": row.bias, "noise": row.noise}
                 for row in advice.rows if row.name.startswith(("unigram", "uniform", "head"))]
    }


def measure_estimator() -> dict:
    corpus, encoder, loss, counts = trained()
    before, rows = language.exact_loss(encoder, loss, corpus.valid), []
    for estimator in ("sampled_softmax", "ranking", "cane", "nce", "one_vs_each",
                      "negative_sampling"):
        for draws in (20, 100):
            sampler = xs.samplers.UnigramSampler(counts, draws, shared=False)
            other = xs.SampledSoftmaxLoss(language.WIDTH, len(counts), bias=True, sampler=sampler,
                                          estimator=estimator,
                                          head_classes=20 if estimator == "cane" else 0)
            other.load_state_dict(
                {name: value.clone()
                 for name, value in loss.state_dict().items()}, strict=False)
            encoder_ = copy.deepcopy(encoder)
            language.train(encoder_, other, corpus.train, 2, steps=200)
            rows.append({
                "estimator": estimator, "draws": draws,
                "exact loss": language.exact_loss(encoder_, other, corpus.valid)
            })
    return {"classes": len(counts), "before": before, "rows": rows}


def measure_trees() -> dict:
    rows = []
    for classes in CLASSES:
        torch.manual_seed(0)
        tree = xs.LabelTree.balanced(classes, 10)
        beam = xs.BeamTreeLoss(WIDTH, tree, num_candidates=9, num_noises=1)
        plain = xs.SampledSoftmaxLoss(WIDTH, classes, sampler="uniform", num_samples=100)
        steps = milliseconds({"BeamTreeLoss": step_of(beam), "SampledSoftmaxLoss": step_of(plain)},
                             7)
        query = torch.randn(QUERIES, WIDTH)
        beam.eval(), plain.eval()
        with torch.no_grad():
            found = milliseconds(
                {
                    "BeamTreeLoss": lambda: beam.topk(query, 5),
                    "SampledSoftmaxLoss": lambda: plain.topk(query, 5)
                }, 5)
        rows.append({"classes": classes, "step": steps, "topk": found})
    return {"rows": rows}


def measure_optimizer() -> dict:
    rows = []
    for classes in CLASSES:

        def loss(sparse: bool) -> xs.SampledSoftmaxLoss:
            return xs.SampledSoftmaxLoss(WIDTH, classes, sampler="uniform",
                                         num_samples=min(512, classes // 2), sparse_grad=sparse)

        runs = {
            "torch.optim.Adam": step_of(loss(False), torch.optim.Adam),
            "torch.optim.SparseAdam": step_of(loss(True), torch.optim.SparseAdam),
            "RowAdam": step_of(loss(True), xs.optim.RowAdam)
        }
        rows.append({"classes": classes, **milliseconds(runs, 7)})
    return {"rows": rows}


def measure_precision() -> dict:
    """Measures the bytes per class of width 256, table row and optimizer state, after a step."""
    rows, width, classes = [], 256, 100_000
    optimizers = {
        "RowAdam": (xs.optim.RowAdam, {}),
        "RowAdam, row_wise": (xs.optim.RowAdam, {"row_wise": True}),
        "RowAdagrad, row_wise": (xs.optim.RowAdagrad, {"row_wise": True}),
        "RowSGD": (xs.optim.RowSGD, {})
    }
    for name, (optimizer, options) in optimizers.items():
        for dtype in (torch.float32, torch.bfloat16):
            loss = xs.SampledSoftmaxLoss(width, classes, sampler="uniform", num_samples=64,
                                         dtype=dtype)
            rounded = {} if dtype == torch.float32 else {
                "stochastic_rounding": True, "state_dtype": torch.bfloat16
            }
            made = optimizer(loss.parameters(), lr=0.1, **options, **rounded)
            loss(torch.randn(8, width, dtype=dtype), torch.randint(classes, (8,))).backward()
            made.step()
            table = loss.linear.weight
            state = sum(value.numel() * value.element_size()
                        for value in made.state[table].values() if isinstance(value, torch.Tensor))
            rows.append({
                "optimizer": name, "dtype": str(dtype).removeprefix("torch."),
                "table": table.element_size() * width, "state": state / classes
            })
    return {"width": width, "rows": rows}


# ---- pictures


def lines(axes, rows: list, names: list, label: str) -> None:
    for name in names:
        axes.plot([row["classes"] for row in rows], [row[name] for row in rows], label=name)
    axes.set(xscale="log", yscale="log", xlabel="number of classes", ylabel=label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.legend()


def draw_loss(data: dict, figure) -> None:
    lines(figure.subplots(), data["rows"], [name for name in data["rows"][0] if name != "classes"],
          "ms per training step")


def draw_sampler(data: dict, figure) -> None:
    axes, rows = figure.subplots(), data["rows"]
    for name in ("unigram", "head", "midx", "uniform", "in_batch", "exact"):
        part = [row for row in rows if row["loss"].startswith(name)]
        axes.plot([row["error"] for row in part], [row["trained"] for row in part],
                  linestyle="none", label=name if name != "head" else "with a head")
    axes.axhline(data["before"], color="#808080", linestyle="--", linewidth=1, marker="")
    axes.set(xlabel="error according to xs.advise",
             ylabel=f"exact loss after {data['seconds']:g} s "
             "of training")
    axes.legend()


def draw_draws(data: dict, figure) -> None:
    axes = figure.subplots()
    for name, label in (("uniform", "uniform"), ("unigram", "unigram"),
                        ("head", "head and unigram, half each")):
        part = sorted((row for row in data["rows"] if row["loss"].startswith(name)),
                      key=lambda row: int(row["loss"].split()[-1]))
        scored = [int(row["loss"].split()[-1]) * (2 if name == "head" else 1) for row in part]
        axes.plot(scored, [(row["bias"]**2 + row["noise"]**2)**0.5 for row in part], label=label)
    axes.set(xscale="log", yscale="log", xlabel="classes scored per step",
             ylabel="distance from the exact gradient")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend()


def draw_estimator(data: dict, figure) -> None:
    axes, rows = figure.subplots(), data["rows"]
    names = list(dict.fromkeys(row["estimator"] for row in rows))
    for shift, draws in ((0.2, 20), (-0.2, 100)):
        part = {row["estimator"]: row["exact loss"] for row in rows if row["draws"] == draws}
        axes.barh([place + shift for place in range(len(names))], [part[name] for name in names],
                  height=0.36, label=f"{draws} samples per query")
    axes.axvline(data["before"], color="#808080", linestyle="--", linewidth=1, marker="")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="exact loss after 200 steps "
             "(dashed: before)")
    axes.set_xlim(left=0.9 * min(row["exact loss"] for row in rows),
                  right=min(1.1 * max(row["exact loss"] for row in rows), 2.5 * data["before"]))
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2)


def draw_trees(data: dict, figure) -> None:
    for axes, what, label in zip(figure.subplots(1, 2), ("step", "topk"),
                                 ("ms per training step", "ms for the best five classes")):
        rows = [{"classes": row["classes"], **row[what]} for row in data["rows"]]
        lines(axes, rows, ["BeamTreeLoss", "SampledSoftmaxLoss"], label)


def draw_optimizer(data: dict, figure) -> None:
    lines(figure.subplots(), data["rows"],
          ["torch.optim.Adam", "torch.optim.SparseAdam", "RowAdam"], "ms per training step")


def draw_precision(data: dict, figure) -> None:
    axes, rows = figure.subplots(), data["rows"]
    labels = [f"{row['optimizer']}, {row['dtype']}" for row in rows]
    axes.barh(labels, [row["table"] for row in rows], label="table")
    axes.barh(labels, [row["state"] for row in rows], left=[row["table"] for row in rows],
              label="optimizer state")
    axes.set(xlabel=f"bytes per class of width {data['width']}")
    axes.invert_yaxis()
    axes.legend()


NAMES = ("loss", "sampler", "draws", "estimator", "trees", "optimizer", "precision")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"out of {', '.join(NAMES)}; default: all")
    parser.add_argument("--measure", action="store_true", help="measure first, with one thread")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in args.names or NAMES:
        if name not in NAMES:
            parser.error(f"expected names out of {', '.join(NAMES)}, got {name!r}")
        path = FOLDER / f"{name}.json"
        if args.measure:
            torch.set_num_threads(1)
            torch.manual_seed(0)
            found = {
                "machine": machine(), "command": "python docs/choose/figures.py --measure "
                f"{name}", "date": f"{date.today()}"
            }
            found |= globals()[f"measure_{name}"]()
            path.write_text(json.dumps(found, indent=1) + "\n")
        with picture(FOLDER / f"{name}.svg", 9 if name == "trees" else 6.4) as figure:
            globals()[f"draw_{name}"](json.loads(path.read_text()), figure)


if __name__ == "__main__":
    main()
