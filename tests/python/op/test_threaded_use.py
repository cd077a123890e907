"""Objects that several threads use at once stay valid, and the process survives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from threaded_use import findings, replaced_head_case


@pytest.mark.slow
def test_every_object_with_state_survives_three_threads():
    """Each object works afterwards, its invariants hold, and each thread completed a call.

    If two threads train a loss, autograd refuses some steps.
    """
    program = (Path(__file__).parents[1] / "shared/threaded_use.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", (
        f"the process died at {lines[-1:]}: {done.stderr[-2000:]}")
    assert [line for line in lines if line.startswith("FAIL")] == []
    assert len([line for line in lines if not line.startswith(" ")]) > 40, "all cases ran"


@pytest.mark.parametrize("number", [1, 7])
def test_threads_share_a_model_with_a_replaced_head(number):
    """Calls with labels return the loss in their own reduction, and calls without labels logits."""
    pytest.importorskip("transformers", reason="pip install xsoftmax[integrations]")
    pytest.importorskip("accelerate", reason="pip install xsoftmax[integrations]")
    torch.manual_seed(0)
    assert findings("replaced head", lambda: replaced_head_case(number), 20)[:2] == ([], 0)
