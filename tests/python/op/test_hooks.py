"""Importing the package adds no process-wide hook, and deferred work is done after a capture."""

import gc
import subprocess
import sys

import pytest
import torch

import xsoftmax as xs
from xsoftmax._core import hooks
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD, catch_up

N, WIDTH = 6, 2

PROGRAM = """
import atexit, torch
before = atexit._ncallbacks()
import xsoftmax as xs
from torch.optim import optimizer as of_torch
hooks = of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks
assert [len(each) for each in hooks] == [0, 0] and atexit._ncallbacks() == before
for _ in range(2):
    loss = xs.LinearCrossEntropyLoss(2, 3)
    xs.optim.RowSGD(loss.parameters(), lr=1.0)
    assert [len(each) for each in hooks] == [1, 0]
for number in (4, 5):
    loss.resize_classes(number)
    assert [len(each) for each in hooks] == [2, 0]
for _ in range(2):
    loss.search_index()
    assert [len(each) for each in hooks] == [2, 1]
"""


def test_a_hook_is_installed_once_by_the_first_use():
    """A program that imports the library without using it pays nothing."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- an optimizer that is garbage-collected during a CUDA graph capture


def sparse(row):
    return torch.sparse_coo_tensor([[row]], torch.ones(1, WIDTH), [N, WIDTH])


def deferred(make):
    table = torch.nn.Parameter(torch.ones(N, WIDTH))
    options = {"momentum": 0.9} if make is RowSGD else {}
    optimizer = make([table], lr=0.1, **options)
    for row in (0, 1, 2):
        table.grad = sparse(row)
        optimizer.step()
    return table, optimizer


class Capture:
    """Simulates that this thread captures a CUDA graph while `is_open`."""
    def __init__(self, monkeypatch):
        gc.collect()  # optimizers of other tests
        self.is_open = False
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_open)


def step_of_another():
    table = torch.nn.Parameter(torch.ones(N, WIDTH))
    table.grad = sparse(0)
    RowAdagrad([table], lr=0.1).step()


LATER = {
    "catch_up": lambda: catch_up(torch.ones(2)),
    "step": step_of_another,
    "flush": lambda: RowAdagrad([torch.nn.Parameter(torch.ones(2))], lr=0.1).flush(),
    "eval": lambda: xs.LinearCrossEntropyLoss(2, 3).eval(),
}


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("later", LATER)
def test_pending_updates_are_applied_after_a_capture(monkeypatch, make, later):
    """A flush during the capture would be replayed with the graph; no flush would lose updates."""
    (table, optimizer), (other, other_optimizer) = deferred(make), deferred(make)
    before = table.detach().clone()
    other_optimizer.flush()
    assert not torch.equal(before, other)
    capture = Capture(monkeypatch)
    optimizer.itself = optimizer  # a reference cycle
    capture.is_open = True
    del optimizer
    gc.collect()
    assert torch.equal(table, before) and hooks.deferred_work
    LATER[later]()  # still during the capture
    assert torch.equal(table, before) and hooks.deferred_work
    capture.is_open = False
    LATER[later]()
    assert torch.equal(table, other) and not hooks.deferred_work


def test_catch_up_during_a_capture_applies_pending_updates_once(monkeypatch):
    (table, optimizer), (other, other_optimizer) = deferred(RowAdam), deferred(RowAdam)
    other_optimizer.flush()
    capture = Capture(monkeypatch)
    capture.is_open = True
    del optimizer
    gc.collect()
    catch_up(table)
    assert torch.equal(table, other)
    capture.is_open = False
    hooks.run_deferred()
    assert torch.equal(table, other) and not hooks.deferred_work
