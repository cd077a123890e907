"""Hooks, registries and deferred work of the whole process: all in one module, none by an import."""

import ast
import gc
import re
import subprocess
import sys

import pytest
import torch
from documents import ROOT

import xsoftmax as xs
from xsoftmax import _hooks
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD, settle

N, WIDTH = 6, 2
PACKAGE = ROOT / "python_bindings/xsoftmax"
OF_THE_PROCESS = r"register_optimizer_step_\w+|register_module_\w+|atexit|excepthook|Weak\w+|finalize"


def names_in(path):
    return {node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Attribute, ast.Name))}


def test_one_module_registers_and_remembers():
    """What runs in every optimizer's step is found in one place."""
    found = {path.name for path in PACKAGE.rglob("*.py")
             if any(re.fullmatch(OF_THE_PROCESS, name) for name in names_in(path))}
    assert found == {"_hooks.py"}


def test_the_page_names_each_module_that_installs_a_hook():
    installs = re.compile(r"_hooks\.(?:before_steps|after_steps|at_exit)\(")
    modules = [path.stem for path in PACKAGE.rglob("*.py") if installs.search(path.read_text())]
    assert len(modules) == 4
    for module in modules:
        assert f"- ``{module}``, " in _hooks.__doc__, module


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
    """Somebody who imports the library and trains without it pays nothing."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- an optimizer that is collected during a capture


def sparse(row):
    return torch.sparse_coo_tensor([[row]], torch.ones(1, WIDTH), [N, WIDTH])


def owing(make):
    table = torch.nn.Parameter(torch.ones(N, WIDTH))
    options = {"momentum": 0.9} if make is RowSGD else {}
    optimizer = make([table], lr=0.1, **options)
    for row in (0, 1, 2):
        table.grad = sparse(row)
        optimizer.step()
    return table, optimizer


class Capture:
    """Stands in for a CUDA graph that this thread captures."""

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
    "settle": lambda: settle(torch.ones(2)),
    "step": step_of_another,
    "flush": lambda: RowAdagrad([torch.nn.Parameter(torch.ones(2))], lr=0.1).flush(),
    "eval": lambda: xs.LinearCrossEntropyLoss(2, 3).eval(),
}


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("later", LATER)
def test_what_is_owed_waits_for_the_end_of_a_capture(monkeypatch, make, later):
    """A flush within would be replayed with the graph; one that is dropped would lose steps."""
    (table, optimizer), (other, other_optimizer) = owing(make), owing(make)
    before = table.detach().clone()
    other_optimizer.flush()
    assert not torch.equal(before, other)
    capture = Capture(monkeypatch)
    optimizer.itself = optimizer  # a circle
    capture.is_open = True
    del optimizer
    gc.collect()
    assert torch.equal(table, before) and _hooks.deferred
    LATER[later]()  # still during the capture
    assert torch.equal(table, before) and _hooks.deferred
    capture.is_open = False
    LATER[later]()
    assert torch.equal(table, other) and not _hooks.deferred


def test_a_read_during_the_capture_makes_up_what_waits(monkeypatch):
    """The state that waits is known by the table: a read of its own settles it, once."""
    (table, optimizer), (other, other_optimizer) = owing(RowAdam), owing(RowAdam)
    other_optimizer.flush()
    capture = Capture(monkeypatch)
    capture.is_open = True
    del optimizer
    gc.collect()
    settle(table)
    assert torch.equal(table, other)
    capture.is_open = False
    _hooks.run_deferred()
    assert torch.equal(table, other) and not _hooks.deferred
