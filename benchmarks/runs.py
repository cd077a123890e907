"""Finished runs of a study, kept in a file that can be committed: a study goes on after an
interruption, on another machine or with other methods, and repeats nothing."""

import json
import threading
from datetime import datetime, timezone
from pathlib import Path

from records import commit
from timing import machine


class Runs:
    """Results by name. Each line of the file is the JSON object of one run: its name, the options
    of its study, commit, date and processor, and what it found.

    Args:
        path: the file; created with the first run.
        options: what a run depends on besides its name. Runs with other options are not seen.
    """
    def __init__(self, path: Path, options: list[str]):
        self.path, self.options, self.lock = path, options, threading.Lock()
        lines = path.read_text().splitlines() if path.is_file() else []
        self.lines = {
            run["run"]: run
            for run in map(json.loads, lines) if run["options"] == options
        }

    def get(self, name: str) -> dict | None:
        """Returns what a run found, or None if it is not finished."""
        return self.lines[name]["found"] if name in self.lines else None

    def here(self, name: str) -> bool:
        """Returns whether a run was made on a processor like this one, so that its times can be
        compared with those of new runs."""
        return name in self.lines and self.lines[name]["cpu"] == machine()["cpu"]

    def add(self, name: str, found: dict) -> dict:
        """Keeps what a run found, and returns it."""
        line = {
            "run": name, "options": self.options, "commit": commit(),
            "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "cpu": machine()["cpu"],
            "found": found
        }
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
            self.lines[name] = line
        return found
