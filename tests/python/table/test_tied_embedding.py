"""An embedding over the rows of a split class table, against tied weights in one process."""

import pytest
import torch

import xsoftmax as xs
from ranks import ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="no gloo here")
N, D = 23, 6


class Model(torch.nn.Module):
    def __init__(self, reduction, sparse):
        super().__init__()
        self.embedding, self.body = torch.nn.Embedding(N, D, sparse=sparse), torch.nn.Linear(D, D)
        self.loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=7, head_classes=2,
                                          reduction=reduction, sparse_grad=sparse)
        self.loss.linear.weight = self.embedding.weight

    def forward(self, ids, target):
        return self.loss(self.body(self.embedding(ids)), target)


def batches(step):
    random = torch.Generator().manual_seed(step)
    return [torch.randint(N, (2, count), generator=random) for count in (4, 9)]


def train(rank, size, reduction, sparse):
    torch.manual_seed(0)
    model = Model(reduction, sparse)
    called = model
    if size > 1:
        xs.distributed.shard_classes(model)
        model.embedding = xs.distributed.TiedEmbedding(model.loss, sparse)
        called = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.05)
    torch.manual_seed(3)
    values = []
    for step in range(4):
        ids, target = batches(step)[rank] if size > 1 else torch.cat(batches(step), 1)
        optimizer.zero_grad()
        value = called(ids, target)
        value.backward()
        values.append(value.detach())
        xs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weight = model.eval().loss.state_dict()["linear.weight"]
    return values, weight.full_tensor() if hasattr(
        weight, "full_tensor") else weight, model.body.weight.detach()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sparse", [True, False])
def test_training_equals_that_of_one_process(reduction, sparse):
    values, table, body = train(0, 1, reduction, sparse)
    for got_values, got_table, got_body in ranks(2).run(train, 2, reduction, sparse):
        torch.testing.assert_close(torch.stack(got_values), torch.stack(values), rtol=1e-4,
                                   atol=1e-5)
        torch.testing.assert_close(got_table, table, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(got_body, body, rtol=1e-3, atol=1e-4)


def replicated(rank):
    model = xs.distributed.replicate(Model("mean", True))
    assert {"embedding.weight",
            "loss.linear.weight"} <= set(model._ddp_params_and_buffers_to_ignore)
    ids, target = batches(0)[rank]
    torch.nn.parallel.DistributedDataParallel(model)(ids, target).backward()
    return model.embedding.weight.grad.to_dense(), model.embedding.weight.detach()


def test_ddp_ignores_every_name_of_a_replicated_table():
    (first, table), (second, other) = ranks(2).run(replicated)
    assert torch.equal(first, second) and torch.equal(table, other) and first.ne(0).any()


def look_up(rank, id_of_the_second):
    torch.manual_seed(0)
    loss = xs.distributed.shard_classes(Model("mean", True).loss)
    embedding, message = xs.distributed.TiedEmbedding(loss), None
    try:
        embedding(torch.tensor([[3, 20], [id_of_the_second if rank == 1 else 0, 5]]))
    except IndexError as error:
        message = str(error)
    return message, embedding(torch.tensor([rank, 22])).detach()  # the ranks can still communicate


# N is within the last rank's chunk if that were full
@pytest.mark.parametrize("bad", [-1, N, 1000])
def test_an_id_out_of_range_is_an_error_on_all_ranks(bad):
    """If only one rank raised, the others would wait for it forever."""
    (first, rows), (second, others) = ranks(2).run(look_up, bad)
    assert second == f"TiedEmbedding: expected ids in [0, {N}), got {bad} on rank 1"
    assert first == f"TiedEmbedding: expected ids in [0, {N}), got another on rank 1"
    assert rows.shape == (2, D) and torch.equal(rows[1], others[1])


def test_bad_input():
    with pytest.raises(
            TypeError, match="TiedEmbedding: expected a loss that shard_classes was "
            "called with, got SampledSoftmaxLoss"):
        xs.distributed.TiedEmbedding(xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3))
