"""Replicated tables: gradients and tables equal those of one process, and wrong use is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xsoftmax as xs
from ranks import needs_gloo, ranks
from xsoftmax._core import ranks as core_ranks

pytestmark = needs_gloo
N, D = 50, 6


class Model(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.body, self.loss = nn.Linear(4, D), loss

    def forward(self, input, target):
        return self.loss(self.body(input), target)


LOSSES = {
    "shared": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="log_uniform", num_samples=8,
                                                      bias=True, **options),
    "private": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=5,
                                                       shared=False, head_classes=3, **options),
    "midx": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=5, **options),
    "nce": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=8, estimator
                                                   ="nce", log_z="learned", **options),
    "tree": lambda **options: xs.BeamTreeLoss(D, xs.LabelTree.balanced(N, 3), num_candidates=2,
                                              num_noises=2, **options),
    "hierarchical": lambda **options: xs.HierarchicalSoftmaxLoss(D, xs.LabelTree.balanced(N, 3),
                                                                 bias=True, **options),
}
OPTIMIZERS = {
    "adam": lambda parameters: xs.optim.RowAdam(parameters, lr=0.05, weight_decay=0.01),
    "adagrad": lambda parameters: xs.optim.RowAdagrad(parameters, lr=0.05),
    "sgd": lambda parameters: xs.optim.RowSGD(parameters, lr=0.05, momentum=0.9)
}


def model_of(name, seed=0, **options):
    torch.manual_seed(seed)
    return Model(LOSSES[name](**options))


def batch(step, rank):
    """Returns the batch of a rank in a step; ranks have batches of different sizes."""
    random = torch.Generator().manual_seed(10 * step + rank)
    queries = 6 + rank
    return torch.randn(queries, 4, generator=random), torch.randint(N, (queries,), generator=random)


def seed(step, rank):
    torch.manual_seed(1000 + 10 * step + rank)


def dense(parameters):
    return [parameter.grad.to_dense().clone() for parameter in parameters]


def expected(rank_count, name, optimizer, steps, **options):
    """Trains one process on the batches of all ranks, with mean gradients."""
    model = model_of(name, **options)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        means = None
        for rank in range(rank_count):
            model.zero_grad()
            seed(step, rank)
            model(*batch(step, rank)).backward()
            grads = dense(model.parameters())
            means = grads if means is None else [a + b for a, b in zip(means, grads)]
        for parameter, mean in zip(model.parameters(), means):
            parameter.grad = mean / rank_count
        norm = xs.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return means, norm, model


def train(rank, name, optimizer, steps, options):
    # all ranks get the values of rank 0
    model = xs.distributed.replicate(model_of(name, seed=rank, **options))
    parallel = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[optimizer](parallel.parameters())
    for step in range(steps):
        parallel.zero_grad()
        seed(step, rank)
        parallel(*batch(step, rank)).backward()
        grads = dense(model.parameters())
        norm = xs.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
    return grads, norm, model.eval().state_dict()


# not midx: each rank has an index of its own
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "midx"])
def test_gradients_are_means_over_ranks(name):
    results = ranks(2).run(train, name, "sgd", 1, {})
    means, norm, _ = expected(2, name, "sgd", 1)
    for grads, got, _ in results:
        torch.testing.assert_close(grads, [mean / 2 for mean in means])
        torch.testing.assert_close(got, norm)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sparse_grad", [True, False])
def test_tables_stay_equal_bit_for_bit(optimizer, sparse_grad):
    (_, _, first), (_, _, second) = ranks(2).run(train, "shared", optimizer, 5,
                                                 {"sparse_grad": sparse_grad})
    assert all(torch.equal(first[name], second[name]) for name in first)
    *_, model = expected(2, "shared", optimizer, 5, sparse_grad=False)
    (_, _, first_midx), (_, _, second_midx) = ranks(2).run(train, "midx", optimizer, 5,
                                                           {"sparse_grad": sparse_grad})
    assert torch.equal(first_midx["loss.linear.weight"], second_midx["loss.linear.weight"])
    # other optimizers leave updates pending if gradients are sparse; the one process has dense ones
    if optimizer == "adagrad" or not sparse_grad:
        torch.testing.assert_close(first, dict(model.eval().state_dict()))


def accumulate(rank):
    model = xs.distributed.replicate(model_of("private"))
    parallel = DistributedDataParallel(model)
    with parallel.no_sync(), xs.distributed.no_sync(parallel):
        seed(0, rank)
        parallel(*batch(0, rank)).backward()
    alone = dense(model.loss.parameters())
    seed(1, rank)
    parallel(*batch(1, rank)).backward()
    return alone, dense(model.loss.parameters())


def test_gradients_accumulate_under_no_sync():
    results = ranks(2).run(accumulate)
    sums = []
    for rank in range(2):
        model = model_of("private")
        for step in range(2):
            seed(step, rank)
            model(*batch(step, rank)).backward()
            if step == 0:
                torch.testing.assert_close(results[rank][0], dense(model.loss.parameters()))
        sums.append(dense(model.loss.parameters()))
    for _, grads in results:
        torch.testing.assert_close(grads, [(a + b) / 2 for a, b in zip(*sums)])


class CountedBytes:
    """Counts the bytes that this rank receives from others."""
    def __enter__(self):
        self.bytes, self.before = 0, core_ranks.all_gather

        def counted(output, input, **options):
            self.bytes += output.nbytes - input.nbytes
            return self.before(output, input, **options)

        core_ranks.all_gather = counted
        return self

    def __exit__(self, *_):
        core_ranks.all_gather = self.before


def bytes_of_a_step(rank, num_classes):
    torch.manual_seed(0)
    loss = xs.distributed.replicate(
        xs.SampledSoftmaxLoss(D, num_classes, sampler="uniform", num_samples=32))
    input, target = torch.randn(8, D), torch.arange(8) + 40
    with CountedBytes() as counted:
        loss(input, target).backward()
    return counted.bytes, loss.linear.weight.grad._indices().numel()


def test_bytes_do_not_depend_on_the_number_of_classes():
    for num_classes in (1000, 100_000):
        for received, rows in ranks(2).run(bytes_of_a_step, num_classes):
            # rows and ids of the other rank, and their number
            assert received == rows / 2 * (4 * D + 8) + 8


def shards(rank):
    from torch.distributed.fsdp import fully_shard
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = xs.distributed.replicate(model_of("shared"), mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(model.loss.parameters()))
    seed(0, rank)
    model(*batch(0, rank)).backward()
    norm = xs.clip_grad_norm_(model.parameters(), 1e9)
    return [
        grad.full_tensor() if hasattr(grad, "full_tensor") else grad.to_dense()
        for grad in (p.grad for p in model.parameters())
    ], norm


def without_ignored_params(rank):
    from torch.distributed.fsdp import fully_shard
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for name in ("shared", "tree"):
        model = xs.distributed.replicate(model_of(name), mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(
                RuntimeError, match="expected the parameters that were replicated, got "
                "others: call fully_shard"):
            model(*batch(0, rank))


def test_fully_shard_without_ignored_params_raises_an_error():
    ranks(2).run(without_ignored_params)


def test_replicate_works_together_with_fully_shard():
    results = ranks(2).run(shards)
    means, *_ = expected(2, "shared", "sgd", 1)
    for grads, norm in results:
        torch.testing.assert_close(grads, [mean / 2 for mean in means])
        torch.testing.assert_close(norm, torch.stack([(mean / 2).norm() for mean in means]).norm())


def disagree(rank):
    messages = []
    for make in (lambda: xs.SampledSoftmaxLoss(D, N + rank, sampler="uniform", num_samples=3),
                 lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3 + rank),
                 lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, reduction=
                                               ["mean", "sum"][rank]),
                 lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, dtype=
                                               [torch.float32, torch.bfloat16][rank])):
        with pytest.raises(ValueError, match="replicate: expected the same on all ranks") as error:
            xs.distributed.replicate(make())
        messages.append(str(error.value))
    return messages


def test_ranks_with_different_losses_raise_an_error_that_names_both():
    first, second = ranks(2).run(disagree)
    assert first == second
    for message, (a, b) in zip(first, (("50", "51"), ("3", "4"), ("mean", "sum"),
                                       ("float32", "bfloat16"))):
        assert a in message and b in message


def twice(rank, first, second):
    """A second call would overwrite the table, or leave the hooks of the first."""
    loss = getattr(xs.distributed, first)(LOSSES["shared"]())
    rows = loss.linear.weight.detach().clone()
    with pytest.raises(RuntimeError, match=f"{second}: expected a model that is not .* yet, got "
                       "one that is"):
        getattr(xs.distributed, second)(loss)
    assert torch.equal(loss.linear.weight, rows)
    loss(torch.randn(3, D), torch.arange(3)).backward()


@pytest.mark.parametrize("first, second", [("replicate", "shard_classes"),
                                           ("shard_classes", "replicate")])
def test_a_distributed_table_is_not_distributed_again(first, second):
    ranks(2).run(twice, first, second)


def copy_of_counts(rank):
    """A copy counts only the ids of this rank, since other ranks may have no copy."""
    counts = xs.distributed.share_counts(xs.samplers.StreamingCounts(4))
    counts.update(torch.tensor([rank]))
    again = copy.deepcopy(counts)
    if rank == 0:
        again.update(torch.tensor([3]))
    counts.update(torch.tensor([2]))
    return counts.count.tolist(), again.count.tolist()


def test_a_copy_of_shared_counts_is_not_shared():
    assert ranks(2).run(copy_of_counts) == [([1, 1, 2, 0], [1, 1, 0, 1]),
                                            ([1, 1, 2, 0], [1, 1, 0, 0])]


def misuse(rank):
    loss = LOSSES["shared"]()
    xs.distributed.replicate(loss)
    with pytest.raises(RuntimeError,
                       match="replicate: expected a model that is not replicated yet"):
        xs.distributed.replicate(loss)
    with pytest.raises(
            ValueError, match="replicate: expected a model with a class table .* got a "
            "Linear without one"):
        xs.distributed.replicate(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="replicate: expected mesh to be a DeviceMesh or None, got "
                       "int"):
        xs.distributed.replicate(LOSSES["shared"](), 2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="replicate: expected a mesh of one dimension, got 2"):
        xs.distributed.replicate(LOSSES["shared"](), mesh)
    xs.distributed.replicate(LOSSES["shared"](), mesh["b"])
    # Only the loss was replicated, so DistributedDataParallel(model) is not aware of it.
    with pytest.raises(RuntimeError, match="call xs.distributed.replicate"):
        DistributedDataParallel(Model(loss))(*batch(0, rank))
    again = copy.deepcopy(loss)
    again(torch.randn(3, D), torch.arange(3)).backward()  # a copy is not replicated
    assert again.linear.weight.grad._indices().numel() <= 3 + 8


def test_wrong_calls_are_refused():
    ranks(2).run(misuse)


def test_replicate_without_a_process_group_is_refused():
    with pytest.raises(RuntimeError, match="replicate: expected torch.distributed to be "
                       "initialized"):
        xs.distributed.replicate(LOSSES["shared"]())
