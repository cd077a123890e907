"""Output files of a run: history.json, table.md and accuracy.png."""

from pathlib import Path

from examples.common.report import cost, curve, markdown, write_tables


def table(runs: list[dict]) -> str:
    """Formats one line per loss, in Markdown."""
    rows = []
    for run in runs:
        row = cost(run)
        for title, key in (("valid top-1", "valid_accuracy"), ("valid top-5", "valid_top5")):
            row[title] = f"{100 * run['points'][-1][key]:.2f} %" if run["points"] else "-"
        for title, key in (("test top-1", "test_accuracy"), ("test top-5", "test_top5"),
                           ("test coverage", "test_coverage")):
            row[title] = "-" if run[key] is None else f"{100 * run[key]:.2f} %"
        rows.append(row)
    return markdown(rows)


def write(output: Path, history: dict):
    """Writes the files from the history that train.py collects (see its `write`)."""
    write_tables(output, history, table(history["runs"]))
    dataset = history["dataset"]
    title = (f"VGG-16, width {history['arguments']['width']}, on {dataset['name']}, "
             f"{dataset['num_classes']:,} classes")
    curve(history["runs"], "valid_accuracy", "validation accuracy", ".3f", title,
          output / "accuracy.png")
