"""Output files of a run: history.json, table.md and perplexity.png."""

from pathlib import Path

from examples.common.report import cost, curve, markdown, write_tables


def table(runs: list[dict]) -> str:
    """Formats one line per loss, in Markdown."""
    rows = []
    for run in runs:
        valid = run["points"][-1]["valid_perplexity"] if run["points"] else None
        rows.append(
            cost(run) | {
                "tokens/s": f"{run['tokens'] / run['train_seconds']:,.0f}"
                if run["train_seconds"] else "-",
                "valid perplexity": f"{valid:.1f}" if valid else "-",
                "test perplexity": f"{run['test_perplexity']:.1f}"
                if run["test_perplexity"] else "-",
            })
    return markdown(rows)


def write(output: Path, history: dict):
    """Writes the files from the history that train.py collects (see its `write`)."""
    write_tables(output, history, table(history["runs"]))
    corpus = history["corpus"]
    title = f"{history['arguments']['model']} on {corpus['name']}, {corpus['num_words']:,} words"
    curve(history["runs"], "valid_perplexity", "exact validation perplexity", ".0f", title,
          output / "perplexity.png")
