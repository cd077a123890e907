"""Plots validation loss against training time from a record of benchmarks/cuda.py.

    python benchmarks/loss_against_time.py RECORD.json PICTURE.svg
"""

import argparse
import json
from pathlib import Path

from common.pictures import picture


def curves_of(record: dict) -> dict:
    """Returns (seconds, losses) of each output layer by its name."""
    curves = {}
    for row in record["rows"]:
        if "curve" in row:
            name = row["figure"].removeprefix("GPT, ").partition(": validation loss")[0]
            curves[name] = ([point["seconds"]
                             for point in row["curve"]], [point["loss"] for point in row["curve"]])
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    curves = curves_of(json.loads(args.record.read_text()))
    if not curves:
        parser.error(f"expected a record with the part language_model, got {args.record}")
    with picture(args.picture, 7.2, 4.0) as figure:
        axes = figure.subplots()
        for name, points in curves.items():
            axes.plot(*points, label=name, markersize=4)
        axes.set(xlabel="seconds of training", ylabel="validation loss, nats per word")
        axes.legend(fontsize=9)


if __name__ == "__main__":
    main()
