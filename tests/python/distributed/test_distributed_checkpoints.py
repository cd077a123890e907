"""Checkpoints of split and replicated tables are resumed by any number of ranks."""

import contextlib
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import xsoftmax as xs
from checkpoint_checks import D, N, OPTIMIZERS, Model, Run, run_of, same
from ranks import needs_gloo, ranks

pytestmark = needs_gloo


def saved_and_went_on(rank, size, folder, steps, more, options):
    run = Run(size, **options)
    torch.manual_seed(10 + rank)
    run.train(rank, 0, steps)
    xs.distributed.save_checkpoint(folder, run.state, steps)
    saved = run.whole()
    return saved, run.train(rank, steps, steps + more), run.whole()


def resumed(rank, size, folder, more, options):
    run = Run(size, **options)
    torch.manual_seed(99)  # replaced by the loaded state
    step = xs.distributed.load_checkpoint(folder, run.state)
    loaded = run.whole()
    return loaded, run.train(rank, step, step + more), run.whole()


@pytest.mark.slow
def test_any_number_of_ranks_resumes_a_checkpoint_of_four(tmp_path):
    steps, more = 20, 100
    results = ranks(4).run(saved_and_went_on, 4, str(tmp_path), steps, more, {})
    for went_on, again in zip(results, ranks(4).run(resumed, 4, str(tmp_path), more, {})):
        check_same(again, went_on)
    for size in (1, 2, 3):
        for again in run_of(size, resumed, str(tmp_path), more, {}):
            check_near(again, results[0])


def check_same(again, went_on):
    """Compares the loaded state, the losses and the final state bit for bit."""
    assert same(again[0], went_on[0]) and again[1] == went_on[1] and same(again[2], went_on[2])


def check_near(again, went_on):
    assert same(again[0], went_on[0])
    assert max(abs(got - want) / want
               for got, want in zip(again[1], went_on[1], strict=True)) < 1e-5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sparse_grad", [True, False])
def test_training_resumes_with_every_optimizer(optimizer, sparse_grad, tmp_path):
    folder, options = str(tmp_path), dict(optimizer=optimizer, sparse_grad=sparse_grad)
    if optimizer == "Adagrad" and sparse_grad:
        options["bias"] = False
    results = ranks(2).run(saved_and_went_on, 2, folder, 6, 20, options)
    for went_on, again in zip(results, ranks(2).run(resumed, 2, folder, 20, options)):
        check_same(again, went_on)
    for size in (1, 3):
        for again in run_of(size, resumed, folder, 20, options):
            check_near(again, results[0])


def test_ranks_resume_a_checkpoint_of_one_process(tmp_path):
    went_on = saved_and_went_on(0, 1, str(tmp_path), 5, 20, {})
    for again in ranks(3).run(resumed, 3, str(tmp_path), 20, {}):
        check_near(again, went_on)


def test_replicated_tables_are_resumed(tmp_path):
    options = dict(split=False)
    results = ranks(2).run(saved_and_went_on, 2, str(tmp_path), 6, 20, options)
    for went_on, again in zip(results, ranks(2).run(resumed, 2, str(tmp_path), 20, options)):
        check_same(again, went_on)
    assert same(resumed(0, 1, str(tmp_path), 0, options)[0], results[0][0])


def test_replicated_tables_resume_with_the_sampler_index_of_rank_0(tmp_path):
    options = dict(split=False, sampler="midx", num_samples=3)
    saved, *_ = ranks(2).run(saved_and_went_on, 2, str(tmp_path), 6, 20, options)[0]
    for size in (1, 2):
        for loaded, losses, _ in run_of(size, resumed, str(tmp_path), 5, options):
            assert same(loaded, saved) and all(0 < loss < 10 for loss in losses)


def with_helpers_of_torch(rank, size, folder, full):
    """Saves one optimizer and loads it into another that has not stepped."""
    run = Run(size)
    torch.manual_seed(3)
    run.train(rank, 0, 6)
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = get_state_dict(run.called, run.optimizer, options=options)
    other = Run(size)
    if full:
        set_state_dict(other.called, other.optimizer, model_state_dict=model,
                       optim_state_dict=optimizer, options=options)
    else:
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        model, optimizer = get_state_dict(other.called, other.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(other.called, other.optimizer, model_state_dict=model,
                       optim_state_dict=optimizer)
    assert same(other.whole(), run.whole())
    generator = torch.get_rng_state()
    losses = run.train(rank, 6, 12)
    torch.set_rng_state(generator)
    assert losses == other.train(rank, 6, 12)
    return run.whole()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_get_and_set_state_dict_of_torch_work(size, full, tmp_path):
    with one_rank() if size == 1 else contextlib.nullcontext():
        run_of(size, with_helpers_of_torch, str(tmp_path), full)


@contextlib.contextmanager
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def load_forms(rank, size, whole, plain):
    """Loads state in three forms: of one process, as local shards, and as replicated DTensors."""
    from torch.distributed.tensor import Replicate
    run = Run(size)
    run.model.load_state_dict(whole)
    run.optimizer.load_state_dict(plain)
    assert all(torch.equal(run.whole()[f"model.{name}"], table) for name, table in whole.items())
    first, distributed = run.whole(), run.optimizer.state_dict()
    weight = next(number for number, param in enumerate(run.model.parameters())
                  if param is run.model.loss.linear.weight)
    moment = distributed["state"][weight]["exp_avg"]
    assert moment.shape == (N, D) and not isinstance(distributed["state"][weight]["step"],
                                                     torch.distributed.tensor.DTensor)
    for form in (moment.redistribute(placements=[Replicate()]), moment.to_local()):
        distributed["state"][weight]["exp_avg"] = form
        other = Run(size)
        other.model.load_state_dict(run.model.state_dict())
        other.optimizer.load_state_dict(distributed)
        assert same(other.whole(), first)
    before = other.whole()
    distributed["state"][weight]["exp_avg"] = torch.zeros(N + 1, D)
    with pytest.raises(
            ValueError, match=r"RowAdam: expected exp_avg of 23 classes, or of the \d+ "
            r"of this rank, got shape \[24, 6\]"):
        other.optimizer.load_state_dict(distributed)
    distributed["state"][weight]["exp_avg"] = moment
    distributed["state"][weight]["pending"] = distributed["state"][weight]["pending"] + 1
    with pytest.raises(
            ValueError, match="RowAdam: expected state of a table that was flushed "
            "after step 6, .* got one after step 7"):
        other.optimizer.load_state_dict(distributed)
    assert same(other.whole(), before)
    return first


def test_state_loads_whole_local_or_replicated():
    run = Run(1)
    run.train(0, 0, 6)
    for got in ranks(3).run(load_forms, 3, run.model.state_dict(), run.optimizer.state_dict()):
        assert same(got, run.whole())


def test_checkpoints_convert_to_torch_save_files_and_back(tmp_path):
    """A checkpoint of ranks becomes a file of torch.save, and a checkpoint of ranks again."""
    folder, file, back = str(tmp_path / "of_ranks"), str(tmp_path / "plain.pt"), str(tmp_path /
                                                                                     "back")
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


def test_pending_updates_survive_a_checkpoint(tmp_path):
    """Ranks and one process save the same tables when rows have pending updates."""
    whole, *_ = saved_and_went_on(0, 1, str(tmp_path / "one"), 9, 0, dict(num_samples=1))
    for saved, *_ in ranks(2).run(saved_and_went_on, 2, str(tmp_path / "two"), 9, 0,
                                  dict(num_samples=1)):
        for name, table in whole.items():
            if not name.endswith("pending"):
                torch.testing.assert_close(saved[name], table, rtol=1e-4, atol=1e-6)


def several_optimizers(rank, size, folder):
    """Saves or loads SparseAdam for the table, Adam for the encoder, a generator, a scheduler, a
    number and a nested dict."""
    model = Model(bias=False)
    if size > 1:
        xs.distributed.shard_classes(model)
    optimizers = [
        torch.optim.SparseAdam(model.loss.parameters(), lr=0.05),
        torch.optim.Adam(model.body.parameters(), lr=0.05)
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 1, gamma=0.5)
    random = torch.Generator().manual_seed(5)
    called = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
    state = {
        "model": called, "sparse": optimizers[0], "dense": optimizers[1], "scheduler": scheduler,
        "generator": random, "epoch": 0, "more": {"total": torch.zeros(2), "name": ""}
    }
    begin = xs.distributed.load_checkpoint(folder, state)
    if begin is None:
        for step in range(3):
            input, target = torch.randn(
                4, D, generator=torch.Generator().manual_seed(step)), torch.arange(4)
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
        of_params = xs._core.placement.whole_state(optimizer, optimizer.state_dict())["state"]
        whole |= {
            f"{place}.{number}.{name}": value
            for number, of_param in of_params.items()
            for name, value in of_param.items()
        }
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
        for name, value in whole.items()
    }
    return begin, whole, random.get_state(), scheduler.get_last_lr(
    ), state["epoch"], state["more"]["total"].tolist(), state["more"]["name"]


def test_all_objects_with_a_state_dict_are_saved(tmp_path):
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
    with pytest.raises(
            TypeError, match=r"SGD: expected dense state with a row for each class, .* "
            r"got momentum_buffer of shape .* layout torch.sparse_coo"):
        xs._core.placement.whole_state(optimizer, optimizer.state_dict())


def test_sparse_momentum_of_sgd_is_refused():
    ranks(2).run(sparse_momentum)
