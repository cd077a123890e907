"""Finished runs of a study, kept in a file that can be committed: a study goes on after an
interruption, on another machine or with other methods, and repeats nothing."""

import json
import os
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Sequence, TypeVar

from common.records import COMMIT
from common.timing import machine

S = TypeVar("S")  # the setting of a training, as a learning rate


def long_trainings(settings: Sequence[S], train: Callable[[S, int], dict], finalists: int,
                   search_epochs: int, epochs: int) -> dict[S, dict]:
    """Trains the settings for search_epochs, if there are more than `finalists`, and the best of
    them for `epochs`. Returns the results of the latter, the best first. The best have the highest
    "valid"."""
    def trained(settings: Sequence[S], epochs: int) -> dict[S, dict]:
        found = {setting: train(setting, epochs) for setting in settings}
        return dict(sorted(found.items(), key=lambda item: -item[1]["valid"]))

    if len(settings) > finalists:
        settings = list(trained(settings, search_epochs))[:finalists]
    return trained(settings, epochs)


class Runs:
    """Results by name. Each line of the file is the JSON object of one run: its name, the options
    of its study, commit, date, processor and threads, and what it found.

    Args:
        path: the file; created with the first run.
        options: what a run depends on besides its name. Runs with other options are ignored.
        threads: of the runs that are added.
    """
    def __init__(self, path: Path, options: list[str], threads: int):
        self.path, self.options, self.lock = path, options, threading.Lock()
        self.machine = {"cpu": machine()["cpu"], "threads": threads}
        self.used: set[str] = set()
        self.lines: dict[str, dict] = {}
        content = path.read_bytes() if path.is_file() else b""
        whole = content.rfind(b"\n") + 1
        # a killed process leaves a part of a line behind
        self.size, self.torn = len(content), len(content) - whole
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                run = json.loads(line)
                if run["options"] == options:
                    self.lines[run["run"]] = run
            except (KeyError, ValueError) as error:
                raise SystemExit(
                    f"{path}, line {number}: expected the JSON object of a run ({error})") from None

    def get(self, name: str) -> dict | None:
        """Returns what a run found, or None if it is not finished."""
        if name not in self.lines:
            return None
        self.used.add(name)
        return self.lines[name]["found"]

    def add(self, name: str, found: dict, commit: str = COMMIT) -> dict:
        """Keeps what a run of the code of a commit found, and returns it."""
        line = {
            "run": name, "options": self.options, "commit": commit,
            "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", **self.machine, "found": found
        }
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.torn and self.path.stat().st_size == self.size:
                os.truncate(self.path, self.size - self.torn)
            self.torn = 0
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
            self.lines[name] = line
            self.used.add(name)
        print(f"{datetime.now():%H:%M} finished: {name}", file=sys.stderr, flush=True)
        return found

    def about(self) -> dict:
        """Returns where the runs that were used come from, for the record of a study."""
        lines = [self.lines[name] for name in self.used]
        return {
            key: sorted({line[key]
                         for line in lines})
            for key in ("commit", "date", "cpu", "threads")
        } | {"count": len(lines)}
