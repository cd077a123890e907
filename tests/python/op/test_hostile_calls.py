"""Hostile calls: no arguments kill the process, hang it or trip an assertion of torch.

An error names its operator and leaves every argument bit for bit as it was. This holds for kernels
and composites.

XSOFTMAX_HOSTILE_CALLS: in the slow test, the number of calls that change one argument; 0 for all
    of them (an hour).
XSOFTMAX_HOSTILE_JOINT_CALLS, XSOFTMAX_HOSTILE_SEED: the number and the seed of calls that change
    several places.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_calls import NOTE

FEW = ("800", "600", "2")  # calls that change one argument, calls that change several, seed
MANY = (os.environ.get("XSOFTMAX_HOSTILE_CALLS",
                       "8000"), os.environ.get("XSOFTMAX_HOSTILE_JOINT_CALLS", "6000"),
        os.environ.get("XSOFTMAX_HOSTILE_SEED", "1"))
# seconds for one call; more than any takes on a busy machine
LIMIT = float(os.environ.get("XSOFTMAX_HOSTILE_SECONDS", 90))
WORKERS = 2


def at_work(note):
    """Returns the number and the title of the case that a process is running."""
    number, title = NOTE.unpack(note.read_bytes())
    return number, title.rstrip(b"\0").decode()


def run_from(first, shard, amount, folder, note, output):
    """Runs one process to its end; returns what ended it before the last case, or None."""
    note.write_bytes(NOTE.pack(first, b"the start"))
    with open(output, "ab") as file:
        command = [
            sys.executable,
            str(Path(__file__).parents[1] / "shared/hostile_calls.py"),
            str(note),
            str(shard),
            str(WORKERS), *amount,
            str(first)
        ]
        process = subprocess.Popen(command, stdout=file, stderr=open(str(output) + ".errors", "wb"),
                                   stdin=subprocess.DEVNULL, cwd=folder)
        seen, since = None, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            number, _ = at_work(note)
            if number != seen:
                seen, since = number, time.monotonic()
            # the first case includes the imports
            elif time.monotonic() - since > LIMIT + 60 * (number == first):
                process.kill()
                process.wait()
                return "hang"
    if process.returncode == 0:
        return None
    died = signal.Signals(
        -process.returncode).name if process.returncode < 0 else f"exit code {process.returncode}"
    return f"{died}: {Path(str(output) + '.errors').read_text(errors='replace')[-300:]}"


def sweep(shard, amount, folder):
    """Returns the findings of one worker and its number of cases."""
    folder.mkdir()
    (folder / "examples.txt").write_text("2 5 4\n1,2 0:1 3:.5\n0 1:2\n")
    note, output = folder / "note", folder / "output"
    findings, first = [], 0
    while (end := run_from(first, shard, amount, folder, note, output)) is not None:
        number, title = at_work(note)
        assert title != "the start", f"the process of hostile calls did not start: {end}"
        findings.append([title, end])
        first = number + 1
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return findings + [line for line in lines if isinstance(line, list)], lines[-1]


@pytest.mark.parametrize("amount", [FEW, pytest.param(MANY, marks=pytest.mark.slow)],
                         ids=["few", "many"])
def test_no_call_kills_hangs_or_changes_arguments(amount, tmp_path):
    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(
            pool.map(lambda shard: sweep(shard, amount, tmp_path / str(shard)), range(WORKERS)))
    findings = [finding for found, _ in results for finding in found]
    report = os.environ.get("XSOFTMAX_HOSTILE_REPORT")
    if report:
        Path(report).write_text(
            json.dumps(dict(calls=sum(count for _, count in results), findings=findings), indent=1))
    first = json.dumps(findings[:20], indent=1)
    assert not findings, f"{len(findings)} findings, the first of them: {first}"
