"""Checkpoints of split and replicated tables: saved by some ranks, resumed by others."""

import contextlib
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import xsoftmax as xs
from ranks import ranks

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
        for number, of_param in xs.distributed._state.whole_state(self.optimizer, self.optimizer.state_dict())["state"].items():
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
