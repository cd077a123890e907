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
    "in_batch streamed": lambda: xs.samplers.InBatchSampler(N, counts=xs.samplers.StreamingCounts(None, half_life=20, buckets=99)),
    "unigram streamed": lambda: xs.samplers.UnigramSampler(xs.samplers.StreamingCounts(N, half_life=20), 7, distinct=False, refresh_every=1),
    "complement": lambda: xs.samplers.ComplementSampler(xs.samplers.LogUniformSampler(N, 6, shared=False), 6),
    "midx": lambda: xs.samplers.MidxSampler(N, D, 5, codewords=3),
    "midx pq shared": lambda: xs.samplers.MidxSampler(N, D, 6, codewords=3, kind="pq", shared=True, train_points=9),
    "midx shared independent": lambda: xs.samplers.MidxSampler(N, D, 6, codewords=3, shared=True, distinct=False, mixture="rms"),
    "midx distinct": lambda: xs.samplers.MidxSampler(N, D, 5, codewords=3, distinct=True, exclude=2),
    "midx updates": lambda: xs.samplers.MidxSampler(N, D, 5, codewords=3, refresh_every=4, update_every=1, train_points=9),
    "midx union": lambda: xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4), xs.samplers.MidxSampler(N, D, 3, codewords=2)),
    "midx union updates": lambda: xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4), xs.samplers.MidxSampler(
        N, D, 3, codewords=3, refresh_every=4, update_every=1)),
    "midx shared updates": lambda: xs.samplers.MidxSampler(N, D, 3, codewords=3, shared=True, refresh_every=4, update_every=1),
    "union": lambda: xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4), xs.samplers.LogUniformSampler(N, 3, shared=False)),
}
OPTIONS = {
    "plain": {}, "bias, head": dict(bias=True, head_classes=3), "sum": dict(reduction="sum", ignore_index=2), "none": dict(reduction="none", bias=True),
    "ranking": dict(estimator="ranking"), "smooth": dict(label_smoothing=0.1), "dense": dict(sparse_grad=False, bias=True),
    "weights": dict(weight=torch.arange(1, N + 1) / N), "nce": dict(estimator="nce", log_z="learned"), "negative": dict(estimator="negative_sampling"),
    "cane": dict(estimator="cane", head_classes=4), "cane_log_of_mean": dict(estimator="cane_log_of_mean", head_classes=4, bias=True),
    "head": dict(head_classes=3), "none, head": dict(reduction="none", head_classes=4),
    "ranking, head": dict(estimator="ranking", head_classes=3, bias=True), "keep hits": dict(remove_accidental_hits=False),
    "importance": dict(estimator="importance"), "one_vs_each": dict(estimator="one_vs_each"), "blackout": dict(estimator="blackout"),
}
CASES = [(sampler, "bias, head" if i % 2 else "plain") for i, sampler in enumerate(SAMPLERS) if sampler != "complement" and "midx" not in sampler] + \
    [(sampler, options) for sampler in ("uniform", "unigram private") for options in OPTIONS if sampler != "uniform" or "cane" not in options] \
    + [("in_batch", "none"), ("union", "nce"), ("complement", "plain")]


def loss_of(sampler, options, seed=0):
    torch.manual_seed(seed)
    options = dict(OPTIONS[options])
    if sampler == "exact":
        return xs.LinearCrossEntropyLoss(D, N, **options)
    return xs.SampledSoftmaxLoss(D, N, sampler=SAMPLERS[sampler](), **options)


def batches(size, step, options="plain", ignored=0.0):
    """Returns a batch for each rank, of different sizes, in odd steps an empty one for the first rank. Adds `ignored` to
    the queries that are ignored."""
    random = torch.Generator().manual_seed(step)
    result = []
    for rank in range(size):
        count = (4 + 3 * rank + 4 * step) % 8
        target = torch.randint(N, (count,), generator=random)
        target[1:2] = OPTIONS[options].get("ignore_index", -100)
        input = torch.randn(count, D, generator=random)
        input[1:2] += ignored
        result.append((input, target))
    return result


LEFT_OUT = ("order", "start", "mass", "log_weight", "prefix", "heaviest", "recent")  # of an index of MIDX, which follow from its cells


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
    return step_of(loss, *batches(size, step, options, torch.nan)[rank], rank, method)


def one_process_step(size, sampler, options, step, method):
    return step_of(loss_of(sampler, options), *map(torch.cat, zip(*batches(size, step, options, torch.nan))), 0, method)


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


EXCHANGES = [("rows", sampler, options) for sampler, options in CASES] + \
    [("queries", sampler, options) for sampler, options in CASES if options not in ("cane", "cane_log_of_mean", "one_vs_each", "blackout")] + \
    [("queries", "log_uniform independent", options) for options in ("ranking", "smooth", "nce", "ranking, head")] + \
    [("queries", sampler, "ranking, head") for sampler in ("unigram private", "union")] + [("queries", "union", "keep hits")] + \
    [(exchange, sampler, options) for exchange in ("queries", "rows") for sampler in SAMPLERS if "midx" in sampler
     for options in ("plain", "head", "none, head")] + \
    [(exchange, "midx", options) for exchange in ("queries", "rows") for options in ("ranking", "smooth", "nce", "negative", "importance")] + \
    [("rows", "midx", options) for options in ("one_vs_each", "blackout", "weights")]


@pytest.mark.parametrize("exchange, sampler, options", EXCHANGES)
def test_a_step_is_that_of_one_process(exchange, sampler, options):
    check_step(2, sampler, options, exchange=exchange)


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_rank_without_queries(sampler, exchange):
    check_step(2, sampler, "head", step=1, exchange=exchange)


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", ["uniform", "unigram private", "in_batch", "midx", "midx pq shared", "midx distinct", "midx union"])
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks(size, sampler, exchange):
    check_step(size, sampler, "head" if "midx" in sampler else "bias, head", exchange=exchange)


@pytest.mark.parametrize("options", ["plain", "bias, head", "none", "smooth", "weights", "sum"])
@pytest.mark.parametrize("sampler", ["exact", "uniform"])
def test_the_exact_loss(sampler, options):
    if sampler == "exact" and options == "bias, head":
        options = "plain"
    check_step(2, sampler, options, method="exact")


def checkpoint(rank, folder, sampler, steps, save):
    """Trains, and leaves a checkpoint or goes on from one: the losses."""
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
def test_a_checkpoint_loads_on_other_ranks(tmp_path, sampler):
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
    for sampler, bias in (("midx", True), ("midx_exact", False), ("midx_spread", False), ("lsh", False), ("sphere", False), ("rff", False)):
        with pytest.raises(ValueError, match="shard_classes: expected a sampler that does not follow the class table, or a MidxSampler without a bias, got "):
            shard(xs.SampledSoftmaxLoss(D, N, sampler=sampler, num_samples=3, bias=bias))
    split = shard(loss_of("uniform", "plain"))
    with pytest.raises(ValueError, match="expected no negatives with a table that is split over ranks"):
        split(torch.zeros(2, D), torch.zeros(2, dtype=torch.int64), negatives=torch.arange(3))
    for call in (lambda: split(torch.zeros(2, D), torch.zeros(2, 1, dtype=torch.int64), target_prob=torch.ones(2, 1)), lambda: split.entropy(torch.zeros(2, D)),
                 lambda: split.log_prob(torch.zeros(2, D), torch.zeros(2, dtype=torch.int64))):
        with pytest.raises(ValueError, match="a table that is split over ranks|a whole table"):
            call()
    with pytest.raises(ValueError, match=r"expected target of shape \[2\], got \[2, 3\]"):
        split(torch.zeros(2, D), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="shard_classes: expected exchange as one of .*, got 'columns'"):
        shard(loss_of("uniform", "plain"), exchange="columns")
    with pytest.raises(ValueError, match="shard_classes: expected an estimator whose candidates enter as one sum .* got 'blackout'"):
        shard(loss_of("uniform", "blackout"), exchange="queries")
    with pytest.raises(ValueError, match="shard_classes: expected the same on all ranks, got exchange of auto on rank 0 and rows on rank 1"):
        shard(loss_of("uniform", "plain"), exchange=["auto", "rows"][rank])
    with pytest.raises(TypeError, match="shard_classes: expected a SampledSoftmaxLoss or a LinearCrossEntropyLoss, .* got CaneLoss"):
        shard(xs.CaneLoss(D, N, candidates=3))
    with pytest.raises(ValueError, match="shard_classes: expected label_smoothing=0 with class weights"):
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


def train(rank, size, sampler, steps, exchange):
    """An encoder under DistributedDataParallel, and the classes split."""
    model = model_of(sampler, seed=rank)
    if size > 1:
        torch.distributed.tensor.parallel.parallelize_module(model, mesh_of(size), {"loss": xs.distributed.ClassParallel(exchange)})
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
    loss = loss_of(sampler, "head" if "midx" in sampler else "bias, head")
    torch.manual_seed(seed)
    return Model(loss)


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", ["uniform", "unigram private", "in_batch", "in_batch streamed", "unigram streamed", "midx", "midx updates", "midx union",
                                     "midx union updates", "midx pq shared", "midx shared updates"])
def test_training_is_that_of_one_process(sampler, exchange):
    want, state = train(0, 1, sampler, 8, exchange)
    for values, got in ranks(2).run(train, 2, sampler, 8, exchange):
        assert values == pytest.approx(want, rel=1e-4)
        for name, table in got.items():
            torch.testing.assert_close(table, state[name], rtol=1e-3, atol=1e-3)


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
    with pytest.raises(RuntimeError, match="call xs.distributed.replicate.* or shard_classes"):
        torch.nn.parallel.DistributedDataParallel(model)(torch.randn(2, D), torch.tensor([1, 2]))


def test_data_parallelism_that_was_not_told():
    ranks(2).run(not_told)


def bytes_of_a_step(rank, size, exchange, sampler, num_classes, samples, queries, width):
    """What this rank receives of the others: all that collectives put down here, less its own part."""
    torch.manual_seed(0)
    loss = xs.distributed.shard_classes(xs.SampledSoftmaxLoss(width, num_classes, sampler=sampler, num_samples=samples), exchange=exchange)
    input = torch.randn(queries, width, requires_grad=True)
    target = torch.randint(num_classes, (queries,), generator=torch.Generator().manual_seed(rank))
    loss(input, target).backward()  # begins an index
    received, group = 0, xs._ranks
    originals = torch.distributed.all_to_all_single, group.all_gather, torch.distributed.all_reduce, torch.distributed.broadcast

    def counted(original, share):
        def call(output, *args, **options):
            nonlocal received
            received += output.nbytes * share
            return original(output, *args, **options)
        return call

    shares = (size - 1) / size, (size - 1) / size, 2 * (size - 1) / size, float(rank > 0)  # of a ring, of a tree
    torch.distributed.all_to_all_single, group.all_gather, torch.distributed.all_reduce, torch.distributed.broadcast = \
        map(counted, originals, shares)
    try:
        loss(input, target).backward()
    finally:
        torch.distributed.all_to_all_single, group.all_gather, torch.distributed.all_reduce, torch.distributed.broadcast = originals
    return received


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_of_rows_do_not_depend_on_the_classes(size):
    samples, queries, width = 4000, 8, 128
    for num_classes in (20_000, 200_000):
        for received in ranks(size).run(bytes_of_a_step, size, "rows", "uniform", num_classes, samples, queries, width):
            assert received == pytest.approx(2 * (size - 1) / size * (samples + queries) * width * 4, rel=0.05)


@pytest.mark.parametrize("sampler, samples", [("uniform", 100), ("uniform", 2000), ("midx", 10)])
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_of_queries_do_not_depend_on_candidates(size, sampler, samples):
    queries, width = 512, 128
    for received in ranks(size).run(bytes_of_a_step, size, "queries", sampler, 20_000, samples, queries, width):
        assert received == pytest.approx(2 * (size - 1) * queries * width * 4 + 24 * (size - 1) * queries, rel=0.05)


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_of_rows_with_a_sampler_that_follows_the_table(size):
    """Besides rows: the number and the class of each draw, the class and the cell of each target."""
    samples, queries, width = 20, 40, 512
    for received in ranks(size).run(bytes_of_a_step, size, "rows", "midx", 200_000, samples, queries, width):
        assert received == pytest.approx(2 * (size - 1) / size * (samples + 1) * queries * (width * 4 + 12) + 5056, rel=0.05)


def queries_drawn_for(rank, sampler):
    loss = xs.distributed.shard_classes(loss_of(sampler, "plain"), exchange="rows")
    numbers, propose = [], loss.propose
    loss.propose = lambda queries, *rest: numbers.append(len(queries)) or propose(queries, *rest)
    loss(*batches(2, 0)[rank])
    return numbers


@pytest.mark.parametrize("sampler, whole", [("unigram private", False), ("midx", False), ("midx union", False), ("union", False), ("complement", False),
                                            ("in_batch", True), ("unigram streamed", True), ("midx pq shared", True)])
def test_ranks_that_fetch_rows_draw_for_their_queries(sampler, whole):
    sizes = [len(target) for _, target in batches(2, 0)]
    assert ranks(2).run(queries_drawn_for, sampler) == [[sum(sizes) if whole else size] for size in sizes]


def exchange_of(rank, sampler, samples, queries):
    made = xs.samplers.MidxSampler(500, D, samples, codewords=3, shared=sampler == "midx shared") if "midx" in sampler else \
        xs.samplers.UniformSampler(500, samples, shared=sampler == "shared")
    loss = xs.distributed.shard_classes(xs.SampledSoftmaxLoss(D, 500, sampler=made))
    taken = []
    for name in ("_loss_by_queries", "_loss_by_rows"):
        setattr(loss, name, lambda *args, name=name: taken.append(name) or torch.zeros([]))
    loss(torch.randn(queries, D), torch.arange(queries))
    return taken


@pytest.mark.parametrize("sampler, samples, queries, taken", [("shared", 100, 90, "queries"), ("shared", 100, 110, "rows"), ("private", 2, 8, "queries"),
                                                              ("private", 1, 8, "rows"), ("midx", 2, 8, "queries"), ("midx", 1, 8, "rows"),
                                                              ("midx shared", 100, 110, "queries")])
def test_auto_takes_the_smaller_exchange(sampler, samples, queries, taken):
    # shared: 2 b < S + b; private: 2 < P + 1; MIDX draws a shared set by all queries
    assert ranks(2).run(exchange_of, sampler, samples, queries) == [["_loss_by_" + taken]] * 2


def draws_of_midx(rank, queries, weight, calls):
    """Counts of the classes drawn for each query, and q."""
    loss = xs.distributed.shard_classes(midx_loss(weight))
    loss.sampler.refresh(loss.linear.weight)
    shards, counts, normalizers = loss._shards, torch.zeros(len(queries), N), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(calls):
        part, = loss.sampler.sample(queries, None, generator)
        here = shards.here(part.ids)
        counts.scatter_add_(1, torch.where(here, part.ids, 0), here.float())
        scores = (queries.unsqueeze(1) * weight[part.ids]).sum(2)
        normalizers.append(torch.where(here, (scores - part.log_count).exp(), 0.0).sum(1))
    return counts, loss.sampler.log_count(queries, torch.arange(N)), torch.stack(normalizers)


def midx_loss(weight):
    loss = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.MidxSampler(N, D, 1000, codewords=3))
    loss.load_state_dict({"linear.weight": weight}, strict=False)
    return loss


def test_draws_of_ranks_follow_their_q():
    from scipy.stats import chisquare
    generator = torch.Generator().manual_seed(3)
    queries, weight, calls = torch.randn(3, D, generator=generator), torch.randn(N, D, generator=generator), 200
    results = ranks(3).run(draws_of_midx, queries, weight, calls)
    counts = sum(result[0] for result in results).double()
    log_count = torch.stack([result[1] for result in results]).amax(0).double()
    assert (counts.sum(1) == 1000 * calls).all()  # each draw is one rank's
    expected = log_count.exp() * calls
    torch.testing.assert_close(expected.sum(1), counts.sum(1), rtol=1e-5, atol=0.0)
    for got, want in zip(counts, expected):
        assert chisquare(got, want * got.sum() / want.sum()).pvalue > 1e-4
    estimates, exact = sum(result[2] for result in results), (queries @ weight.t()).exp().sum(1)
    error = estimates.std(0) / calls ** 0.5
    assert ((estimates.mean(0) - exact).abs() < 4.5 * error).all() and (error < 0.01 * exact).all()


def bad_table(rank):
    loss = xs.distributed.shard_classes(loss_of("midx", "plain"))
    if rank == 1:
        loss.linear.weight.data[0, 0] = float("nan")
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    for call in (lambda: loss(torch.randn(2, D), torch.tensor([1, 2]), generator), lambda: loss.sampler.refresh(loss.linear.weight)):
        with pytest.raises(ValueError, match="prepare: expected weight with finite values, got an infinity or NaN on one of the ranks"):
            call()
    assert rank > 0 or torch.equal(generator.get_state(), state)
    assert loss.sampler.step == 0 and loss.sampler.codewords1.eq(0).all()


def test_a_table_that_is_not_finite():
    ranks(2).run(bad_table)


def on_meta(rank, sampler):
    """A table that no process ever has as a whole."""
    with torch.device("meta"):
        loss = xs.SampledSoftmaxLoss(64, 3001, sampler=sampler, num_samples=5, bias=sampler == "uniform")
    torch.manual_seed(rank)
    loss = xs.distributed.shard_classes(loss, mesh_of(2))
    weight = loss.linear.weight
    assert weight.shape == (1501 - rank, 64) and weight.device.type == "cpu" and weight.abs().max() <= 1 / 8
    assert weight.std().item() == pytest.approx(1 / 8 / 3 ** 0.5, rel=0.01)
    loss(torch.randn(4, 64), torch.arange(4) * 900).backward()
    xs.optim.RowAdam(loss.parameters()).step()
    assert loss.eval()(torch.randn(4, 64), torch.arange(4)).isfinite()
    return weight[:1500].detach()


@pytest.mark.parametrize("sampler", ["uniform", "midx"])
def test_a_table_on_the_meta_device_is_made_where_its_rows_are(sampler):
    first, second = ranks(2).run(on_meta, sampler)
    assert (first != second).all(1).float().mean() > 0.99


def tree_beside_a_table(rank):
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({"tree": xs.HierarchicalSoftmaxLoss(D, xs.LabelTree.balanced(N, 3)), "loss": loss_of("uniform", "plain")})
    xs.distributed.shard_classes(model)
    input, target = batches(2, 0)[rank]
    value = model["tree"](input, target) * len(target) * 2 / 11  # a mean over both batches
    value.backward()
    return value.detach(), model["tree"].edges.weight.grad.to_dense(), len(model["loss"].linear.weight)


def test_edges_of_a_tree_are_replicated():
    torch.manual_seed(0)
    tree = xs.HierarchicalSoftmaxLoss(D, xs.LabelTree.balanced(N, 3))
    input, target = map(torch.cat, zip(*batches(2, 0)))
    assert len(target) == 11
    loss = sum(tree(*part) * len(part[1]) for part in batches(2, 0)) / 11
    loss.backward()
    for (_, grad, rows), want in zip(ranks(2).run(tree_beside_a_table), (12, 11)):
        torch.testing.assert_close(grad, tree.edges.weight.grad.to_dense())
        assert rows == want


def few_classes(rank, sampler, exchange):
    made = xs.samplers.make_sampler(sampler, 2, 1, dim=D, **(dict(codewords=1, refresh_every=2, update_every=1) if sampler == "midx" else {}))
    loss = xs.distributed.shard_classes(xs.SampledSoftmaxLoss(D, 2, sampler=made), exchange=exchange)
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
    assert input.grad.isfinite().all() and loss(input, target).isfinite() and (classes.sort(1).values == torch.arange(2)).all()


@pytest.mark.parametrize("exchange", ["rows", "queries"])
@pytest.mark.parametrize("sampler", ["uniform", "midx"])
def test_more_ranks_than_classes(sampler, exchange):
    ranks(3).run(few_classes, sampler, exchange)


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


def excluded(count):
    """Ids that each query does not want, some of them twice; the first query excludes nothing."""
    exclude = torch.randint(-1, N, (count, 6), generator=torch.Generator().manual_seed(4))
    exclude[0] = -1
    return exclude


def best_without(rank, size, k):
    loss = xs.distributed.shard_classes(loss_of("uniform", "bias, head")).eval()
    parts = [len(input) for input, _ in batches(size, 3)]
    mine = excluded(sum(parts)).split(parts)[rank]
    return loss.topk(batches(size, 3)[rank][0], k, exclude=mine[:, :2 + 4 * rank])  # ranks may exclude different numbers of ids


@pytest.mark.parametrize("size, k", [(2, 5), (3, 20)])
def test_prediction_without_excluded_classes(size, k):
    loss = loss_of("uniform", "bias, head").eval()
    inputs = [input for input, _ in batches(size, 3)]
    ids = excluded(sum(map(len, inputs))).split([len(input) for input in inputs])
    for rank, (got, input, mine) in enumerate(zip(ranks(size).run(best_without, size, k), inputs, ids)):
        values, classes = loss.topk(input, k, exclude=mine[:, :2 + 4 * rank])
        torch.testing.assert_close(got[0], values)
        assert torch.equal(got[1], classes)
