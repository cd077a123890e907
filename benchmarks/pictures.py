"""The style of plots in the documentation."""

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

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
