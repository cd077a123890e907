"""Checkpoints of split and replicated tables: saved by some ranks, resumed by others."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import xsoftmax as xs
from ranks import Ranks, ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo here")
N, D, QUERIES = 23, 6, 24  # chunks of 4 ranks: 6, 6, 6, 5
OPTIMIZERS = {
    "RowAdam": lambda parameters: xs.optim.RowAdam(parameters, lr=0.02, weight_decay=0.01),
    "RowSGD": lambda parameters: xs.optim.RowSGD(parameters, lr=0.05, momentum=0.5),
    "RowSGD without momentum": lambda parameters: xs.optim.RowSGD(parameters, lr=0.05),
    "RowAdagrad": lambda parameters: xs.optim.RowAdagrad(parameters, lr=0.05),
    "RowAdagrad row_wise": lambda parameters: xs.optim.RowAdagrad(parameters, lr=0.05, row_wise=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(D, D)
        self.loss = xs.SampledSoftmaxLoss(D, N, **{"sampler": "log_uniform", "num_samples": 7, "bias": True, **options})

    def forward(self, input, target):
        return self.loss(self.body(input), target)


class Run:
    """A model in training, on this rank or in one process."""

    def __init__(self, size, optimizer="RowAdam", split=True, **options):
        self.size, self.model = size, Model(**options)
        if size > 1:
            (xs.distributed.shard_classes if split else xs.distributed.replicate)(self.model)
        # Without find_unused_parameters it orders gradients anew after its first step, and sums of three numbers and more depend on that.
        self.called = torch.nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True) if size > 1 else self.model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.state = {"model": self.called, "optimizer": self.optimizer}

    def train(self, rank, first, last):
        """The losses of these steps."""
        values = []
        for step in range(first, last):
            random = torch.Generator().manual_seed(step)
            input, target = torch.randn(QUERIES, D, generator=random), torch.randint(N, [QUERIES], generator=random)
            part = slice(rank * QUERIES // self.size, (rank + 1) * QUERIES // self.size)
            self.optimizer.zero_grad()
            value = self.called(input[part], target[part])
            value.backward()
            xs.clip_grad_norm_(self.model.parameters(), 2.0)
            self.optimizer.step()
            values.append(value.item())
        return values

    def whole(self):
        """All of its state, as of one process."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, of_param in xs._placement.whole_state(self.optimizer, self.optimizer.state_dict())["state"].items():
            # Behind its head "owed" keeps what is no longer owed.
            state |= {f"{number}.{name}": value[:4] if name == "owed" else value for name, value in of_param.items() if value is not None}
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in state.items()}


def saved_and_went_on(rank, size, folder, steps, more, options):
    run = Run(size, **options)
    torch.manual_seed(10 + rank)
    run.train(rank, 0, steps)
    xs.distributed.save_checkpoint(folder, run.state, steps)
    saved = run.whole()
    return saved, run.train(rank, steps, steps + more), run.whole()


def resumed(rank, size, folder, more, options):
    run = Run(size, **options)
    torch.manual_seed(99)  # what is loaded decides
    step = xs.distributed.load_checkpoint(folder, run.state)
    loaded = run.whole()
    return loaded, run.train(rank, step, step + more), run.whole()


def same(got, want):
    assert set(got) == set(want)
    return all(torch.equal(got[name], table) and got[name].dtype == table.dtype for name, table in want.items())


def test_what_four_ranks_saved_any_number_resumes(tmp_path):
    steps, more = 20, 100
    results = ranks(4).run(saved_and_went_on, 4, str(tmp_path), steps, more, {})
    for went_on, again in zip(results, ranks(4).run(resumed, 4, str(tmp_path), more, {})):
        check_same(again, went_on)
    for size in (1, 2, 3):
        for again in run_of(size, resumed, str(tmp_path), more, {}):
            check_near(again, results[0])


def run_of(size, function, *args):
    return ranks(size).run(function, size, *args) if size > 1 else [function(0, 1, *args)]


def check_same(again, went_on):
    """Bit for bit: what was loaded, the losses, the state at the end."""
    assert same(again[0], went_on[0]) and again[1] == went_on[1] and same(again[2], went_on[2])


def check_near(again, went_on):
    assert same(again[0], went_on[0])
    assert max(abs(got - want) / want for got, want in zip(again[1], went_on[1], strict=True)) < 1e-5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sparse_grad", [True, False])
def test_optimizers(optimizer, sparse_grad, tmp_path):
    folder, options = str(tmp_path), dict(optimizer=optimizer, sparse_grad=sparse_grad)
    if optimizer == "Adagrad" and sparse_grad:
        options["bias"] = False
    results = ranks(2).run(saved_and_went_on, 2, folder, 6, 20, options)
    for went_on, again in zip(results, ranks(2).run(resumed, 2, folder, 20, options)):
        check_same(again, went_on)
    for size in (1, 3):
        for again in run_of(size, resumed, folder, 20, options):
            check_near(again, results[0])


def test_one_process_saves_and_ranks_resume(tmp_path):
    went_on = saved_and_went_on(0, 1, str(tmp_path), 5, 20, {})
    for again in ranks(3).run(resumed, 3, str(tmp_path), 20, {}):
        check_near(again, went_on)


def test_replicated_tables(tmp_path):
    options = dict(split=False)
    results = ranks(2).run(saved_and_went_on, 2, str(tmp_path), 6, 20, options)
    for went_on, again in zip(results, ranks(2).run(resumed, 2, str(tmp_path), 20, options)):
        check_same(again, went_on)
    assert same(resumed(0, 1, str(tmp_path), 0, options)[0], results[0][0])


def test_an_index_of_replicated_tables_is_that_of_the_first_rank(tmp_path):
    options = dict(split=False, sampler="midx", num_samples=3)
    saved, *_ = ranks(2).run(saved_and_went_on, 2, str(tmp_path), 6, 20, options)[0]
    for size in (1, 2):
        for loaded, losses, _ in run_of(size, resumed, str(tmp_path), 5, options):
            assert same(loaded, saved) and all(0 < loss < 10 for loss in losses)


def by_the_helpers(rank, size, folder, full):
    """Saved by one optimizer, loaded into another that has not stepped."""
    run = Run(size)
    torch.manual_seed(3)
    run.train(rank, 0, 6)
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = get_state_dict(run.called, run.optimizer, options=options)
    other = Run(size)
    if full:
        set_state_dict(other.called, other.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)
    else:
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        model, optimizer = get_state_dict(other.called, other.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(other.called, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    assert same(other.whole(), run.whole())
    generator = torch.get_rng_state()
    losses = run.train(rank, 6, 12)
    torch.set_rng_state(generator)
    assert losses == other.train(rank, 6, 12)
    return run.whole()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_the_helpers_of_torch(size, full, tmp_path):
    with one_rank() if size == 1 else contextlib.nullcontext():
        run_of(size, by_the_helpers, str(tmp_path), full)


@contextlib.contextmanager
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def load_forms(rank, size, whole, plain):
    """The state of one process, this rank's part, and DTensors that are whole on every rank."""
    from torch.distributed.tensor import Replicate
    run = Run(size)
    run.model.load_state_dict(whole)
    run.optimizer.load_state_dict(plain)
    assert all(torch.equal(run.whole()[f"model.{name}"], table) for name, table in whole.items())
    first, distributed = run.whole(), run.optimizer.state_dict()
    weight = next(number for number, param in enumerate(run.model.parameters()) if param is run.model.loss.linear.weight)
    moment = distributed["state"][weight]["exp_avg"]
    assert moment.shape == (N, D) and not isinstance(distributed["state"][weight]["step"], torch.distributed.tensor.DTensor)
    for form in (moment.redistribute(placements=[Replicate()]), moment.to_local()):
        distributed["state"][weight]["exp_avg"] = form
        other = Run(size)
        other.model.load_state_dict(run.model.state_dict())
        other.optimizer.load_state_dict(distributed)
        assert same(other.whole(), first)
    before = other.whole()
    distributed["state"][weight]["exp_avg"] = torch.zeros(N + 1, D)
    with pytest.raises(ValueError, match=r"RowAdam: expected exp_avg of 23 classes, or of the \d+ of this rank, got shape \[24, 6\]"):
        other.optimizer.load_state_dict(distributed)
    distributed["state"][weight]["exp_avg"] = moment
    distributed["state"][weight]["owed"] = distributed["state"][weight]["owed"] + 1
    with pytest.raises(ValueError, match="RowAdam: expected state of a table that was flushed after step 6, .* got one after step 7"):
        other.optimizer.load_state_dict(distributed)
    assert same(other.whole(), before)
    return first


def test_forms_of_state():
    run = Run(1)
    run.train(0, 0, 6)
    for got in ranks(3).run(load_forms, 3, run.model.state_dict(), run.optimizer.state_dict()):
        assert same(got, run.whole())


def test_plain_files(tmp_path):
    """From a checkpoint of ranks to a file of torch.save, and back."""
    folder, file, back = str(tmp_path / "of_ranks"), str(tmp_path / "plain.pt"), str(tmp_path / "back")
    went_on = ranks(2).run(saved_and_went_on, 2, folder, 6, 10, {})[0]
    dcp_to_torch_save(xs.distributed.latest_checkpoint(folder), file)
    plain, run = torch.load(file), Run(1)
    run.model.load_state_dict(plain["model"])
    run.optimizer.load_state_dict(plain["optimizer"])
    torch.set_rng_state(plain["random"]["cpu of rank 0"])
    check_near((run.whole(), run.train(0, 6, 16)), went_on)
    os.mkdir(back)
    torch_save_to_dcp(file, os.path.join(back, "step-0000000006"))
    for again in ranks(3).run(resumed, 3, back, 10, {}):
        check_near(again, went_on)


def test_debts_survive(tmp_path):
    """Rows that owe steps when they are saved are where dense Adam has them, and go on from there."""
    whole, *_ = saved_and_went_on(0, 1, str(tmp_path / "one"), 9, 0, dict(num_samples=1))
    for saved, *_ in ranks(2).run(saved_and_went_on, 2, str(tmp_path / "two"), 9, 0, dict(num_samples=1)):
        for name, table in whole.items():
            if not name.endswith("owed"):
                torch.testing.assert_close(saved[name], table, rtol=1e-4, atol=1e-6)


def several_optimizers(rank, size, folder):
    """SparseAdam for the table, Adam for the encoder, a generator, a scheduler, a number, a nested dict."""
    model = Model(bias=False)
    if size > 1:
        xs.distributed.shard_classes(model)
    optimizers = [torch.optim.SparseAdam(model.loss.parameters(), lr=0.05), torch.optim.Adam(model.body.parameters(), lr=0.05)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 1, gamma=0.5)
    random = torch.Generator().manual_seed(5)
    called = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
    state = {"model": called, "sparse": optimizers[0], "dense": optimizers[1], "scheduler": scheduler, "generator": random, "epoch": 0,
             "more": {"total": torch.zeros(2), "name": ""}}
    begin = xs.distributed.load_checkpoint(folder, state)
    if begin is None:
        for step in range(3):
            input, target = torch.randn(4, D, generator=torch.Generator().manual_seed(step)), torch.arange(4)
            part = slice(rank * 4 // size, (rank + 1) * 4 // size)
            model.zero_grad()
            model.loss(model.body(input[part]), target[part], generator=random).backward()
            for each in (*optimizers, scheduler):
                each.step()
        state["epoch"] = 3
        state["more"] = {"total": torch.tensor([1.0, 2.0]), "name": "three"}
        xs.distributed.save_checkpoint(folder, state, 3)
    whole = {f"model.{name}": value for name, value in model.state_dict().items()}
    for place, optimizer in enumerate(optimizers):
        of_params = xs._placement.whole_state(optimizer, optimizer.state_dict())["state"]
        whole |= {f"{place}.{number}.{name}": value for number, of_param in of_params.items() for name, value in of_param.items()}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value) for name, value in whole.items()}
    return begin, whole, random.get_state(), scheduler.get_last_lr(), state["epoch"], state["more"]["total"].tolist(), state["more"]["name"]


def test_whatever_has_a_state(tmp_path):
    saved = ranks(2).run(several_optimizers, 2, str(tmp_path))
    assert saved[0][0] is None and any(name.endswith("exp_avg_sq") for name in saved[0][1])
    for size in (1, 2, 3):
        for rank, loaded in enumerate(run_of(size, several_optimizers, str(tmp_path))):
            assert loaded[0] == 3 and same(loaded[1], saved[0][1]) and loaded[3:] == saved[0][3:]
            assert rank == 2 or torch.equal(loaded[2], saved[rank][2])


def sparse_momentum(rank):
    model = xs.distributed.shard_classes(Model(bias=False, sparse_grad=True))
    optimizer = torch.optim.SGD(model.loss.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, D), torch.arange(3)).backward()
    optimizer.step()
    with pytest.raises(TypeError, match=r"SGD: expected dense state with a row for each class, .* got momentum_buffer of shape .* layout torch.sparse_coo"):
        xs._placement.whole_state(optimizer, optimizer.state_dict())


def test_state_that_cannot_be_split():
    ranks(2).run(sparse_momentum)


def folder_of_checkpoints(rank, size, folder):
    save, load, latest = xs.distributed.save_checkpoint, xs.distributed.load_checkpoint, xs.distributed.latest_checkpoint
    run = Run(size)
    assert load(folder, run.state) is None and latest(folder) is None
    for step in (1, 2, 10):
        run.train(rank, step, step + 1)
        assert save(folder, run.state, step) == latest(folder) == os.path.join(folder, f"step-{step:010d}")
    assert sorted(os.listdir(folder)) == ["step-0000000002", "step-0000000010"]
    before = run.whole()
    barrier(size)
    if rank == 0:  # what a job leaves behind that is killed in a save, and in the removal of an old one
        os.rename(os.path.join(folder, "step-0000000002"), os.path.join(folder, ".step-0000000010-2"))
        os.mkdir(os.path.join(folder, ".step-0000000011"))
        open(os.path.join(folder, ".step-0000000011", "__0_0.distcp"), "w").close()
    barrier(size)
    assert latest(folder).endswith("step-0000000010")
    with pytest.raises(FileExistsError, match="save_checkpoint: expected a step that is not saved yet, got 10"):
        save(folder, run.state, 10)
    with pytest.raises(FileNotFoundError, match=r"load_checkpoint: expected one of the steps \[10\] in .*, got 2"):
        load(folder, run.state, step=2)
    with pytest.raises(KeyError, match=r"load_checkpoint: expected names out of \['model', 'optimizer'\] .* got 'scheduler'"):
        load(folder, {**run.state, "scheduler": {}})
    with pytest.raises(TypeError, match="save_checkpoint: expected state as a dict of texts .* got Module"):
        save(folder, torch.nn.Module(), 12)
    with pytest.raises(ValueError, match="save_checkpoint: expected other names than 'random'"):
        save(folder, {"random": 1}, 12)
    with pytest.raises(ValueError, match="save_checkpoint: expected keep of at least 1, got 0"):
        save(folder, run.state, 12, keep=0)
    with pytest.raises(RuntimeError, match=r"load_checkpoint: .*step-0000000010: Size mismatch .*\[23.* and current: .*\[24.* \(rank 0\)"):
        load(folder, {"model": other_classes(size)})
    assert same(run.whole(), before)
    run.train(rank, 11, 12)
    save(folder, run.state, 11, keep=1)
    assert os.listdir(folder) == ["step-0000000011"]
    assert load(folder, run.state, step=11) == 11
    save(folder, run.state, 5, keep=1)
    assert sorted(os.listdir(folder)) == ["step-0000000005", "step-0000000011"]


def other_classes(size):
    model = Model()
    model.loss = xs.SampledSoftmaxLoss(D, N + 1, sampler="log_uniform", num_samples=7, bias=True)
    return xs.distributed.shard_classes(model) if size > 1 else model


def barrier(size):
    if size > 1:
        torch.distributed.barrier()


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder(size, tmp_path):
    run_of(size, folder_of_checkpoints, str(tmp_path / "new" / "folder"))


def refused_optimizers(rank, size, folder):
    """What an optimizer refuses leaves the models as they were."""
    run = Run(size)
    run.train(rank, 0, 1)
    xs.distributed.save_checkpoint(folder, run.state, 1)
    run.train(rank, 1, 2)
    before = run.whole()
    params = list(run.model.parameters())
    for others, message in (([*params, torch.nn.Parameter(torch.zeros(2))], r"'optimizer' with groups of \[5\] parameters, got one that .* groups of \[4\]"),
                            (params[::-1], "RowAdam: expected exp_avg of")):
        with pytest.raises(ValueError, match=message):
            xs.distributed.load_checkpoint(folder, {"model": run.called, "optimizer": OPTIMIZERS["RowAdam"](others)})
    assert same(run.whole(), before)


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_is_refused(size, tmp_path):
    run_of(size, refused_optimizers, str(tmp_path))


def test_a_load_into_a_file_takes_its_mark_away_first(tmp_path, monkeypatch):
    weight = xs.tables.mapped(tmp_path / "table", N, D, progress=False)
    loss = xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler="log_uniform", num_samples=7)
    folder, marks = str(tmp_path / "checkpoints"), []
    xs.distributed.save_checkpoint(folder, {"loss": loss}, 1)
    xs.tables.flush(weight)
    read = dcp.FileSystemReader.read_data

    def reads(self, *args):
        with open(tmp_path / "table", "rb") as file:
            marks.append(b'"dirty"' in file.read(4096))
        return read(self, *args)

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", reads)
    xs.distributed.load_checkpoint(folder, {"loss": loss})
    assert marks == [True]


def fails_to_write(rank, folder):
    """On one rank, in the middle of a save: an error on both, and the last checkpoint is the one before."""
    run = Run(2)
    xs.distributed.save_checkpoint(folder, run.state, 1)
    run.train(rank, 0, 1)
    write = dcp.FileSystemWriter.write_data
    if rank == 1:
        def refused(self, plan, planner):
            raise OSError("no space left")
        dcp.FileSystemWriter.write_data = refused
    try:
        with pytest.raises(RuntimeError, match=r"save_checkpoint: .*: no space left \(rank 1\)$"):
            xs.distributed.save_checkpoint(folder, run.state, 2)
    finally:
        dcp.FileSystemWriter.write_data = write
    assert xs.distributed.latest_checkpoint(folder).endswith("step-0000000001")
    xs.distributed.save_checkpoint(folder, run.state, 2)
    assert xs.distributed.load_checkpoint(folder, run.state) == 2


def test_a_save_that_fails(tmp_path):
    ranks(2).run(fails_to_write, str(tmp_path))


def die(rank, where):
    """Rank 1 is killed in a step. The other one hears of it, with its table as it was."""
    run = Run(2)
    run.train(rank, 0, 2)
    before = {name: value.clone() for name, value in run.model.named_parameters()}
    if rank == 1:
        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "forward":
            run.model.body.register_forward_hook(kill)
        else:
            run.model.body.weight.register_hook(kill)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="gloo|peer|Connection"):
        run.train(rank, 2, 3)
    return time.monotonic() - begin, all(torch.equal(value, before[name]) for name, value in run.model.named_parameters())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_dies(where):
    job = Ranks(2)  # the others go on with their own
    for pipe in job.pipes:
        pipe.send((die, (where,)))
    error, answer = job.pipes[0].recv()
    job.end()
    assert error is None, error
    seconds, unchanged = answer
    assert seconds < 30 and unchanged


def test_ranks_that_are_killed_and_started_again():
    """The small version of 20 kills each."""
    program = Path(__file__).parents[2] / "benchmarks" / "kill_ranks.py"
    result = subprocess.run([sys.executable, program, "--kills", "1", "--classes", "500", "--json"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["killed in a step"] == report["killed in a save"] == 1 and report["starts"] == 3 + report["killed between"]
    assert report["losses the same"] and report["state the same"]
