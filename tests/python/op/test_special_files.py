"""FIFOs, sockets, devices and folders instead of a file raise an error and never block."""

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
    os.fchdir(here)  # paths of sockets must be short
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
    """Returns the error of a call, which must end within 20 seconds."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the call blocks"
    return errors[0] if errors else None


@pytest.fixture(autouse=True)
def in_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("make", KINDS)
def test_a_model_whose_file_is_special_is_refused(make, tmp_path):
    (tmp_path / "model").mkdir()
    make(tmp_path / "model" / "model.bin")
    model = small(*problem())
    for call in (lambda: torch.ops.xsoftmax.xr_linear_load(str(tmp_path / "model")),
                 lambda: xs.XRLinear.load(tmp_path / "model"),
                 lambda: torch.ops.xsoftmax.xr_linear_check_target(str(tmp_path / "model")),
                 lambda: model.save(tmp_path / "model")):
        error = soon(call)
        assert isinstance(error, (ValueError, FileNotFoundError)) and str(tmp_path) in str(error)
    assert os.listdir(tmp_path / "model")[0].startswith("model."), "the special file is still there"


def test_the_error_for_a_fifo_names_it(tmp_path):
    """An error that model.bin is missing would be wrong."""
    fifo(tmp_path / "model.bin")
    error = soon(lambda: xs.XRLinear.load(tmp_path))
    assert isinstance(error, ValueError) and str(
        error) == f"XRLinear.load: expected {tmp_path / 'model.bin'} as a file, got a FIFO"


@pytest.mark.parametrize("make", KINDS)
def test_saving_a_model_over_a_special_file_is_refused(make, tmp_path):
    make(tmp_path / "model")
    model = small(*problem())
    error = soon(lambda: model.save(tmp_path / "model"))
    assert isinstance(error, ValueError) and str(tmp_path) in str(error)


@pytest.mark.parametrize("make", KINDS)
def test_trees_do_not_read_or_replace_special_files(make, tmp_path):
    path = tmp_path / "tree.pt"
    make(path)
    kind = os.lstat(path).st_mode
    for call in (lambda: xs.LabelTree.load(path), lambda: xs.LabelTree.balanced(9, 3).save(path)):
        error = soon(call)
        assert isinstance(error, (ValueError, IsADirectoryError)) and str(path) in str(error)
    assert os.lstat(path).st_mode == kind and os.listdir(tmp_path)[0].startswith("tree.")


@pytest.mark.parametrize("make", KINDS)
def test_tables_do_not_open_or_replace_special_files(make, tmp_path):
    path = tmp_path / "t.safetensors"
    make(path)
    for call in (lambda: xs.tables.open(path), lambda: xs.tables.open(path, writable=False),
                 lambda: xs.tables.mapped(path, 9, 3, progress=False)):
        error = soon(call)
        assert isinstance(
            error, ValueError) and str(path) in str(error) or os.path.realpath(path) in str(error)
    assert os.path.lexists(path)


@pytest.mark.parametrize("make", KINDS)
def test_optimizer_state_does_not_open_special_files(make, tmp_path):
    """The state of an optimizer has its own file next to that of the table."""
    weight = xs.tables.mapped(tmp_path / "t", 9, 3, progress=False)
    make(tmp_path / "t.row_adagrad")
    optimizer = xs.optim.RowAdagrad([weight])
    weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), weight.shape)
    error = soon(optimizer.step)
    assert isinstance(error, ValueError) and "as a file, got a" in str(error)
