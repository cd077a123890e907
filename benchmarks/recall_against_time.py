"""Plots recall against time per query from a record of benchmarks/retrieval.py.

    python benchmarks/recall_against_time.py RECORD.json PICTURE.svg
"""

import argparse
import json
from pathlib import Path

from matplotlib.ticker import StrMethodFormatter

from common.pictures import COLOURS, picture

FAMILIES = ("xsoftmax", "faiss IndexIVFFlat", "faiss IndexHNSWFlat")
TITLES = {"single": "one query at a time", "batch": "a batch of 256 queries"}


def points(results: dict, family: str, mode: str) -> list[tuple[float, float]]:
    """Returns (microseconds per query, recall) of each setting of a family, by recall."""
    found = [one for one in results.values() if one["family"] == family]
    return [(1e6 * one[mode], one["recall"])
            for one in sorted(found, key=lambda one: one["recall"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    results = json.loads(args.record.read_text())["results"]
    with picture(args.picture, 9.6, 4.0) as figure:
        both = figure.subplots(1, 2, sharey=True)
        for axes, (mode, title) in zip(both, TITLES.items()):
            for family, colour in zip(FAMILIES, COLOURS):
                axes.plot(*zip(*points(results, family, mode)), markersize=4, color=colour,
                          label=f"{family}, fixed budget" if family == "xsoftmax" else family)
            axes.plot(*zip(*points(results, "certified", mode)), marker="*", markersize=14,
                      linestyle="none", color=COLOURS[0], label="xsoftmax, certified")
            fastest = min(points(results, "all", mode))
            axes.plot(*fastest, marker="s", markersize=7, linestyle="none", color=COLOURS[4],
                      label="scoring all items")
            axes.set(xscale="log", xlabel="microseconds per query", title=title, ylim=(0.5, 1.015))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        both[0].set_ylabel("recall@10")
        both[0].legend(loc="lower right", fontsize=8.5)


if __name__ == "__main__":
    main()
