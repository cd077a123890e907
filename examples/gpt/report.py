"""Output files of a run: history.json, table.md and loss.png."""

from pathlib import Path

from examples.common.report import cost, curve, markdown, write_tables


def seconds_to_reach(points: list[dict], loss: float) -> float | None:
    """Returns when a curve of points with `seconds` and `loss` first reaches a loss, with linear
    interpolation between its points."""
    before = None
    for point in points:
        if point["loss"] <= loss:
            if before is None or point["loss"] == before["loss"]:
                return point["seconds"]
            share = (before["loss"] - loss) / (before["loss"] - point["loss"])
            return before["seconds"] + share * (point["seconds"] - before["seconds"])
        before = point
    return None


def points_of(run: dict) -> list[dict]:
    """Returns seconds of training, steps, and validation loss of each evaluation."""
    return [{
        "seconds": point["train_seconds"], "steps": point["step"], "loss": point["valid_loss"]
    } for point in run["points"]]


def table(runs: list[dict]) -> str:
    """Formats one line per loss, in Markdown. The last column is the time to the final validation
    loss of the plain loss, or else of the first one, as a fraction of its time."""
    plain = next((run for run in runs if run["loss"] == "plain"), runs[0])
    rows = []
    for run in runs:
        goal = points_of(plain)[-1] if plain["points"] else None
        reached = goal and seconds_to_reach(points_of(run), goal["loss"])
        rows.append(
            cost(run) | {
                "tokens": f"{run['tokens']:,}",
                "valid loss": f"{run['points'][-1]['valid_loss']:.4f}" if run["points"] else "-",
                "test loss": f"{run['test_loss']:.4f}" if run["test_loss"] else "-",
                f"time to {plain['loss']}'s loss": f"{reached / goal['seconds']:.2f}"
                if reached else "-"
            })
    return markdown(rows)


def write(output: Path, history: dict):
    write_tables(output, history, table(history["runs"]))
    text = history["text"]
    curve(history["runs"], "valid_loss", "exact validation loss, nats per token", ".3f",
          f"GPT on {text['name']}, {text['num_tokens']:,} {text['unit']}", output / "loss.png")
