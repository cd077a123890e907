"""Tables in files: training, copies and reopened files equal tables in memory; damaged files and
wrong arguments are refused."""

import copy
import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import xsoftmax as xs
from mapped_table_checks import (OPTIMIZERS, D, N, Q, in_memory, loss_over, made, ops, state_of,
                                 train)
from mapped_table_checks import path  # noqa: F401 (a fixture)


def test_a_new_table_is_initialised_and_whole(path):
    weight = made(path)
    assert type(weight) is nn.Parameter and weight.shape == (
        N, D) and weight.requires_grad and state_of(path) == "whole"
    assert weight.abs().max() <= D**-0.5 and weight.std().item() == pytest.approx(
        (D * 3)**-0.5, rel=0.02)
    assert torch.equal(weight, made(path + "2")), "the same seed must make the same table"
    file = np.memmap(path, np.float32, "r", 4096, (N, D))
    assert np.array_equal(file, weight.detach().numpy())
    assert os.path.getsize(path) == 4096 + N * D * 4


def test_safetensors_reads_the_file(path):
    safetensors = pytest.importorskip("safetensors.torch")
    table = made(path)
    assert torch.equal(safetensors.load_file(path)["weight"], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(N, D), (1, 3), (N,), (0, 4), (5, 0)])
def test_dtypes_and_shapes(path, dtype, shape):
    weight = xs.tables.mapped(path, *shape, dtype=dtype,
                              progress=False) if len(shape) == 2 else xs.tables.mapped(
                                  path, *shape, None, dtype, progress=False)
    before = weight.detach().clone()
    del weight
    again = xs.tables.open(path)
    assert again.dtype == dtype and again.shape == shape and torch.equal(again, before)


def test_blocks_and_zeros(path, monkeypatch):
    """init fills blocks from the last to the first, and each is at its place. init=None makes
    zeros."""
    monkeypatch.setattr(xs.tables.mapped_tables, "_BLOCK", 70 * D * 4)
    blocks = []

    def init(rows):
        rows.fill_(len(blocks))
        blocks.append(len(rows))

    weight = made(path, init=init)
    assert sum(blocks) == N and len(blocks) == -(-N // 70) and blocks[0] == N % 70
    assert torch.equal(weight[:, 0].long(), len(blocks) - 1 - torch.arange(N) // 70)
    assert not made(path + "2", init=None).any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_that_in_memory(path, name):
    """Bit for bit, also if a new optimizer continues, which finds its state in the file."""
    weight = made(path)
    plain = in_memory(weight)
    train(plain, optimizer := OPTIMIZERS[name]([plain]), 6)
    optimizer.flush()
    train(plain, optimizer, 5, seed=1)
    optimizer.flush()

    train(weight, OPTIMIZERS[name]([weight]), 6)
    xs.tables.flush(weight)
    assert state_of(path) == state_of(f"{path}.{optimizer._op}") == "whole"
    del weight
    weight = xs.tables.open(path)
    train(weight, second := OPTIMIZERS[name]([weight]), 5, seed=1)
    xs.tables.flush(weight)
    assert torch.equal(weight, plain)
    for key, value in optimizer.state[plain].items():
        assert torch.equal(second.state[weight][key], value), key


def test_a_table_opened_for_reading_does_not_change_the_file(path):
    before = made(path).detach().clone()
    os.chmod(path, 0o444)
    weight = xs.tables.open(path, writable=False)
    optimizer = xs.optim.RowSGD([weight])
    train(weight, optimizer, 2)
    assert not torch.equal(weight, before) and os.listdir(Path(path).parent) == [Path(path).name]
    with pytest.raises(RuntimeError, match="is open for reading"):
        xs.tables.flush(weight)
    del weight, optimizer
    assert torch.equal(xs.tables.open(path, writable=False), before) and state_of(path) == "whole"


def damaged(path, change):
    made(path)
    with open(path, "r+b") as file:
        change(file)


def overwrite(old, new):
    def change(file):
        page = file.read(4096)
        assert page.count(old) == 1
        file.seek(0)
        file.write(page.replace(old, new))

    return change


@pytest.mark.parametrize("change, message", [
    (lambda file: file.truncate(4096 + N * D * 4 - 1), f"is damaged: expected {4096 + N * D * 4} "
     f"bytes, got {4096 + N * D * 4 - 1}"),
    (lambda file: file.truncate(10**7), "is damaged: expected"),
    (lambda file: file.truncate(100), "a file that xs.tables made"),
    (lambda file: file.write(b"x" * 50), "a file that xs.tables made"),
    (overwrite(b'"whole"', b'"hole."'), "a file that xs.tables made"),
    (overwrite(b'"shape":[3000,24]', b'"shape":[3000,25]'), "a file that xs.tables made"),
    (overwrite(b'"shape":[3000,24]', b'"shape":[3000,99999999999999999999]'), "a file that "
     "xs.tables made"),
    (overwrite(b'"kind":"table"', b'"kind":"other"'), "as the file of a table, got one of kind"),
])
def test_damaged_and_foreign_files(path, change, message):
    damaged(path, change)
    before = Path(path).read_bytes()
    for use in (made, xs.tables.open):
        with pytest.raises(ValueError, match=message):
            use(path)
    assert Path(path).read_bytes() == before, "files of other programs must not be written to"


def test_wrong_arguments_are_refused(path, tmp_path):
    made(path)
    for shape, dtype in (((N + 1, D), torch.float32), ((N, D - 1), torch.float32),
                         ((N,), torch.float32), ((N, D), torch.float64)):
        with pytest.raises(
                ValueError, match=r"expected .* as a table of shape .* got shape "
                r"\[3000, 24\] and dtype torch.float32"):
            xs.tables.mapped(path, shape[0], shape[1] if len(shape) == 2 else None, dtype)
    with pytest.raises(RuntimeError, match="cannot make .*No such file or directory"):
        xs.tables.mapped(tmp_path / "nowhere" / "x", 3, 4)
    with pytest.raises(RuntimeError, match="cannot open .*No such file or directory"):
        xs.tables.open(tmp_path / "x")
    for odd in (tmp_path, "/dev/null"):
        with pytest.raises((RuntimeError, ValueError), match="as a file, got a (folder|device)"):
            xs.tables.open(odd)
    with pytest.raises(TypeError, match="floating dtype, got int64"):
        xs.tables.mapped(path + "2", 3, 4, torch.int64)
    with pytest.raises(ValueError, match="num_rows of at least 0"):
        xs.tables.mapped(path + "2", -1, 4)
    with pytest.raises(TypeError, match="init as a function"):
        xs.tables.mapped(path + "2", 3, 4, init="normal")
    with pytest.raises(ValueError, match="a table that lies in a file, got one in memory"):
        xs.tables.flush(torch.ones(3, 4))
    assert os.listdir(tmp_path) == [Path(path).name]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write to any file")
def test_permissions(path, tmp_path):
    made(path)
    os.chmod(path, 0o444)
    with pytest.raises(RuntimeError, match="cannot open .* for writing: Permission denied"):
        xs.tables.open(path)


def test_full_disk(path):
    """A full disk raises when the table or its state is created, and leaves no file. A later write
    must not end in a signal."""
    weight = made(path)
    optimizer = xs.optim.RowAdam([weight])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + N * D * 4, limit[1]))
    try:
        with pytest.raises(RuntimeError, match=f"cannot reserve .*{os.strerror(errno.EFBIG)}"):
            xs.tables.mapped(path + "2", N, D + 1, progress=False)
        before = weight.detach().clone()
        with pytest.raises(RuntimeError, match="row_adam: cannot reserve"):
            train(weight, optimizer, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert torch.equal(weight, before) and os.listdir(Path(path).parent) == [Path(path).name]
    train(weight, optimizer, 1)


def test_state_of_another_table_or_other_options_is_refused(path):
    weight = made(path)
    train(weight, xs.optim.RowAdagrad([weight]), 1)
    with pytest.raises(ValueError, match="as state under the same options"):
        train(weight, xs.optim.RowAdagrad([weight], row_wise=True), 1)
    del weight
    os.unlink(path)
    weight = made(path)
    with pytest.raises(ValueError, match="got that of another one: delete it"):
        train(weight, xs.optim.RowAdagrad([weight]), 1)
    with pytest.raises(ValueError, match="as the file of a table, got one of kind \"row_adagrad\""):
        xs.tables.open(path + ".row_adagrad")
    optimizer = xs.optim.RowSGD([weight])
    train(weight, optimizer, 1)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="momentum of a mapped table from its first step on"):
        train(weight, optimizer, 1)


def test_adding_momentum_later_is_refused_and_changes_nothing(path):
    """Also not the parameters before the table."""
    params = [nn.Parameter(torch.zeros(50, D)), made(path)]
    optimizer = xs.optim.RowSGD(params, lr=0.1)
    for param in params:
        param.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, D), param.shape)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    before = copy.deepcopy([[param, optimizer.state[param]["step"]] for param in params])
    with pytest.raises(ValueError, match="momentum of a mapped table from its first step on"):
        optimizer.step()
    for param, (table, step) in zip(params, before):
        assert torch.equal(param, table) and torch.equal(optimizer.state[param]["step"], step)


def test_checkpoints_and_copies(path):
    """load_state_dict writes to the memory of the file; copies are in memory."""
    weight = made(path)
    loss, optimizer = loss_over(weight), xs.optim.RowAdagrad([weight])
    train(weight, optimizer, 2)
    saved = copy.deepcopy([loss.state_dict(), optimizer.state_dict()])
    train(weight, optimizer, 2)
    twin = copy.deepcopy(loss)
    half = copy.deepcopy(loss).half()
    for table in (twin.linear.weight, half.linear.weight, weight.detach().clone()):
        assert ops.mapped_table_path(table) == ""
    assert ops.mapped_table_path(weight) == path and torch.equal(twin.linear.weight, weight)
    after = weight.detach().clone()
    loss.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert ops.mapped_table_path(loss.linear.weight) == path and ops.mapped_table_path(
        optimizer.state[weight]["sum"]) == path + ".row_adagrad"
    assert int(optimizer.state[weight]["step"]) == 2 and not torch.equal(weight, after)
    torch.manual_seed(0)
    train(weight, optimizer, 2)
    xs.tables.flush(weight)
    assert loss.to("cpu").linear.weight is weight
    with pytest.raises(RuntimeError, match="one that lies in the file"):
        loss.resize_classes(N + 1)


@pytest.mark.parametrize("last", ["in a file", "in memory"])
def test_a_refused_load_changes_no_file(path, last):
    """Wrong state of the last parameter is found before that of the first is written."""
    weights = [
        made(path),
        made(path + "2") if last == "in a file" else nn.Parameter(torch.zeros(N, D))
    ]
    optimizer = xs.optim.RowAdagrad(weights, lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        for weight in weights:
            weight.grad = torch.sparse_coo_tensor(torch.randint(N, (1, 50)), torch.randn(50, D),
                                                  weight.shape)
        optimizer.step()
        if seed == 0:
            saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["sum"] = saved["state"][1]["sum"].double()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((ValueError, TypeError), match="RowAdagrad: expected sum of parameter "
                       "1|row_adagrad_flush_: expected sum of dtype"):
        optimizer.load_state_dict(saved)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(
            torch.equal(value, before["state"][number][name])
            for name, value in state.items()), number


def test_losses_over_a_file(path):
    """Exact losses, topk and search equal those of a table in memory."""
    weight = made(path)
    mapped, plain = loss_over(weight), loss_over(in_memory(weight))
    x, target = torch.randn(Q, D), torch.randint(N, (Q,))
    for loss in (mapped, plain):
        loss.eval()
    assert torch.equal(mapped(x, target), plain(x, target))
    assert torch.equal(mapped.topk(x, 5)[1],
                       plain.topk(x, 5)[1]) and torch.equal(
                           mapped.search(x, 5).ids,
                           plain.search(x, 5).ids)


def test_prefetch(path):
    weight = made(path)
    xs.tables.prefetch(weight, torch.randint(N, (3, 50)))
    xs.tables.prefetch(weight, torch.empty(0, dtype=torch.int64))
    for table in (weight, torch.ones(N, 4), torch.ones(N, 4,
                                                       dtype=torch.bfloat16)[:, 1:], torch.ones(N)):
        xs.tables.prefetch(table, torch.tensor([0, N - 1]))
        with pytest.raises(IndexError, match="prefetch"):
            xs.tables.prefetch(table, torch.tensor([N]))
    with pytest.raises(TypeError, match="int64"):
        xs.tables.prefetch(weight, torch.tensor([1.0]))
    train(weight, xs.optim.RowAdam([weight]), 1)
    xs.tables.prefetch(weight, torch.arange(N))  # also prefetches the optimizer state


def test_a_relative_path_and_another_folder(tmp_path, monkeypatch):
    """State is saved next to the table, also after the program changed its folder, and if the table
    was opened through a link."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    weight = xs.tables.mapped("table", N, D, init=None)
    monkeypatch.chdir(tmp_path / "b")
    optimizer = OPTIMIZERS["RowAdagrad"]([weight])
    train(weight, optimizer, 2)
    assert sorted(os.listdir(tmp_path / "a")) == ["table", "table.row_adagrad"] and os.listdir(
        tmp_path / "b") == []
    del weight, optimizer
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a" / "table")
    weight = xs.tables.open("link")
    optimizer = OPTIMIZERS["RowAdagrad"]([weight])
    train(weight, optimizer, 1)
    assert optimizer.state[weight]["step"] == 3


def test_moved_and_deleted_tables_are_reported(path):
    """Training that no longer reaches the file gives a warning, or an error from flush."""
    weight = made(path)
    os.unlink(path)
    with pytest.raises(RuntimeError, match="was deleted while it was open"):
        xs.tables.flush(weight)
    weight.data = weight.data.clone()
    optimizer = OPTIMIZERS["RowSGD"]([weight])
    with pytest.warns(UserWarning, match="does not reach the file"):
        train(weight, optimizer, 1)


def test_rows_that_init_leaves_out(path):
    def half(rows):
        rows[:len(rows) // 2].fill_(2.0)

    weight = made(path, init=half)
    assert weight[:N // 2].eq(2).all() and weight[N // 2:].eq(0).all()


def test_rows_are_written_to_a_renamed_file(path):
    """They go to the open file, not to another one that now has its name."""
    table = ops.mapped_table_create(path, [N, D], torch.float32)
    os.rename(path, path + "2")
    Path(path).write_bytes(bytes(4096 + N * D * 4))
    rows = torch.randn(N, D)
    ops.mapped_table_fill_(table, 0, rows)
    assert torch.equal(table, rows) and not any(Path(path).read_bytes())
