"""FIFOs, sockets, devices and folders where a file is expected: an error at once, never a wait."""

import os
import socket
import threading

import pytest
import torch

import xsoftmax as xs
from xr_linear_checks import problem, small


def fifo(path):
    os.mkfifo(path)


def bound_socket(path):
    here = os.open(path.parent, os.O_RDONLY)
    os.fchdir(here)  # names of sockets are short
    os.close(here)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def device(path):
    path.symlink_to("/dev/zero")


def terminal(path):
    path.symlink_to("/dev/ptmx")


def folder(path):
    path.mkdir()


def link_to_fifo(path):
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


KINDS = [fifo, bound_socket, device, terminal, folder, link_to_fifo]


def soon(call):
    """The error of a call, which must not wait."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for a writer that may never come"
    return errors[0] if errors else None


@pytest.fixture(autouse=True)
def in_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("make", KINDS)
def test_models(make, tmp_path):
    (tmp_path / "model").mkdir()
    make(tmp_path / "model" / "model.bin")
    model = small(*problem())
    for call in (lambda: torch.ops.xsoftmax.xr_linear_load(str(tmp_path / "model")), lambda: xs.XRLinear.load(tmp_path / "model"),
                 lambda: torch.ops.xsoftmax.xr_linear_check_target(str(tmp_path / "model")), lambda: model.save(tmp_path / "model")):
        error = soon(call)
        assert isinstance(error, (ValueError, FileNotFoundError)) and str(tmp_path) in str(error)
    assert os.listdir(tmp_path / "model")[0].startswith("model."), "what is not ours stays"


def test_a_model_that_is_a_fifo_is_said_to_be_one(tmp_path):
    """That there is no model.bin would send the user to look for a file that is there."""
    fifo(tmp_path / "model.bin")
    error = soon(lambda: xs.XRLinear.load(tmp_path))
    assert isinstance(error, ValueError) and str(error) == f"XRLinear.load: expected {tmp_path / 'model.bin'} as a file, got a FIFO"



@pytest.mark.parametrize("make", KINDS)
def test_targets_of_models(make, tmp_path):
    make(tmp_path / "model")
    model = small(*problem())
    error = soon(lambda: model.save(tmp_path / "model"))
    assert isinstance(error, ValueError) and str(tmp_path) in str(error)


@pytest.mark.parametrize("make", KINDS)
def test_trees(make, tmp_path):
    path = tmp_path / "tree.pt"
    make(path)
    kind = os.lstat(path).st_mode
    for call in (lambda: xs.LabelTree.load(path), lambda: xs.LabelTree.balanced(9, 3).save(path)):
        error = soon(call)
        assert isinstance(error, (ValueError, IsADirectoryError)) and str(path) in str(error)
    assert os.lstat(path).st_mode == kind and os.listdir(tmp_path)[0].startswith("tree.")


@pytest.mark.parametrize("make", KINDS)
def test_tables(make, tmp_path):
    path = tmp_path / "t.safetensors"
    make(path)
    for call in (lambda: xs.tables.open(path), lambda: xs.tables.open(path, writable=False), lambda: xs.tables.mapped(path, 9, 3, progress=False)):
        error = soon(call)
        assert isinstance(error, ValueError) and str(path) in str(error) or os.path.realpath(path) in str(error)
    assert os.path.lexists(path)


@pytest.mark.parametrize("make", KINDS)
def test_state_of_optimizers(make, tmp_path):
    """The file of an optimizer's state stands beside the table's, where anything may have its name."""
    weight = xs.tables.mapped(tmp_path / "t", 9, 3, progress=False)
    make(tmp_path / "t.row_adagrad")
    optimizer = xs.optim.RowAdagrad([weight])
    weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), weight.shape)
    error = soon(optimizer.step)
    assert isinstance(error, ValueError) and "as a file, got a" in str(error)
