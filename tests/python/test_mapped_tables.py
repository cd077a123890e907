"""Tables in files: what is written is there when they are opened again, a file that is not whole says so, and what does not fit is refused by name."""

import copy
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import xsoftmax as xs

ops = torch.ops.xsoftmax
N, D, Q = 3000, 24, 32
OPTIMIZERS = {
    "RowSGD": lambda params: xs.optim.RowSGD(params, lr=0.1),
    "RowSGD, momentum": lambda params: xs.optim.RowSGD(params, lr=0.1, momentum=0.9),
    "RowAdagrad": lambda params: xs.optim.RowAdagrad(params, lr=0.1, initial_accumulator_value=0.25),
    "RowAdagrad, row_wise": lambda params: xs.optim.RowAdagrad(params, lr=0.1, row_wise=True),
    "RowAdam": lambda params: xs.optim.RowAdam(params, lr=0.1, weight_decay=0.01),
}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "classes.safetensors")


def state_of(path):
    """As the header has it, read by other means than the library's."""
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]["state"]


def made(path, **options):
    torch.manual_seed(1)
    return xs.tables.mapped(path, N, D, progress=False, **options)


def in_memory(weight):
    return nn.Parameter(weight.detach().clone())


def loss_over(weight):
    return xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler="log_uniform", num_samples=40)


def train(weight, optimizer, steps, seed=0):
    torch.manual_seed(seed)
    loss = loss_over(weight)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randn(Q, D), torch.randint(N, (Q,))).backward()
        optimizer.step()


def test_what_is_made(path):
    weight = made(path)
    assert type(weight) is nn.Parameter and weight.shape == (N, D) and weight.requires_grad and state_of(path) == "whole"
    assert weight.abs().max() <= D ** -0.5 and weight.std().item() == pytest.approx((D * 3) ** -0.5, rel=0.02)
    assert torch.equal(weight, made(path + "2")), "a seed makes the same table"
    file = np.memmap(path, np.float32, "r", 4096, (N, D))
    assert np.array_equal(file, weight.detach().numpy())
    assert os.path.getsize(path) == 4096 + N * D * 4


def test_other_programs_read_it(path):
    safetensors = pytest.importorskip("safetensors.torch")
    table = made(path)
    assert torch.equal(safetensors.load_file(path)["weight"], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(N, D), (1, 3), (N,), (0, 4), (5, 0)])
def test_dtypes_and_shapes(path, dtype, shape):
    weight = xs.tables.mapped(path, *shape, dtype=dtype, progress=False) if len(shape) == 2 else xs.tables.mapped(path, *shape, None, dtype, progress=False)
    before = weight.detach().clone()
    del weight
    again = xs.tables.open(path)
    assert again.dtype == dtype and again.shape == shape and torch.equal(again, before)


def test_blocks_and_zeros(path, monkeypatch):
    """Blocks of any length, from the last to the first, are where they belong; zeros need no function."""
    monkeypatch.setattr(xs.tables, "_BLOCK", 70 * D * 4)
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
    """Bit for bit, also where the second half is done by another optimizer, which finds the state in its file."""
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


def test_the_mark_follows_what_is_written(path):
    weight = made(path)
    optimizer = xs.optim.RowAdagrad([weight], lr=0.1)
    states = [state_of(path)]
    for _ in range(2):
        train(weight, optimizer, 1)
        states += [state_of(path), state_of(path + ".row_adagrad")]
        xs.tables.flush(weight)
        states += [state_of(path), state_of(path + ".row_adagrad")]
    assert states == ["whole"] + ["dirty", "dirty", "whole", "whole"] * 2
    sgd = torch.optim.SGD([weight], lr=0.1)  # knows nothing of files
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
    """The process id of a fork that runs until it is killed, and the end of a pipe that hears from it."""
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
    """Without the autograd engine, which a fork may not use."""
    torch.manual_seed(step)
    weight.grad = torch.sparse_coo_tensor(torch.randint(N, (1, 200)), torch.randn(200, D), weight.shape)
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


def test_kill(tmp_path):
    """A process that is killed at any moment leaves files that say so, or a table and state that are what so many steps make of them."""
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
            state = ops.row_adagrad_state(weight, True, "lr=0.1") if os.path.exists(path + ".row_adagrad") else [torch.tensor(0), torch.zeros(N, D)]
        except RuntimeError as error:
            assert "is not whole" in str(error) and path in str(error)
            outcomes.append("told")
            continue
        expected = in_memory(made(path + "2"))
        optimizer = xs.optim.RowAdagrad([expected], lr=0.1)
        for step in range(int(state[0])):
            step_by_hand(expected, optimizer, step)
        assert torch.equal(weight, expected) and torch.equal(state[1], optimizer.state[expected].get("sum", torch.zeros(N, D)))
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


def test_what_a_killed_process_leaves(path):
    for how, state in (("flush", "whole"), ("let go", "whole"), ("", "dirty")):
        child, ear = in_a_child(change_and(how), path + how)
        os.waitpid(child, 0)
        os.close(ear)
        assert state_of(path + how) == state, how
    for use in (made, xs.tables.open):
        with pytest.raises(RuntimeError, match="its process ended while it was written to.*recover=True"):
            use(path)
    weight = xs.tables.open(path, recover=True)
    optimizer = xs.optim.RowSGD([weight])
    train(weight, optimizer, 1)
    assert int(optimizer.state[weight]["step"]) == 2, "what is recovered has its state with it"
    del weight, optimizer
    assert state_of(path) == state_of(path + ".row_sgd") == "dirty", "nobody has said that it is good"
    weight = xs.tables.open(path, recover=True)
    train(weight, optimizer := xs.optim.RowSGD([weight]), 1)
    xs.tables.flush(weight)
    del weight, optimizer
    assert state_of(path) == state_of(path + ".row_sgd") == "whole"


def test_a_refused_file_keeps_its_mark(path):
    """A torn file does not become whole by an attempt to open it."""
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
    assert state_of(path) == "whole" and Path(path + ".row_sgd").read_bytes() == before and state_of(path + ".row_sgd") == "dirty"


def test_the_end_of_a_process(path):
    """An exit, with an error as well, leaves whole files behind: nobody has to close them."""
    code = (f"import torch, xsoftmax as xs; weight = xs.tables.mapped({path!r}, {N}, {D}, progress=False); optimizer = xs.optim.RowSGD([weight])\n"
            f"weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, {D}), weight.shape); optimizer.step(); raise SystemExit(3)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3
    assert state_of(path) == state_of(path + ".row_sgd") == "whole"


def test_creation_that_is_cut_short(path):
    child, ear = in_a_child(lambda mouth: made(path, init=lambda rows: os.kill(os.getpid(), signal.SIGKILL)))
    os.waitpid(child, 0)
    os.close(ear)
    Path(path + "0").touch()  # before its first byte
    for file in (path, path + "0"):
        for recover in (False, True):
            with pytest.raises(RuntimeError, match="creation was not finished"):
                xs.tables.open(file, recover=recover)
    os.unlink(path + "0")

    def fails(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(path + "2", init=fails)
    assert os.listdir(Path(path).parent) == [Path(path).name], "an error leaves nothing behind"


def hold_open(mouth, path, writable):
    weight = xs.tables.open(path, writable=writable)
    os.write(mouth, b".")
    time.sleep(60)
    weight.sum()


def test_in_use(path):
    made(path)
    for writable in (False, True):
        child, ear = in_a_child(hold_open, path, writable)
        assert os.read(ear, 1) == b"."
        with pytest.raises(RuntimeError, match="is in use by another process"):
            xs.tables.open(path)
        if not writable:
            assert xs.tables.open(path, writable=False).shape == (N, D), "many may read"
        kill(child)
        os.close(ear)
    weight = xs.tables.open(path, recover=True)
    again = xs.tables.open(path)
    assert again.data_ptr() == weight.data_ptr(), "in one process it is the same memory"
    with pytest.raises(RuntimeError, match="is open in this process for writing already"):
        xs.tables.open(path, writable=False)
    child, ear = in_a_child(lambda mouth: None)  # which has the lock as well, and ends
    os.waitpid(child, 0)
    os.close(ear)
    assert xs.tables.open(path).data_ptr() == weight.data_ptr()


def test_reading(path):
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
    (lambda file: file.truncate(4096 + N * D * 4 - 1), f"is damaged: expected {4096 + N * D * 4} bytes, got {4096 + N * D * 4 - 1}"),
    (lambda file: file.truncate(10**7), "is damaged: expected"),
    (lambda file: file.truncate(100), "a file that xs.tables made"),
    (lambda file: file.write(b"x" * 50), "a file that xs.tables made"),
    (overwrite(b'"whole"', b'"hole."'), "a file that xs.tables made"),
    (overwrite(b'"shape":[3000,24]', b'"shape":[3000,25]'), "a file that xs.tables made"),
    (overwrite(b'"shape":[3000,24]', b'"shape":[3000,99999999999999999999]'), "a file that xs.tables made"),
    (overwrite(b'"kind":"table"', b'"kind":"other"'), "as the file of a table, got one of kind"),
])
def test_damaged_and_foreign_files(path, change, message):
    damaged(path, change)
    before = Path(path).read_bytes()
    for use in (made, xs.tables.open):
        with pytest.raises(ValueError, match=message):
            use(path)
    assert Path(path).read_bytes() == before, "what is not ours is not written to"


def test_what_does_not_fit(path, tmp_path):
    made(path)
    for shape, dtype in (((N + 1, D), torch.float32), ((N, D - 1), torch.float32), ((N,), torch.float32), ((N, D), torch.float64)):
        with pytest.raises(ValueError, match=r"expected .* as a table of shape .* got shape \[3000, 24\] and dtype torch.float32"):
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
    """An error when the file is made, or the state beside it, and nothing is left of it; not a signal at some later write."""
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


def test_state_of_another_table(path):
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


def test_a_late_momentum_changes_nothing(path):
    """Also of the parameters before the table."""
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
    """state_dict and its load go by the memory of the file; copies are in memory."""
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
    assert ops.mapped_table_path(loss.linear.weight) == path and ops.mapped_table_path(optimizer.state[weight]["sum"]) == path + ".row_adagrad"
    assert int(optimizer.state[weight]["step"]) == 2 and not torch.equal(weight, after)
    torch.manual_seed(0)
    train(weight, optimizer, 2)
    xs.tables.flush(weight)
    assert loss.to("cpu").linear.weight is weight
    with pytest.raises(RuntimeError, match="one that lies in the file"):
        loss.resize_classes(N + 1)


@pytest.mark.parametrize("last", ["in a file", "in memory"])
def test_a_refused_load_changes_no_file(path, last):
    """What is wrong with the state of the last parameter is found before that of the first is written."""
    weights = [made(path), made(path + "2") if last == "in a file" else nn.Parameter(torch.zeros(N, D))]
    optimizer = xs.optim.RowAdagrad(weights, lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        for weight in weights:
            weight.grad = torch.sparse_coo_tensor(torch.randint(N, (1, 50)), torch.randn(50, D), weight.shape)
        optimizer.step()
        if seed == 0:
            saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["sum"] = saved["state"][1]["sum"].double()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((ValueError, TypeError), match="RowAdagrad: expected sum of parameter 1|row_adagrad_flush_: expected sum of dtype"):
        optimizer.load_state_dict(saved)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items()), number


def test_losses_over_a_file(path):
    """Exact values, the best classes and an index are those of the table in memory."""
    weight = made(path)
    mapped, plain = loss_over(weight), loss_over(in_memory(weight))
    x, target = torch.randn(Q, D), torch.randint(N, (Q,))
    for loss in (mapped, plain):
        loss.eval()
    assert torch.equal(mapped(x, target), plain(x, target))
    assert torch.equal(mapped.topk(x, 5)[1], plain.topk(x, 5)[1]) and torch.equal(mapped.search(x, 5).ids, plain.search(x, 5).ids)


def test_prefetch(path):
    weight = made(path)
    xs.tables.prefetch(weight, torch.randint(N, (3, 50)))
    xs.tables.prefetch(weight, torch.empty(0, dtype=torch.int64))
    xs.tables.prefetch(torch.ones(3, 4), torch.tensor([2]))
    with pytest.raises(IndexError, match="prefetch"):
        xs.tables.prefetch(weight, torch.tensor([N]))
    with pytest.raises(TypeError, match="int64"):
        xs.tables.prefetch(weight, torch.tensor([1.0]))
    train(weight, xs.optim.RowAdam([weight]), 1)
    xs.tables.prefetch(weight, torch.arange(N))  # the state beside it as well


def test_a_relative_path_and_another_folder(tmp_path, monkeypatch):
    """State stands beside the table, whichever folder the program is in by then, and by whichever link the table was opened."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    weight = xs.tables.mapped("table", N, D, init=None)
    monkeypatch.chdir(tmp_path / "b")
    optimizer = OPTIMIZERS["RowAdagrad"]([weight])
    train(weight, optimizer, 2)
    assert sorted(os.listdir(tmp_path / "a")) == ["table", "table.row_adagrad"] and os.listdir(tmp_path / "b") == []
    del weight, optimizer
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a" / "table")
    weight = xs.tables.open("link")
    optimizer = OPTIMIZERS["RowAdagrad"]([weight])
    train(weight, optimizer, 1)
    assert optimizer.state[weight]["step"] == 3


def test_a_program_ends_with_nothing_owed(path):
    """Without a flush: the rows are those of the optimizer's flush."""
    program = """if True:
        import sys, torch, xsoftmax as xs
        weight = xs.tables.mapped(sys.argv[1], 50, 8, init=None)
        other = torch.nn.Parameter(torch.zeros(50, 8))
        optimizer, twin = (xs.optim.RowAdam([table], lr=.1) for table in (weight, other))
        for row in range(5):
            for table in (weight, other):
                table.grad = torch.sparse_coo_tensor(torch.tensor([[row]]), torch.ones(1, 8), (50, 8))
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
    if child == 0:  # no training here: torch's threads do not survive a fork
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


def test_moved_and_deleted(path):
    """What is trained no longer reaches the file: a warning, or an error of flush."""
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
        rows[: len(rows) // 2].fill_(2.0)

    weight = made(path, init=half)
    assert weight[: N // 2].eq(2).all() and weight[N // 2:].eq(0).all()


def test_a_flush_in_the_middle_of_a_step(path):
    """What another thread is writing is not whole."""
    weight = made(path)
    optimizer = xs.optim.RowAdagrad([weight], lr=0.1)
    step_by_hand(weight, optimizer, 0)
    state, rows, values = optimizer._tensors(optimizer.state[weight]), torch.randint(N, (1_000_000,)), torch.randn(1_000_000, D)
    xs.tables.flush(weight)
    # By the operator: the optimizer takes the mark away before it begins.
    thread = threading.Thread(target=ops.row_adagrad_step_, args=([weight.detach()], [rows], [values], state, ["lr=0.1"], [1]))
    thread.start()
    while state_of(path) == "whole":
        time.sleep(0.001)
    xs.tables.flush(weight)
    state, writing = state_of(path) + state_of(path + ".row_adagrad"), thread.is_alive()
    thread.join()
    assert writing and state == "dirtydirty"
    xs.tables.flush(weight)
    assert state_of(path) == state_of(path + ".row_adagrad") == "whole"


def test_rows_follow_a_renamed_file(path):
    """They go to the file that is open, not to another one that has taken its name."""
    table = ops.mapped_table_create(path, [N, D], torch.float32)
    os.rename(path, path + "2")
    Path(path).write_bytes(bytes(4096 + N * D * 4))
    rows = torch.randn(N, D)
    ops.mapped_table_fill_(table, 0, rows)
    assert torch.equal(table, rows) and not any(Path(path).read_bytes())
