"""Compares XR-Linear with libpecos and omikuji: training, trees, latency, size and precision on the
same data sets.

    python benchmarks/extreme_labels.py --out out/extreme --pecos-python PYTHON \\
        [--omikuji-python PYTHON] [--threads 2] [--repeats 3] [--delicious delicious.arff] \\
        [--gowalla FOLDER] [--novels novels.tar.xz] [--generated] [--trees 3] [--json [FILE]]

Each run is a separate process (extreme_side.py), with the libraries in turn. Results are medians
over --repeats; within a run, the median of single queries and the best of five batches. Training
consists of label vectors (PIFA), tree and layers, with the default options of libpecos for both (16
children, 100 labels per leaf, 20 iterations for a tree, squared hinge, threshold 0.1, beam of 10).
omikuji's time includes reading its text file; its Python interface has no batch prediction. An
ensemble of --trees models, with trees from different seeds, averages their scores; it is trained
once.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from common import extreme_data
from common.processes import interruptible
from common.records import add_json, figures_table, plot, report, table

SIDE = Path(__file__).parent / "extreme_side.py"


def run(python: str, side: str, args: argparse.Namespace, name: str, *options: str,
        threads: int | None = None) -> dict:
    threads = threads or args.threads
    command = [python, str(SIDE), side, str(args.out), name, "--threads", str(threads), *options]
    found = subprocess.run(command, capture_output=True, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    if found.returncode != 0:  # otherwise ignore the progress messages of libraries
        raise SystemExit(f"{' '.join(command)}: exit {found.returncode}\n{found.stderr[-2000:]}")
    return json.loads(found.stdout.strip().splitlines()[-1])


def median(runs: list[dict]) -> dict:
    """Returns the median of each number, recursively."""
    return {
        key: median([one[key] for one in runs]) if isinstance(value, dict) else statistics.median(
            one[key] for one in runs)
        for key, value in runs[0].items()
    }


def measure(args: argparse.Namespace, name: str) -> dict[str, dict]:
    pythons = {
        "xsoftmax": sys.executable, "libpecos": args.pecos_python, "omikuji": args.omikuji_python
    }
    runs: dict[str, list[dict]] = {}
    for _ in range(args.repeats):
        for side, python in pythons.items():
            if python:
                runs.setdefault(side, []).append(run(python, side, args, name))
        for side, python in pythons.items():
            if python and side != "omikuji":
                runs.setdefault(f"{side} tfn+man",
                                []).append(run(python, side, args, name, "--negatives", "tfn+man"))
        runs.setdefault("tree 1 thread", []).append(
            run(sys.executable, "xsoftmax", args, name, "--tree-only", threads=1))
    for side, python in pythons.items():
        if python:
            runs[f"{side} {args.trees} trees"] = [
                run(python, side, args, name, "--trees", str(args.trees))
            ]
    return {key: median(found) for key, found in runs.items()}


def figures(name: str, found: dict[str, dict], trees: int) -> list[dict]:
    ours, theirs = found["xsoftmax"], found["libpecos"]
    man, their_man = found["xsoftmax tfn+man"], found["libpecos tfn+man"]
    ratios = {
        "training": (ours["seconds"]["train"], theirs["seconds"]["train"]),
        "training, TFN+MAN": (man["seconds"]["train"], their_man["seconds"]["train"]),
        "single query": (ours["single"], theirs["single"]),
        "batch": (ours["batch"], theirs["batch"]),
        "tree": (ours["seconds"]["tree"], theirs["seconds"]["tree"]), "size": (ours["bytes"],
                                                                               theirs["bytes"])
    }
    rows = {f"{figure} / libpecos": mine / other for figure, (mine, other) in ratios.items()}
    rows["tree, threads / 1 thread"] = ours["seconds"]["tree"] / found["tree 1 thread"]["seconds"][
        "tree"]
    rows |= {
        f"libpecos's P@{k} - ours, points": theirs[f"P@{k}"] - ours[f"P@{k}"]
        for k in (1, 3, 5)
    }
    rows |= {
        f"libpecos's P@{k} - ours, points, TFN+MAN": their_man[f"P@{k}"] - man[f"P@{k}"]
        for k in (1, 3, 5)
    }
    for other in ("libpecos", "omikuji"):
        for kind in ("", f" {trees} trees"):
            if other + kind in found and other + kind != "libpecos":
                rows |= {
                    f"{other}'s P@{k} - ours, points{',' * bool(kind)}{kind}": found[other +
                                                                                     kind][f"P@{k}"]
                    - found[f"xsoftmax{kind}"][f"P@{k}"]
                    for k in (1, 3, 5)
                }
    return [{"figure": f"{name}: {figure}", "value": value} for figure, value in rows.items()]


def against_libpecos(results: dict[str, dict]) -> dict[str, list[tuple[float, float]]]:
    """Returns a point for each set, by library and options: training time divided by libpecos's,
    and P@1 minus libpecos's, both with the same options."""
    points: dict[str, list[tuple[float, float]]] = {}
    for found in results.values():
        for side, one in found.items():
            theirs = found.get(re.sub("xsoftmax|omikuji", "libpecos", side), {})
            if "P@1" in one and "P@1" in theirs and not side.startswith("libpecos"):
                points.setdefault(side, []).append(
                    (one["seconds"]["train"] / theirs["seconds"]["train"],
                     one["P@1"] - theirs["P@1"]))
    return points


def row(name: str, side: str, one: dict) -> dict:
    return {
        "set": name, "library": side, "train": f"{one['seconds']['train']:.2f} s",
        "tree": f"{one['seconds']['tree']:.2f} s" if "tree" in one["seconds"] else "",
        "batch": f"{1e6 * one['batch']:.1f} us" if "batch" in one else "",
        "single": f"{1e6 * one['single']:.0f} us" if "single" in one else "",
        "size": f"{one['bytes'] / 1e6:.1f} MB" if "bytes" in one else "",
        "P@1/3/5": "/".join(f"{one[f'P@{k}']:.2f}" for k in (1, 3, 5))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the sets")
    parser.add_argument("--pecos-python", required=True, help="an interpreter with libpecos")
    parser.add_argument("--omikuji-python", help="an interpreter with omikuji")
    for name in ("delicious", "gowalla", "novels"):
        parser.add_argument(f"--{name}", help="path of the data set")
    parser.add_argument(
        "--generated", nargs="*", help="generated sets, out of "
        f"{sorted(extreme_data.SHAPES)}; without names: "
        "all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trees", type=int, default=3, help="models of an ensemble")
    add_json(parser)
    args = parser.parse_args()
    sets = {
        name: getattr(args, name)
        for name in ("delicious", "gowalla", "novels") if getattr(args, name)
    }
    sets |= dict.fromkeys(args.generated
                          or extreme_data.SHAPES) if args.generated is not None else {}
    if not set(sets) <= {"delicious", "gowalla", "novels", *extreme_data.SHAPES}:
        parser.error(f"--generated: expected sets out of {sorted(extreme_data.SHAPES)}, got "
                     f"{args.generated}")
    results, found_figures = {}, []
    for name, source in sets.items():
        extreme_data.make(name, source, args.out)
        results[name] = measure(args, name)
        found_figures += figures(name, results[name], args.trees)
    below = [
        libpecos - ours
        for libpecos, ours in ((found["libpecos"][f"P@{k}"], found["xsoftmax"][f"P@{k}"])
                               for found in results.values() for k in (1, 3, 5))
    ]
    if below:
        found_figures.append({
            "figure": "all sets: libpecos's P@1, P@3, P@5 - ours, mean",
            "value": statistics.mean(below)
        })
    rows = [
        row(name, side, one) for name, result in results.items()
        for side, one in result.items() if "P@1" in one
    ]
    report(
        args, __doc__, question="How fast and how exact are linear models of very many labels?",
        against="libpecos and omikuji, with their default options", threads=args.threads, tables=[
            table(rows,
                  columns=["set", "library", "train", "tree", "batch", "single", "size",
                           "P@1/3/5"]),
            figures_table(found_figures)
        ], results=results, figures=found_figures,
        plot=plot("training time / libpecos's", "points of P@1 above libpecos",
                  against_libpecos(results), "x", lines=False))


if __name__ == "__main__":
    interruptible(main)
