"""Tests and measures xsoftmax on a GPU, in one command of under nine minutes.

    python benchmarks/cuda.py [--only tests,shared,...] [--without tests] [--minutes 8.5]
                              [--output cuda.json] [--json [FILE]] [--device cuda] [--tiny]
                              [--text FILE] [--layer-seconds 60]

Tests run first, followed by the measurements, which are printed as a table and as JSON. This
requires CUDA builds of torch and xsoftmax. Each part (cuda_figures/) runs in its own process.
Failed parts, rivals that are not installed and parts without time left are rows with the reason.
`--device cpu --tiny` runs every part on small shapes, to test the program itself.

Times are medians, by CUDA events, of interleaved runs. The time of a step begins with an idle
device and includes all work of the host. Host time is the time until the call returns. Launches are
the kernels, copies and fills counted by torch.profiler. A kernel is measured after a write of 1
GiB, which empties the cache and lets the host run ahead. Bytes are the smallest possible memory
traffic, as a fraction of the bandwidth in the data sheet and of that of a copy measured on the
device.

Rivals: a good PyTorch user's code (output_layer.py) with torch.optim.SparseAdam, also with
torch.compile and as a CUDA graph; the method of Partial FC; and, if installed,
torch.nn.LinearCrossEntropyLoss, Liger, Cut Cross-Entropy and FBGEMM's table-batched embeddings.

The language model, a GPT on the text of Python's standard library (or `--text`), is trained for
the same time with each output layer (`--layer-seconds`, for which `--minutes` must leave room; by
default a share of 170 s). The JSON contains its validation loss against time, which
loss_against_time.py plots.
"""

import os
import sys

# torch imports NVIDIA's package `cuda`, which must not be confused with this file.
if __name__ != "__main__":
    raise ImportError("benchmarks/cuda.py is a program, and no package")
FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path = [path for path in sys.path if os.path.abspath(path) != FOLDER]
sys.path += [FOLDER, os.path.dirname(FOLDER)]

import argparse
import json
import time
from pathlib import Path

import torch

import xsoftmax as xs
from cuda_figures.bench import reason
from cuda_figures.language_model import part_seconds
from cuda_figures.parts import PARTS, missing, process_of, run_part
from common.records import add_json, report, table
from common.timing import machine, print_table

HAS_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key("xsoftmax::candidate_scores", "CUDA")


def no_device(name: str) -> str:
    """Returns why nothing can run on a device of this name, "" if it can."""
    try:
        torch.empty(1, device=name)
    except Exception as error:  # no such device, no driver, torch built without CUDA
        return f"no device {name}: {reason(error)}"
    if name.startswith("cuda") and not HAS_KERNELS:
        return ("this xsoftmax was built without CUDA kernels: "
                "CMAKE_ARGS=-DXSOFTMAX_CUDA=ON pip install --no-build-isolation .")
    return ""


def about(args: argparse.Namespace) -> dict:
    cuda = args.device.startswith("cuda") and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else args.device, "torch": torch.__version__,
        "cuda": torch.version.cuda, "small shapes": args.tiny, "CUDA kernels": HAS_KERNELS,
        "xsoftmax": getattr(xs, "__version__", "")
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true",
                        help="small shapes; with --device cpu a trial of the program")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: %(default)s")
    parser.add_argument("--without", default="", help="parts to leave out, comma-separated")
    parser.add_argument("--minutes", type=float, default=8.5,
                        help="no part starts after this time (%(default)s)")
    parser.add_argument("--text", help="file or folder of texts for the language model")
    parser.add_argument("--layer-seconds", type=float,
                        help="training time of the language model with each output layer")
    parser.add_argument("--output", type=Path,
                        help="file for all rows as JSON; default: print them after the table")
    add_json(parser)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--part-seconds", type=float, default=120, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for option in ("only", "without"):
        for name in getattr(args, option).split(",") if getattr(args, option) else []:
            if name not in PARTS:
                parser.error(f"--{option}: expected names out of {', '.join(PARTS)}, got {name!r}")
    if not args.minutes >= 0:
        parser.error(f"--minutes: expected at least 0, got {args.minutes}")
    if args.layer_seconds is not None and not 0 < args.layer_seconds < 1e6:
        parser.error(f"--layer-seconds: expected a number above 0, got {args.layer_seconds}")
    for option in ("output", "json"):  # check now, because the results take minutes
        path = getattr(args, option)
        if path and path != "-":
            try:
                Path(path).touch()
            except OSError as error:
                parser.error(f"--{option}: expected a file that can be written, got {path}: "
                             f"{error.strerror}")
    return args


def measure(args: argparse.Namespace, found: dict) -> list:
    """Returns the rows of all parts. --output is updated after each part."""
    begin, rows, why = time.monotonic(), [], no_device(args.device)
    options = [
        "--device", args.device, *(["--tiny"] if args.tiny else []),
        *(["--text", args.text] if args.text else []),
        *(["--layer-seconds", str(args.layer_seconds)] if args.layer_seconds else [])
    ]
    for name in args.only.split(","):
        if name in args.without.split(","):
            continue
        left = 60 * args.minutes - (time.monotonic() - begin)
        most = part_seconds(
            args.layer_seconds) if args.layer_seconds and name == "language_model" else None
        new = [missing(name, why)] if why else \
            process_of(name, os.path.abspath(__file__), options, left, args.tiny, most)
        rows += [{"part": name, **row} for row in new]
        if args.output:
            args.output.write_text(json.dumps({"about": found, "rows": rows}, indent=1))
    return rows


def texts_of(rows: list) -> list:
    """Formats rows as texts, for tables."""
    return [{
        "part": row["part"], "figure": row["figure"],
        "value": "" if row["value"] is None else f"{row['value']:.4g} {row['unit']}".strip(),
        "aim": row["aim"] or "", "detail": row["detail"]
    } for row in rows]


def tables_of(rows: list) -> list:
    """Returns one table for each part with measurements."""
    measured = [row for row in texts_of(rows) if row["value"]]
    return [
        table([row for row in measured if row["part"] == part], part, ["figure", "value", "detail"])
        for part in dict.fromkeys(row["part"] for row in measured)
    ]


def write_record(args: argparse.Namespace, found: dict, rows: list) -> None:
    """Writes a record for docs/benchmarks, from which a page is generated."""
    report(
        args, __doc__, question="What does a step cost on a GPU?",
        against=f"PyTorch {torch.__version__}: eager, under torch.compile, as CUDA graphs",
        tables=tables_of(rows), rows=rows, machine=machine()
        | {"cores": os.cpu_count(), "gpu": found["device"], "cuda": found["cuda"] or "none"})


def main() -> None:
    args = parse()
    if args.part:
        run_part(args.part, args.device, args.tiny, args.part_seconds, args.text,
                 args.layer_seconds)
    found = about(args)
    if args.json != "-":
        print(", ".join(f"{key} {value}" for key, value in found.items()) + "\n", flush=True)
    rows = measure(args, found)
    if args.json != "-":
        print_table(texts_of(rows), ["part", "figure", "value", "aim", "detail"])
    measured = any(row["value"] is not None for row in rows)
    if args.json and measured:  # a record of earlier figures stays as it is
        write_record(args, found, rows)
    elif not args.output:
        print("\n" + json.dumps({"about": found, "rows": rows}))
    if not measured:
        why = rows[0]["detail"] if rows else "no part was named"
        sys.exit(f"cuda.py: nothing was measured: {why}")


if __name__ == "__main__":
    main()
