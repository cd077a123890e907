"""Output files of a run: history.json, table.md and ndcg.png."""

from pathlib import Path

from examples.common.report import cost, curve, markdown, write_tables


def table(runs: list[dict], figures: list[str]) -> str:
    """Formats one line per loss, in Markdown: its best point by validation."""
    rows = []
    for run in runs:
        row = cost(run)
        for split in ("valid", "test"):
            for figure in figures:
                value = run[f"{split}_{figure}"]
                row[f"{split} {figure}"] = "-" if value is None else f"{value:.4f}"
        rows.append(row)
    return markdown(rows)


def write(output: Path, history: dict, figures: list[str]):
    """Writes the files from the history that train.py collects (see its `write`)."""
    write_tables(output, history, table(history["runs"], figures))
    dataset = history["dataset"]
    title = f"{history['arguments']['model']} on {dataset['name']}, {dataset['num_items']:,} items"
    curve(history["runs"], "valid_NDCG@10", "validation NDCG@10 of the full ranking", ".4f", title,
          output / "ndcg.png")
