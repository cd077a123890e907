"""The table of models and the plot of their latencies."""

from pathlib import Path

import numpy as np

from examples.common.report import drawing, markdown


def table(rows: list[dict]) -> str:
    return markdown([{
        "model": row["model"], "training": f"{row['seconds']:.1f} s",
        "batch": f"{1e6 * row['batch']:.0f} us",
        "single": f"{1e6 * np.median(row['latencies']):.0f} us" if row["latencies"] else "",
        **{f"P@{k}": f"{100 * row['precision'][str(k)]:.2f}"
           for k in (1, 3, 5)}, "PSP@5": f"{100 * row['psp']:.2f}"
    } for row in rows])


def plot(rows: list[dict], path: Path) -> None:
    """Plots the fraction of single queries that is answered within a given time."""
    with drawing(path) as axes:
        for row in rows:
            if row["latencies"]:
                times = 1e6 * np.sort(row["latencies"])
                axes.plot(times,
                          np.arange(1,
                                    len(times) + 1) / len(times),
                          label=f"{row['model']}, median {np.median(times):.0f} us")
        axes.set_xscale("log")
        axes.set_xlabel("time of a query, microseconds, one at a time")
        axes.set_ylabel("share of the queries answered")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
