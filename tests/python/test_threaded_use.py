"""Objects that several threads use at once: none is spoilt, and the process does not die."""

import subprocess
import sys
from pathlib import Path


def test_every_object_with_state_survives_three_threads():
    """Each still works afterwards, and its invariants hold. Where a loss is trained by two threads, autograd may refuse a step."""
    done = subprocess.run([sys.executable, Path(__file__).with_name("threaded_use.py")], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", f"it died at {lines[-1:]}: {done.stderr[-2000:]}"
    assert [line for line in lines if line.startswith("FAIL")] == []
    assert len(lines) > 40, "cases of all kinds"
