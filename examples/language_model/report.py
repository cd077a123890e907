"""What a run leaves behind: history.json, table.md and perplexity.png."""

import json
import os
from pathlib import Path


def write_text(path: Path, text: str):
    """Replaces the file in one step: a reader, or a run that is cut off, never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def table(runs: list[dict]) -> str:
    """One line a loss, in Markdown."""
    head = ["loss", "epochs", "training time", "time a step", "tokens/s", "valid perplexity", "test perplexity"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for run in runs:
        seconds, steps = run["train_seconds"], max(run["steps"], 1)
        valid = run["points"][-1]["valid_perplexity"] if run["points"] else None
        lines.append([
            run["loss"],
            f"{run['epochs']:.3g}",
            f"{seconds / 60:.2f} min",
            f"{1000 * seconds / steps:.1f} ms",
            f"{run['tokens'] / seconds:,.0f}" if seconds else "-",
            f"{valid:.1f}" if valid else "-",
            f"{run['test_perplexity']:.1f}" if run["test_perplexity"] else "-",
        ])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def plot(runs: list[dict], title: str, path: Path):
    """Exact validation perplexity against training time, a curve a loss."""
    import matplotlib

    matplotlib.use("Agg")  # writes files, needs no display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for run in runs:
        points = run["points"]
        if points:
            axes.plot(
                [point["train_seconds"] / 60 for point in points],
                [point["valid_perplexity"] for point in points],
                marker="o",
                markersize=4,
                label=f"{run['loss']}, {points[-1]['valid_perplexity']:.0f} after {run['epochs']:.2g} epochs",
            )
    perplexities = [point["valid_perplexity"] for run in runs for point in run["points"]]
    if perplexities and max(perplexities) > 3 * min(perplexities):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
    axes.set_xlim(left=0)
    axes.set_xlabel("training time, minutes (evaluation left out)")
    axes.set_ylabel("exact validation perplexity")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(output: Path, history: dict):
    """history: what train.py knows, see its `history`."""
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "history.json", json.dumps(history, indent=2) + "\n")
    write_text(output / "table.md", table(history["runs"]))
    corpus = history["corpus"]
    title = f"{history['arguments']['model']} on {corpus['name']}, {corpus['num_words']:,} words"
    plot(history["runs"], title, output / "perplexity.png")
