"""Files of tables across processes: the mark in the header says whether a file is whole, also after
its process was killed, exited or forked, or while another process has it open."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import xsoftmax as xs
from mapped_table_checks import OPTIMIZERS, D, N, in_memory, made, ops, state_of, train
from mapped_table_checks import path  # noqa: F401 (a fixture)


def test_the_mark_is_dirty_from_a_step_to_the_next_flush(path):
    weight = made(path)
    optimizer = xs.optim.RowAdagrad([weight], lr=0.1)
    states = [state_of(path)]
    for _ in range(2):
        train(weight, optimizer, 1)
        states += [state_of(path), state_of(path + ".row_adagrad")]
        xs.tables.flush(weight)
        states += [state_of(path), state_of(path + ".row_adagrad")]
    assert states == ["whole"] + ["dirty", "dirty", "whole", "whole"] * 2
    sgd = torch.optim.SGD([weight], lr=0.1)  # an optimizer that does not know about files
    train(weight, sgd, 1)
    assert state_of(path) == "dirty"
    xs.tables.flush(weight)
    xs.optim.reset_rows(weight, torch.tensor([1]), torch.zeros(1, D))
    assert state_of(path) == "dirty"
    del weight, optimizer, sgd
    assert state_of(path) == "whole", "the last tensor closes the file"
    xs.tables.open(path)
    assert state_of(path) == "whole"


def in_a_child(run, *args):
    """Returns the process id of a fork that runs `run`, and the read end of a pipe that it writes
    to."""
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            os.close(ear)
            run(mouth, *args)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(mouth)
    return child, ear


def kill(child):
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def step_by_hand(weight, optimizer, step):
    """A step without the autograd engine, which a forked process may not use."""
    torch.manual_seed(step)
    weight.grad = torch.sparse_coo_tensor(torch.randint(N, (1, 200)), torch.randn(200, D),
                                          weight.shape)
    optimizer.step()


def train_until_killed(mouth, path):
    os.write(mouth, b".")
    weight = made(path)
    optimizer, step = xs.optim.RowAdagrad([weight], lr=0.1), 0
    while True:
        for step in range(step, step + 3):
            step_by_hand(weight, optimizer, step)
        step += 1
        xs.tables.flush(weight)
        time.sleep(0.01)


def test_a_process_killed_at_any_moment_leaves_a_consistent_file(tmp_path):
    """The file either says that it is not whole, or holds the table and state of some number of
    complete steps."""
    outcomes = []
    for number, delay in enumerate(np.random.default_rng(0).uniform(0, 0.15, 12)):
        path = str(tmp_path / f"{number}.safetensors")
        child, ear = in_a_child(train_until_killed, path)
        assert os.read(ear, 1) == b"."
        time.sleep(delay)
        kill(child)
        os.close(ear)
        if not os.path.exists(path):
            outcomes.append("not begun")
            continue
        try:
            weight = xs.tables.open(path)
            state = ops.row_adagrad_state(weight, True,
                                          "lr=0.1") if os.path.exists(path + ".row_adagrad") else [
                                              torch.tensor(0), torch.zeros(N, D)
                                          ]
        except RuntimeError as error:
            assert "is not whole" in str(error) and path in str(error)
            outcomes.append("told")
            continue
        expected = in_memory(made(path + "2"))
        optimizer = xs.optim.RowAdagrad([expected], lr=0.1)
        for step in range(int(state[0])):
            step_by_hand(expected, optimizer, step)
        assert torch.equal(weight, expected) and torch.equal(
            state[1], optimizer.state[expected].get("sum", torch.zeros(N, D)))
        outcomes.append("whole")
    assert outcomes.count("told") + outcomes.count("whole") > 6, outcomes


def change_and(how):
    def run(mouth, path):
        weight = made(path)
        step_by_hand(weight, optimizer := xs.optim.RowSGD([weight]), 0)
        if how == "flush":
            xs.tables.flush(weight)
        if how == "let go":
            del weight, optimizer
        os.kill(os.getpid(), signal.SIGKILL)

    return run


def test_files_of_killed_processes_are_opened_with_recover_only(path):
    for how, state in (("flush", "whole"), ("let go", "whole"), ("", "dirty")):
        child, ear = in_a_child(change_and(how), path + how)
        os.waitpid(child, 0)
        os.close(ear)
        assert state_of(path + how) == state, how
    for use in (made, xs.tables.open):
        with pytest.raises(RuntimeError, match="its process ended while it was written "
                           "to.*recover=True"):
            use(path)
    weight = xs.tables.open(path, recover=True)
    optimizer = xs.optim.RowSGD([weight])
    train(weight, optimizer, 1)
    assert int(optimizer.state[weight]["step"]) == 2, "a recovered table must keep its state"
    del weight, optimizer
    assert state_of(path) == state_of(
        path + ".row_sgd") == "dirty", "a recovered file stays dirty until a flush"
    weight = xs.tables.open(path, recover=True)
    train(weight, optimizer := xs.optim.RowSGD([weight]), 1)
    xs.tables.flush(weight)
    del weight, optimizer
    assert state_of(path) == state_of(path + ".row_sgd") == "whole"


def test_a_refused_file_keeps_its_mark(path):
    """A failed attempt to open a torn file must not mark it as whole."""
    child, ear = in_a_child(change_and(""), path)
    os.waitpid(child, 0)
    os.close(ear)
    before = Path(path + ".row_sgd").read_bytes()
    with pytest.raises(ValueError, match="as the file of a table, got one of kind"):
        xs.tables.open(path + ".row_sgd", recover=True)
    weight = xs.tables.open(path, recover=True)
    with pytest.raises(ValueError, match="as state under the same options"):
        train(weight, xs.optim.RowSGD([weight], momentum=0.5), 1)
    xs.tables.flush(weight)
    assert state_of(path) == "whole" and Path(
        path + ".row_sgd").read_bytes() == before and state_of(path + ".row_sgd") == "dirty"


@pytest.mark.slow
def test_an_exit_leaves_whole_files(path):
    """Without closing them, also after an error."""
    code = (f"import torch, xsoftmax as xs; weight = xs.tables.mapped({path!r}, {N}, {D}, "
            "progress=False); optimizer = xs.optim.RowSGD([weight])\n"
            f"weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, {D}), weight.shape); "
            "optimizer.step(); raise SystemExit(3)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3
    assert state_of(path) == state_of(path + ".row_sgd") == "whole"


def test_a_file_whose_creation_was_interrupted_is_refused(path):
    child, ear = in_a_child(
        lambda mouth: made(path, init=lambda rows: os.kill(os.getpid(), signal.SIGKILL)))
    os.waitpid(child, 0)
    os.close(ear)
    Path(path + "0").touch()  # interrupted before the first byte
    for file in (path, path + "0"):
        for recover in (False, True):
            with pytest.raises(RuntimeError, match="creation was not finished"):
                xs.tables.open(file, recover=recover)
    os.unlink(path + "0")

    def fails(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(path + "2", init=fails)
    assert os.listdir(Path(path).parent) == [Path(path).name], "an error must leave no file"


def hold_open(mouth, path, writable):
    weight = xs.tables.open(path, writable=writable)
    os.write(mouth, b".")
    time.sleep(60)
    weight.sum()


def test_a_file_in_use_by_another_process_is_refused(path):
    made(path)
    for writable in (False, True):
        child, ear = in_a_child(hold_open, path, writable)
        assert os.read(ear, 1) == b"."
        with pytest.raises(RuntimeError, match="is in use by another process"):
            xs.tables.open(path)
        if not writable:
            assert xs.tables.open(path,
                                  writable=False).shape == (N, D), "several processes may read"
        kill(child)
        os.close(ear)
    weight = xs.tables.open(path, recover=True)
    again = xs.tables.open(path)
    assert again.data_ptr() == weight.data_ptr(), "within one process it must be the same memory"
    with pytest.raises(RuntimeError, match="is open in this process for writing already"):
        xs.tables.open(path, writable=False)
    child, ear = in_a_child(lambda mouth: None)  # shares the lock, and exits
    os.waitpid(child, 0)
    os.close(ear)
    assert xs.tables.open(path).data_ptr() == weight.data_ptr()


@pytest.mark.slow
def test_pending_updates_are_written_at_exit(path):
    """Without a flush the rows equal those after the optimizer's flush."""
    program = """if True:
        import sys, torch, xsoftmax as xs
        weight = xs.tables.mapped(sys.argv[1], 50, 8, init=None)
        other = torch.nn.Parameter(torch.zeros(50, 8))
        optimizer, twin = (xs.optim.RowAdam([table], lr=.1) for table in (weight, other))
        for row in range(5):
            for table in (weight, other):
                table.grad = torch.sparse_coo_tensor([[row]], torch.ones(1, 8), (50, 8))
            optimizer.step()
            twin.step()
        twin.flush()
        torch.save(other.detach(), sys.argv[1] + ".twin")
    """
    subprocess.run([sys.executable, "-c", program, path], check=True)
    assert state_of(path) == "whole"
    assert torch.equal(xs.tables.open(path, writable=False).detach(), torch.load(path + ".twin"))


def test_a_forked_process_does_not_write(path):
    weight = made(path)
    optimizer = OPTIMIZERS["RowSGD"]([weight])
    train(weight, optimizer, 1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no training, because torch's threads do not survive a fork
        said = []
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, D), (N, D))
        for act in (optimizer.step, lambda: xs.tables.flush(weight)):
            try:
                act()
                said.append("no error")
            except RuntimeError as error:
                said.append(str(error).splitlines()[0])
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 10_000).decode().splitlines()
    os.close(read), os.close(write)
    assert len(said) == 2 and all("only that one may write to it" in line for line in said), said
    assert state_of(path) == "dirty"
    xs.tables.flush(weight)
    assert state_of(path) == "whole"


def test_a_flush_during_a_step_leaves_the_file_dirty(path):
    """Another thread is still writing rows."""
    weight = made(path)
    optimizer = xs.optim.RowAdagrad([weight], lr=0.1)
    step_by_hand(weight, optimizer, 0)
    state, rows, values = optimizer._tensors(optimizer.state[weight]), torch.randint(
        N, (1_000_000,)), torch.randn(1_000_000, D)
    xs.tables.flush(weight)
    # Calls the operator, because the optimizer marks the file before the step begins.
    thread = threading.Thread(target=ops.row_adagrad_step_,
                              args=([weight.detach()], [rows], [values], state, ["lr=0.1"], [1]))
    thread.start()
    while state_of(path) == "whole":
        time.sleep(0.001)
    xs.tables.flush(weight)
    state, writing = state_of(path) + state_of(path + ".row_adagrad"), thread.is_alive()
    thread.join()
    assert writing and state == "dirtydirty"
    xs.tables.flush(weight)
    assert state_of(path) == state_of(path + ".row_adagrad") == "whole"
