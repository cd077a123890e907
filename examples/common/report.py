"""Output files of a run: tables and curves."""

import contextlib
import json
import os
import statistics
from pathlib import Path


def write_text(path: Path, text: str):
    """Replaces a file atomically, so that it is never seen half-written, even if the run stops."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_tables(output: Path, history: dict, table: str):
    """Writes history.json and table.md."""
    write_text(output / "history.json", json.dumps(history, indent=2) + "\n")
    write_text(output / "table.md", table)


def markdown(rows: list[dict[str, str]]) -> str:
    """Formats rows with the same columns as a table: text in the first, numbers in the others."""
    head = list(rows[0])
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *(list(row.values()) for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def mean_and_error(values: list[float], decimals: int = 4) -> str:
    """Formats the mean over seeds, and its standard error if there are several."""
    error = f" +- {statistics.stdev(values) / len(values) ** 0.5:.{decimals}f}" if len(
        values) > 1 else ""
    return f"{statistics.mean(values):,.{decimals}f}{error}"


def cost(run: dict) -> dict[str, str]:
    """Returns the columns with the cost of training."""
    seconds, steps = run["train_seconds"], max(run["steps"], 1)
    return {
        "loss": run["loss"],
        "epochs": f"{run['epochs']:.3g}",
        "training time": f"{seconds / 60:.2f} min",
        "time per step": f"{1000 * seconds / steps:.1f} ms",
    }


@contextlib.contextmanager
def drawing(path: Path, size: tuple[float, float] = (7, 4.5)):
    """Yields axes to draw on, and saves the picture at the end. Needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=size, layout="constrained")
    yield axes
    figure.savefig(path, dpi=150)
    plt.close(figure)


def curve(runs: list[dict], key: str, label: str, number: str, title: str, path: Path):
    """Plots a metric against training time, one curve per loss.

    Args:
        key: the metric's key in a run's points.
        label: the label of the axis.
        number: the format of the last value in the legend.
    """
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    with drawing(path) as axes:
        for run in runs:
            points = run["points"]
            if points:
                axes.plot(
                    [point["train_seconds"] / 60 for point in points],
                    [point[key] for point in points],
                    marker="o",
                    markersize=4,
                    label=f"{run['loss']}, {points[-1][key]:{number}} after {run['epochs']:.2g} "
                    "epochs",
                )
        values = [point[key] for run in runs for point in run["points"]]
        if values and max(values) > 3 * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
        axes.set_xlim(left=0)
        axes.set_xlabel("training time, minutes (evaluation left out)")
        axes.set_ylabel(label)
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
