"""The plots of the documentation. A record (records.py) holds what its plot shows:

    python benchmarks/common/pictures.py RECORD.json ...    # draws RECORD.svg
"""

import argparse
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

# Colours and greys that are visible on white and on black; the background is transparent.
COLOURS = ("#d9822b", "#3f8fd0", "#4aa564", "#b565c4", "#8a8a8a", "#d05f5f")
STYLE = {
    "text.color": "#808080",
    "axes.edgecolor": "#808080",
    "axes.labelcolor": "#808080",
    "xtick.color": "#808080",
    "ytick.color": "#808080",
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 11,
    "svg.hashsalt": "xsoftmax",
    "svg.fonttype": "path",
    "axes.grid": True,
    "grid.color": "#80808040",
    "lines.marker": "o",
}  # fmt: skip


@contextmanager
def picture(path: Path, width: float = 6.4, height: float = 3.6) -> Iterator[Figure]:
    """Yields a figure in this style and saves it as an SVG file, byte-identical for equal input."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def draw(plot: dict, path: Path) -> None:
    with picture(path, 8.4, 4.0) as figure:
        axes = figure.subplots()
        for number, (name, points) in enumerate(plot["curves"].items()):
            used = number // len(COLOURS) % 4  # the number of earlier curves of this colour
            if plot.get("lines", True):
                axes.plot(*zip(*points), label=name, markersize=4,
                          linestyle=("-", "--", ":", "-.")[used])
            else:
                axes.plot(*zip(*points), label=name, markersize=7, linestyle="none",
                          marker="os^D"[used])
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            if name in plot["log"]:
                axes.set(**{f"{name}scale": "log"})
                axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
                low, high = axis.get_view_interval()
                if high > 1000 * low:  # enough labels without those between the powers
                    axis.set_minor_formatter(NullFormatter())
                else:
                    if high > 10 * low:
                        axis.set_minor_locator(LogLocator(subs=(2, 5)))
                    axis.set_minor_formatter(StrMethodFormatter("{x:,.10g}"))
        axes.set(xlabel=plot["x"], ylabel=plot["y"])
        figure.legend(fontsize=9, loc="outside right upper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="+")
    for path in parser.parse_args().record:
        record = json.loads(path.read_text())
        if "plot" not in record:
            parser.error(f"expected a record with a plot, got {path}")
        draw(record["plot"], path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
