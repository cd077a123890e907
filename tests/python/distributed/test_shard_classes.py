"""Class tables split over ranks give the results of one process that holds the whole table."""

import pytest
import torch

import xsoftmax as xs
from ranks import needs_gloo, ranks
from shard_checks import (D, N, OPTIONS, SAMPLERS, Model, batches, loss_of, mesh_of, model_of,
                          whole)

pytestmark = needs_gloo

CASES = [(sampler, "bias, head" if i % 2 else "plain")
         for i, sampler in enumerate(SAMPLERS) if sampler != "complement" and "midx" not in sampler]
CASES += [(sampler, options) for sampler in ("uniform", "unigram private")
          for options in OPTIONS if sampler != "uniform" or "cane" not in options]
CASES += [("in_batch", "none"), ("union", "nce"), ("complement", "plain")]

# Buffers of a MIDX index that are computed from its cells, so a split loss does not save them.
LEFT_OUT = ("order", "start", "mass", "log_weight", "prefix", "heaviest", "recent")


def gradients(loss):
    return {name: parameter.grad.to_dense().clone() for name, parameter in loss.named_parameters()}


def step_of(loss, input, target, rank, method):
    input.requires_grad_()
    torch.manual_seed(77 + rank)  # the seed of rank 0 is used
    value = getattr(loss, method)(input, target)
    value.sum().backward()
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.1)
    norm = xs.clip_grad_norm_(loss.parameters(), 1e9)
    grads = gradients(loss)
    optimizer.step()
    return value.detach(), input.grad, grads, norm, whole(loss.eval())


def sharded_step(rank, size, sampler, options, step, method, exchange):
    loss = xs.distributed.shard_classes(loss_of(sampler, options, seed=rank), exchange=exchange)
    return step_of(loss, *batches(size, step, options, torch.nan)[rank], rank, method)


def one_process_step(size, sampler, options, step, method):
    return step_of(loss_of(sampler, options),
                   *map(torch.cat, zip(*batches(size, step, options, torch.nan))), 0, method)


def check_step(size, sampler, options, step=0, method="forward", exchange="auto"):
    value, of_input, grads, norm, state = one_process_step(size, sampler, options, step, method)
    results = ranks(size).run(sharded_step, size, sampler, options, step, method, exchange)
    each = OPTIONS[options].get("reduction") == "none"
    values = [result[0] for result in results]
    for got in [torch.cat(values)] if each else values:
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
    got = torch.cat([result[1] for result in results]) / (1 if each else size)
    torch.testing.assert_close(got, of_input, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        parts = [result[2][name] for result in results]
        got = torch.cat(parts) if name.startswith("linear") else parts[0]
        torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)
    for *_, of_rank, got in results:
        torch.testing.assert_close(of_rank, norm, rtol=1e-5, atol=1e-6)
        assert set(got) == {name for name in state if name.split(".")[-1] not in LEFT_OUT}
        for name, table in got.items():
            torch.testing.assert_close(table, state[name], rtol=1e-4, atol=1e-4)


NOT_BY_QUERIES = ("cane", "cane_log_of_mean", "one_vs_each", "blackout")
EXCHANGES = [("rows", sampler, options) for sampler, options in CASES]
EXCHANGES += [("queries", sampler, options)
              for sampler, options in CASES if options not in NOT_BY_QUERIES]
EXCHANGES += [("queries", "log_uniform independent", options)
              for options in ("ranking", "smooth", "nce", "ranking, head")]
EXCHANGES += [("queries", sampler, "ranking, head") for sampler in ("unigram private", "union")]
EXCHANGES += [("queries", "union", "keep hits")]
EXCHANGES += [(exchange, sampler, options) for exchange in ("queries", "rows")
              for sampler in SAMPLERS if "midx" in sampler
              for options in ("plain", "head", "none, head")]
EXCHANGES += [(exchange, "midx", options) for exchange in ("queries", "rows")
              for options in ("ranking", "smooth", "nce", "negative", "importance")]
EXCHANGES += [("rows", "midx", options) for options in ("one_vs_each", "blackout", "weights")]


@pytest.mark.parametrize("exchange, sampler, options", EXCHANGES)
def test_a_step_equals_that_of_one_process(exchange, sampler, options):
    check_step(2, sampler, options, exchange=exchange)


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_step_with_a_rank_without_queries(sampler, exchange):
    check_step(2, sampler, "head", step=1, exchange=exchange)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", [
    "uniform", "unigram private", "in_batch", "midx", "midx pq shared", "midx distinct",
    "midx union"
])
@pytest.mark.parametrize("size", [3, 4])
def test_a_step_of_three_and_four_ranks(size, sampler, exchange):
    check_step(size, sampler, "head" if "midx" in sampler else "bias, head", exchange=exchange)


@pytest.mark.parametrize("options", ["plain", "bias, head", "none", "smooth", "weights", "sum"])
@pytest.mark.parametrize("sampler", ["exact", "uniform"])
def test_the_exact_loss_equals_that_of_one_process(sampler, options):
    if sampler == "exact" and options == "bias, head":
        options = "plain"
    check_step(2, sampler, options, method="exact")


def checkpoint(rank, folder, sampler, steps, save):
    """Trains and saves a checkpoint, or loads one; returns the whole state."""
    import torch.distributed.checkpoint as dcp
    loss = xs.distributed.shard_classes(loss_of(sampler, "head", seed=1))
    if save:
        torch.manual_seed(3)
        optimizer = xs.optim.RowAdagrad(loss.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss(*batches(2, step)[rank % 2]).backward()
            optimizer.step()
        dcp.save({"loss": loss.state_dict()}, checkpoint_id=folder)
    else:
        state = {"loss": loss.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        loss.load_state_dict(state["loss"])
    return whole(loss)


@pytest.mark.parametrize("sampler", ["uniform", "midx", "midx updates"])
def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path, sampler):
    saved, *_ = ranks(3).run(checkpoint, str(tmp_path), sampler, 3, True)
    for got in ranks(2).run(checkpoint, str(tmp_path), sampler, 0, False):
        assert set(got) == set(saved) and all(torch.equal(got[name], saved[name]) for name in saved)
    alone = loss_of(sampler, "head", seed=2)
    alone.load_state_dict(saved)
    state = {name: table.clone() for name, table in alone.state_dict().items()}
    after = next_loss(alone)
    for got, value in ranks(2).run(load_whole, sampler, state):
        assert all(torch.equal(got[name], saved[name]) for name in saved)
        torch.testing.assert_close(value, after)


def load_whole(rank, sampler, state):
    loss = xs.distributed.shard_classes(loss_of(sampler, "head", seed=1))
    loss.load_state_dict(state)
    return whole(loss), next_loss(loss, rank)


def next_loss(loss, rank=None):
    generator = torch.Generator().manual_seed(9)
    parts = batches(2, 4)
    input, target = map(torch.cat, zip(*parts)) if rank is None else parts[rank]
    return loss.estimate(input, target, generator).detach()


def refuse(rank):
    shard = xs.distributed.shard_classes
    for sampler, bias in (("midx", True), ("midx_exact", False), ("midx_spread", False),
                          ("lsh", False), ("sphere", False), ("rff", False)):
        with pytest.raises(
                ValueError, match="shard_classes: expected a sampler that does not "
                "follow the class table, or a MidxSampler without a "
                "bias, got "):
            shard(xs.SampledSoftmaxLoss(D, N, sampler=sampler, num_samples=3, bias=bias))
    split = shard(loss_of("uniform", "plain"))
    with pytest.raises(ValueError, match="expected no negatives with a table that is split over "
                       "ranks"):
        split(torch.zeros(2, D), torch.zeros(2, dtype=torch.int64), negatives=torch.arange(3))
    for call in (lambda: split(torch.zeros(2, D), torch.zeros(2, 1, dtype=torch.int64), target_prob=
                               torch.ones(2, 1)), lambda: split.entropy(torch.zeros(2, D)),
                 lambda: split.log_prob(torch.zeros(2, D), torch.zeros(2, dtype=torch.int64))):
        with pytest.raises(ValueError, match="a table that is split over ranks|a whole table"):
            call()
    with pytest.raises(ValueError, match=r"expected target of shape \[2\], got \[2, 3\]"):
        split(torch.zeros(2, D), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="shard_classes: expected exchange as one of .*, got "
                       "'columns'"):
        shard(loss_of("uniform", "plain"), exchange="columns")
    with pytest.raises(
            ValueError, match="shard_classes: expected an estimator whose candidates "
            "enter as one sum .* got 'blackout'"):
        shard(loss_of("uniform", "blackout"), exchange="queries")
    with pytest.raises(
            ValueError, match="shard_classes: expected the same on all ranks, got "
            "exchange of auto on rank 0 and rows on rank 1"):
        shard(loss_of("uniform", "plain"), exchange=["auto", "rows"][rank])
    with pytest.raises(
            TypeError, match="shard_classes: expected a SampledSoftmaxLoss or a "
            "LinearCrossEntropyLoss, .* got CaneLoss"):
        shard(xs.CaneLoss(D, N, candidates=3))
    with pytest.raises(ValueError, match="shard_classes: expected label_smoothing=0 with class "
                       "weights"):
        shard(xs.LinearCrossEntropyLoss(D, N, weight=torch.ones(N), label_smoothing=0.1))
    with pytest.raises(
            ValueError, match="shard_classes: expected the same on all ranks, got "
            "(?s:.*num_samples=4.* on rank 0 and .*num_samples=5.*) "
            "on rank 1"):
        shard(xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4 + rank))
    loss = shard(loss_of("uniform", "plain"))
    with pytest.raises(TypeError, match="which is not split yet, got ShardedSampledSoftmaxLoss"):
        shard(loss)
    # all ranks raise the error, although only rank 1 has the wrong target
    with pytest.raises(IndexError, match=r"expected target in \[0, 23\) or ignore_index -100, got "
                       r"23"):
        loss(torch.randn(2, D), torch.tensor([1, 23 if rank == 1 else 2]))
    with pytest.raises(ValueError, match="expected input of shape"):
        loss(torch.randn(2, D + 1), torch.tensor([1, 2]))
    assert loss(torch.randn(2, D), torch.tensor([1, 2])).isfinite()


def test_wrong_arguments_are_refused():
    ranks(2).run(refuse)


def train(rank, size, sampler, steps, exchange):
    """Trains an encoder under DistributedDataParallel, with split classes."""
    model = model_of(sampler, seed=rank)
    if size > 1:
        torch.distributed.tensor.parallel.parallelize_module(
            model, mesh_of(size), {"loss": xs.distributed.ClassParallel(exchange)})
        xs.distributed.leave_out(model)
        called = torch.nn.parallel.DistributedDataParallel(model)
    else:
        called = model
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.05)
    torch.manual_seed(5 + rank)
    values = []
    for step in range(steps):
        parts = batches(2, step)
        input, target = parts[rank] if size > 1 else map(torch.cat, zip(*parts))
        optimizer.zero_grad()
        value = called(input, target)
        value.backward()
        xs.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        values.append(value.item())
    return values, whole(model.eval())


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", [
    "uniform", "unigram private", "in_batch", "in_batch streamed", "unigram streamed", "midx",
    "midx updates", "midx union", "midx union updates", "midx pq shared", "midx shared updates"
])
def test_training_equals_that_of_one_process(sampler, exchange):
    want, state = train(0, 1, sampler, 8, exchange)
    for values, got in ranks(2).run(train, 2, sampler, 8, exchange):
        assert values == pytest.approx(want, rel=1e-4)
        for name, table in got.items():
            torch.testing.assert_close(table, state[name], rtol=1e-3, atol=1e-3)


def with_fully_shard(rank):
    from torch.distributed.fsdp import fully_shard
    model = model_of("uniform", seed=0)
    xs.distributed.shard_classes(model, mesh_of(2))
    fully_shard(model, mesh=mesh_of(2), ignored_params=set(model.loss.parameters()))
    torch.manual_seed(5)
    model(*batches(2, 0)[rank]).backward()
    return model.body.weight.grad.full_tensor(), xs.clip_grad_norm_(model.parameters(), 0.5)


def test_split_classes_work_together_with_fully_shard():
    model = model_of("uniform", seed=0)
    torch.manual_seed(5)
    model(*map(torch.cat, zip(*batches(2, 0)))).backward()
    norm = torch.stack([parameter.grad.to_dense().norm()
                        for parameter in model.parameters()]).norm()
    for grad, got in ranks(2).run(with_fully_shard):
        torch.testing.assert_close(grad, model.body.weight.grad)
        torch.testing.assert_close(got, norm)


def without_leave_out(rank):
    model = Model(loss_of("uniform", "dense"))
    xs.distributed.shard_classes(model.loss)
    # tables of equal size, or DistributedDataParallel itself would raise an error
    model.loss.linear.weight.data = model.loss.linear.weight.data[:11]
    model.loss.linear.bias.data = model.loss.linear.bias.data[:11]
    with pytest.raises(RuntimeError, match="call xs.distributed.replicate.* or shard_classes"):
        torch.nn.parallel.DistributedDataParallel(model)(torch.randn(2, D), torch.tensor([1, 2]))


def test_data_parallel_without_leave_out_raises_an_error():
    ranks(2).run(without_leave_out)


def on_meta(rank, sampler):
    """Splits a loss on the meta device; no process ever holds the whole table."""
    with torch.device("meta"):
        loss = xs.SampledSoftmaxLoss(64, 3001, sampler=sampler, num_samples=5,
                                     bias=sampler == "uniform")
    torch.manual_seed(rank)
    loss = xs.distributed.shard_classes(loss, mesh_of(2))
    weight = loss.linear.weight
    assert weight.shape == (1501 - rank,
                            64) and weight.device.type == "cpu" and weight.abs().max() <= 1 / 8
    assert weight.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.01)
    loss(torch.randn(4, 64), torch.arange(4) * 900).backward()
    xs.optim.RowAdam(loss.parameters()).step()
    assert loss.eval()(torch.randn(4, 64), torch.arange(4)).isfinite()
    return weight[:1500].detach()


@pytest.mark.parametrize("sampler", ["uniform", "midx"])
def test_a_table_on_the_meta_device_is_initialised_on_its_ranks(sampler):
    first, second = ranks(2).run(on_meta, sampler)
    assert (first != second).all(1).float().mean() > 0.99


def tree_and_split_table(rank):
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({
        "tree": xs.HierarchicalSoftmaxLoss(D, xs.LabelTree.balanced(N, 3)),
        "loss": loss_of("uniform", "plain")
    })
    xs.distributed.shard_classes(model)
    input, target = batches(2, 0)[rank]
    value = model["tree"](input, target) * len(target) * 2 / 11  # a mean over both batches
    value.backward()
    return value.detach(), model["tree"].edges.weight.grad.to_dense(), len(
        model["loss"].linear.weight)


def test_shard_classes_replicates_the_edges_of_a_tree():
    torch.manual_seed(0)
    tree = xs.HierarchicalSoftmaxLoss(D, xs.LabelTree.balanced(N, 3))
    input, target = map(torch.cat, zip(*batches(2, 0)))
    assert len(target) == 11
    loss = sum(tree(*part) * len(part[1]) for part in batches(2, 0)) / 11
    loss.backward()
    for (_, grad, rows), want in zip(ranks(2).run(tree_and_split_table), (12, 11)):
        torch.testing.assert_close(grad, tree.edges.weight.grad.to_dense())
        assert rows == want


def few_classes(rank, sampler, exchange):
    made = xs.samplers.make_sampler(
        sampler, 2, 1, dim=D,
        **(dict(codewords=1, refresh_every=2, update_every=1) if sampler == "midx" else {}))
    loss = xs.distributed.shard_classes(xs.SampledSoftmaxLoss(D, 2, sampler=made),
                                        exchange=exchange)
    assert len(loss.linear.weight) == (1 if rank < 2 else 0)
    input, target = torch.randn(3, D, requires_grad=True), torch.tensor([0, 1, 1])
    optimizer = xs.optim.RowAdam(loss.parameters())
    for _ in range(3):
        loss(input, target).backward()
        assert loss.linear.weight.grad.to_dense().count_nonzero() == (D if rank < 2 else 0)
        optimizer.step()
        optimizer.zero_grad()
    values, classes = loss.eval().topk(input, 2)
    torch.testing.assert_close(values.exp().sum(1), torch.ones(3))
    assert input.grad.isfinite().all() and loss(
        input, target).isfinite() and (classes.sort(1).values == torch.arange(2)).all()


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", ["uniform", "midx"])
def test_more_ranks_than_classes(sampler, exchange):
    ranks(3).run(few_classes, sampler, exchange)


def best(rank, size, k):
    loss = xs.distributed.shard_classes(loss_of("uniform", "bias, head")).eval()
    input, target = batches(size, 3)[rank]
    return loss.topk(input,
                     k), loss.predict(input), loss.log_prob(input.view(1, -1,
                                                                       D)), loss(input,
                                                                                 target).detach()


@pytest.mark.parametrize("size, k", [(2, 5), (3, 20)])
def test_prediction_equals_that_of_one_process(size, k):
    loss = loss_of("uniform", "bias, head").eval()
    input, target = (torch.cat(part) for part in zip(*batches(size, 3)))
    results = ranks(size).run(best, size, k)
    for got, want in zip(map(torch.cat, zip(*(result[0] for result in results))),
                         loss.topk(input, k)):
        torch.testing.assert_close(got, want)
    assert torch.equal(torch.cat([result[1] for result in results]), loss.predict(input))
    torch.testing.assert_close(torch.cat([result[2][0] for result in results]),
                               loss.log_prob(input))
    for *_, value in results:
        torch.testing.assert_close(value, loss(input, target))


def excluded(count):
    """Returns ids that each query excludes, some of them twice; the first query excludes none."""
    exclude = torch.randint(-1, N, (count, 6), generator=torch.Generator().manual_seed(4))
    exclude[0] = -1
    return exclude


def best_without(rank, size, k):
    loss = xs.distributed.shard_classes(loss_of("uniform", "bias, head")).eval()
    parts = [len(input) for input, _ in batches(size, 3)]
    mine = excluded(sum(parts)).split(parts)[rank]
    # ranks may exclude different numbers of ids
    return loss.topk(batches(size, 3)[rank][0], k, exclude=mine[:, :2 + 4 * rank])


@pytest.mark.parametrize("size, k", [(2, 5), (3, 20)])
def test_prediction_with_exclude_equals_that_of_one_process(size, k):
    loss = loss_of("uniform", "bias, head").eval()
    inputs = [input for input, _ in batches(size, 3)]
    ids = excluded(sum(map(len, inputs))).split([len(input) for input in inputs])
    for rank, (got, input,
               mine) in enumerate(zip(ranks(size).run(best_without, size, k), inputs, ids)):
        values, classes = loss.topk(input, k, exclude=mine[:, :2 + 4 * rank])
        torch.testing.assert_close(got[0], values)
        assert torch.equal(got[1], classes)
