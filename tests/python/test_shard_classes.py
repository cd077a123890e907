"""Class tables split over ranks against one process that has them whole."""

import pytest
import torch

import xsoftmax as xs
from ranks import ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo here")
N, D = 23, 6  # ceil(23 / 3) = 8, 8, 7; ceil(23 / 4) = 6, 6, 6, 5
COUNTS = 1.0 / torch.arange(1, N + 1)
SAMPLERS = {
    "uniform": lambda: xs.samplers.UniformSampler(N, 7),
    "log_uniform independent": lambda: xs.samplers.LogUniformSampler(N, 7, distinct=False),
    "unigram private": lambda: xs.samplers.UnigramSampler(COUNTS, 5, shared=False),
    "unigram distinct private": lambda: xs.samplers.UnigramSampler(COUNTS, 5, shared=False, distinct=True),
    "in_batch": lambda: xs.samplers.InBatchSampler(N),
    "complement": lambda: xs.samplers.ComplementSampler(xs.samplers.LogUniformSampler(N, 6, shared=False), 6),
    "union": lambda: xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4), xs.samplers.LogUniformSampler(N, 3, shared=False)),
}
OPTIONS = {
    "plain": {}, "bias, head": dict(bias=True, head_classes=3), "sum": dict(reduction="sum", ignore_index=2), "none": dict(reduction="none", bias=True),
    "ranking": dict(estimator="ranking"), "smooth": dict(label_smoothing=0.1), "dense": dict(sparse_grad=False, bias=True),
    "weights": dict(weight=torch.arange(1, N + 1) / N), "nce": dict(estimator="nce", log_z="learned"), "negative": dict(estimator="negative_sampling"),
    "cane": dict(estimator="cane", head_classes=4), "cane_log_of_mean": dict(estimator="cane_log_of_mean", head_classes=4, bias=True),
    "ranking, head": dict(estimator="ranking", head_classes=3, bias=True), "keep hits": dict(remove_accidental_hits=False),
    "importance": dict(estimator="importance"), "one_vs_each": dict(estimator="one_vs_each"), "blackout": dict(estimator="blackout"),
}
CASES = [(sampler, "bias, head" if i % 2 else "plain") for i, sampler in enumerate(SAMPLERS) if sampler != "complement"] + \
    [(sampler, options) for sampler in ("uniform", "unigram private") for options in OPTIONS if sampler != "uniform" or "cane" not in options] + [("in_batch", "none"), ("union", "nce"), ("complement", "plain")]


def loss_of(sampler, options, seed=0):
    torch.manual_seed(seed)
    options = dict(OPTIONS[options])
    if sampler == "exact":
        return xs.LinearCrossEntropyLoss(D, N, **options)
    return xs.SampledSoftmaxLoss(D, N, sampler=SAMPLERS[sampler](), **options)


def batches(size, step, options="plain"):
    """Of all ranks, of different sizes, some targets ignored."""
    random = torch.Generator().manual_seed(step)
    result = []
    for rank in range(size):
        count = (4 + 3 * rank) % 8
        target = torch.randint(N, (count,), generator=random)
        target[1:2] = OPTIONS[options].get("ignore_index", -100)
        result.append((torch.randn(count, D, generator=random), target))
    return result


def gradients(loss):
    return {name: parameter.grad.to_dense().clone() for name, parameter in loss.named_parameters()}


def whole(loss):
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in loss.state_dict().items()}


def step_of(loss, input, target, rank, method):
    input.requires_grad_()
    torch.manual_seed(77 + rank)  # the first rank's decides
    value = getattr(loss, method)(input, target)
    value.sum().backward()
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.1)
    norm = xs.clip_grad_norm_(loss.parameters(), 1e9)
    grads = gradients(loss)
    optimizer.step()
    return value.detach(), input.grad, grads, norm, whole(loss.eval())


def sharded_step(rank, size, sampler, options, step, method, exchange):
    loss = xs.distributed.shard_classes(loss_of(sampler, options, seed=rank), exchange=exchange)
    return step_of(loss, *batches(size, step, options)[rank], rank, method)


def one_process_step(size, sampler, options, step, method):
    return step_of(loss_of(sampler, options), *map(torch.cat, zip(*batches(size, step, options))), 0, method)


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
        assert set(got) == set(state)
        for name, table in state.items():
            torch.testing.assert_close(got[name], table, rtol=1e-4, atol=1e-4)


EXCHANGES = [("rows", sampler, options) for sampler, options in CASES] + \
    [("queries", sampler, options) for sampler, options in CASES if options not in ("cane", "cane_log_of_mean", "one_vs_each", "blackout")] + \
    [("queries", "log_uniform independent", options) for options in ("ranking", "smooth", "nce", "ranking, head")] + \
    [("queries", sampler, "ranking, head") for sampler in ("unigram private", "union")] + [("queries", "union", "keep hits")]


@pytest.mark.parametrize("exchange, sampler, options", EXCHANGES)
def test_a_step_is_that_of_one_process(exchange, sampler, options):
    check_step(2, sampler, options, exchange=exchange)


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", ["uniform", "unigram private", "in_batch"])
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks(size, sampler, exchange):
    check_step(size, sampler, "bias, head", exchange=exchange)


@pytest.mark.parametrize("options", ["plain", "bias, head", "none", "smooth", "weights", "sum"])
@pytest.mark.parametrize("sampler", ["exact", "uniform"])
def test_the_exact_loss(sampler, options):
    if sampler == "exact" and options == "bias, head":
        options = "plain"
    check_step(2, sampler, options, method="exact")


def checkpoint(rank, folder, steps, save):
    """Trains, and leaves a checkpoint or goes on from one: the losses."""
    import torch.distributed.checkpoint as dcp
    loss = xs.distributed.shard_classes(loss_of("uniform", "bias, head", seed=1))
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


def test_a_checkpoint_loads_on_other_ranks(tmp_path):
    saved, *_ = ranks(3).run(checkpoint, str(tmp_path), 3, True)
    for got in ranks(2).run(checkpoint, str(tmp_path), 0, False):
        assert set(got) == set(saved) and all(torch.equal(got[name], saved[name]) for name in saved)
    alone = loss_of("uniform", "bias, head", seed=2)
    alone.load_state_dict(saved)
    for got in ranks(2).run(load_whole, alone.state_dict()):
        assert all(torch.equal(got[name], saved[name]) for name in saved)


def load_whole(rank, state):
    loss = xs.distributed.shard_classes(loss_of("uniform", "bias, head", seed=1))
    loss.load_state_dict(state)
    return whole(loss)


def refuse(rank):
    shard = xs.distributed.shard_classes
    with pytest.raises(ValueError, match="shard_classes: expected a sampler that does not follow the class table, got MidxSampler"):
        shard(xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=3))
    with pytest.raises(TypeError, match="shard_classes: expected a SampledSoftmaxLoss or a LinearCrossEntropyLoss, .* got HierarchicalSoftmaxLoss"):
        shard(xs.HierarchicalSoftmaxLoss(D, xs.LabelTree.balanced(N, 3)))
    with pytest.raises(ValueError, match="shard_classes: expected label_smoothing=0 beside class weights"):
        shard(xs.LinearCrossEntropyLoss(D, N, weight=torch.ones(N), label_smoothing=0.1))
    with pytest.raises(ValueError, match="shard_classes: expected the same on all ranks, got (?s:.*num_samples=4.* on rank 0 and .*num_samples=5.*) on rank 1"):
        shard(xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4 + rank))
    loss = shard(loss_of("uniform", "plain"))
    with pytest.raises(TypeError, match="which is not split yet, got ShardedSampledSoftmaxLoss"):
        shard(loss)
    with pytest.raises(IndexError, match=r"expected target in \[0, 23\) or ignore_index -100, got 23"):  # on all ranks, whoever has it
        loss(torch.randn(2, D), torch.tensor([1, 23 if rank == 1 else 2]))
    with pytest.raises(ValueError, match="expected input of shape"):
        loss(torch.randn(2, D + 1), torch.tensor([1, 2]))
    assert loss(torch.randn(2, D), torch.tensor([1, 2])).isfinite()


def test_bad_input():
    ranks(2).run(refuse)


def train(rank, size, sampler, steps):
    """An encoder under DistributedDataParallel, and the classes split."""
    model = model_of(sampler, seed=rank)
    if size > 1:
        torch.distributed.tensor.parallel.parallelize_module(model, mesh_of(size), {"loss": xs.distributed.ClassParallel()})
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


def mesh_of(size):
    return torch.distributed.device_mesh.init_device_mesh("cpu", (size,))


class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.body, self.loss = torch.nn.Linear(D, D), loss

    def forward(self, input, target):
        return self.loss(self.body(input), target)


def model_of(sampler, seed):
    torch.manual_seed(0)
    loss = loss_of(sampler, "bias, head")
    torch.manual_seed(seed)
    return Model(loss)


@pytest.mark.parametrize("sampler", ["uniform", "unigram private", "in_batch"])
def test_training_is_that_of_one_process(sampler):
    want, state = train(0, 1, sampler, 8)
    for values, got in ranks(2).run(train, 2, sampler, 8):
        assert values == pytest.approx(want, rel=1e-4)
        for name, table in state.items():
            torch.testing.assert_close(got[name], table, rtol=1e-3, atol=1e-3)


def beside_shards(rank):
    from torch.distributed.fsdp import fully_shard
    model = model_of("uniform", seed=0)
    xs.distributed.shard_classes(model, mesh_of(2))
    fully_shard(model, mesh=mesh_of(2), ignored_params=set(model.loss.parameters()))
    torch.manual_seed(5)
    model(*batches(2, 0)[rank]).backward()
    return model.body.weight.grad.full_tensor(), xs.clip_grad_norm_(model.parameters(), 0.5)


def test_beside_fully_shard():
    model = model_of("uniform", seed=0)
    torch.manual_seed(5)
    model(*map(torch.cat, zip(*batches(2, 0)))).backward()
    norm = torch.stack([parameter.grad.to_dense().norm() for parameter in model.parameters()]).norm()
    for grad, got in ranks(2).run(beside_shards):
        torch.testing.assert_close(grad, model.body.weight.grad)
        torch.testing.assert_close(got, norm)


def not_told(rank):
    model = Model(loss_of("uniform", "dense"))
    xs.distributed.shard_classes(model.loss)
    model.loss.linear.weight.data = model.loss.linear.weight.data[:11]  # DistributedDataParallel itself sees tables of different sizes
    model.loss.linear.bias.data = model.loss.linear.bias.data[:11]
    with pytest.raises(RuntimeError, match="expected a model that xs.distributed.replicate.* or shard_classes"):
        torch.nn.parallel.DistributedDataParallel(model)(torch.randn(2, D), torch.tensor([1, 2]))


def test_data_parallelism_that_was_not_told():
    ranks(2).run(not_told)


def bytes_of_a_step(rank, size, num_classes, samples, width):
    torch.manual_seed(0)
    loss = xs.distributed.shard_classes(xs.SampledSoftmaxLoss(width, num_classes, sampler="uniform", num_samples=samples))
    target = torch.randint(num_classes, (8,), generator=torch.Generator().manual_seed(rank))
    received, exchange = 0, torch.distributed.all_to_all_single

    def counted(output, input, *args, **options):
        nonlocal received
        if output.dim() == 2:
            received += output.nbytes
        return exchange(output, input, *args, **options)

    torch.distributed.all_to_all_single = counted
    try:
        loss(torch.randn(8, width), target).backward()
    finally:
        torch.distributed.all_to_all_single = exchange
    return received * (size - 1) / size  # what a rank sends itself, about an equal part, does not travel


def test_bytes_do_not_depend_on_the_classes():
    samples, width = 2000, 32
    for num_classes in (20_000, 200_000):
        for received in ranks(2).run(bytes_of_a_step, 2, num_classes, samples, width):
            assert received == pytest.approx(2 * 1 / 2 * (samples + 8) * width * 4, rel=0.05)


def few_classes(rank):
    loss = xs.distributed.shard_classes(xs.SampledSoftmaxLoss(D, 2, sampler="uniform", num_samples=1))
    assert len(loss.linear.weight) == (1 if rank < 2 else 0)
    input, target = torch.randn(3, D, requires_grad=True), torch.tensor([0, 1, 1])
    loss(input, target).backward()
    values, classes = loss.eval().topk(input, 2)
    torch.testing.assert_close(values.exp().sum(1), torch.ones(3))
    assert input.grad.isfinite().all() and loss(input, target).isfinite() and (classes.sort(1).values == torch.arange(2)).all()


def test_more_ranks_than_classes():
    ranks(3).run(few_classes)


def best(rank, size, k):
    loss = xs.distributed.shard_classes(loss_of("uniform", "bias, head")).eval()
    input, target = batches(size, 3)[rank]
    return loss.topk(input, k), loss.predict(input), loss.log_prob(input.view(1, -1, D)), loss(input, target).detach()


@pytest.mark.parametrize("size, k", [(2, 5), (3, 20)])
def test_prediction(size, k):
    loss = loss_of("uniform", "bias, head").eval()
    input, target = (torch.cat(part) for part in zip(*batches(size, 3)))
    results = ranks(size).run(best, size, k)
    for got, want in zip(map(torch.cat, zip(*(result[0] for result in results))), loss.topk(input, k)):
        torch.testing.assert_close(got, want)
    assert torch.equal(torch.cat([result[1] for result in results]), loss.predict(input))
    torch.testing.assert_close(torch.cat([result[2][0] for result in results]), loss.log_prob(input))
    for *_, value in results:
        torch.testing.assert_close(value, loss(input, target))
