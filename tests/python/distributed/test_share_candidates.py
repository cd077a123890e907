"""TwoTowerLoss on several ranks equals one process with the whole batch."""

import pytest
import torch
from torch import nn

import xsoftmax as xs
from ranks import needs_gloo, ranks

pytestmark = needs_gloo
N, D = 30, 6


def part(size, rank, step):
    """Returns the part of a rank; parts differ in size and may be empty."""
    made = torch.Generator().manual_seed(100 * step + rank)
    count = (3 + 4 * rank + 3 * step) % 9
    features, ids = torch.randn(count, 4,
                                generator=made), torch.randint(N, (count,), generator=made)
    negatives = torch.randint(N, (2 + rank,),
                              generator=made), torch.randint(N, (count, 2), generator=made)
    return features, ids, *negatives, torch.rand(count, generator=made)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.item = nn.Linear(4, D), nn.Embedding(N, D)

    def forward(self, features, ids, mixed, hard):
        return self.query(features), self.item(ids), self.item(mixed), self.item(hard)


OPTIONS = {
    "plain": dict(),
    "memory": dict(memory=11, dim=D, memory_warmup=1),
    "cosine": dict(similarity="cosine", temperature=0.2),
    "ranking": dict(estimator="ranking"),
    "uncorrected": dict(counts=False),
    "open": dict(num_items=None),
    "sum": dict(reduction="sum"),
}


def make(options):
    torch.manual_seed(0)
    return Towers(), xs.TwoTowerLoss(**dict(num_items=N) | OPTIONS[options])


def call(towers, loss, batch, kind, weighted):
    features, ids, mixed, hard, weight = batch
    query, item, of_mixed, of_hard = towers(features, ids, mixed, hard)
    negatives = {"batch": None, "mixed": (of_mixed, mixed), "hard": (of_hard, hard)}[kind]
    return loss(query, item, ids, negatives, weight if weighted else None)


def train(rank, size, options, kind, weighted, steps=3):
    towers, loss = make(options)
    xs.distributed.share_candidates(loss)
    parallel = nn.parallel.DistributedDataParallel(towers, find_unused_parameters=True)
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.5)
    values = []
    for step in range(steps):
        optimizer.zero_grad()
        value = call(parallel, loss, part(size, rank, step), kind, weighted)
        value.backward()
        optimizer.step()
        total = value.detach().clone()
        torch.distributed.all_reduce(total)
        values.append(total.item() / size)
    return values, {
        name: value.detach()
        for name, value in [*towers.state_dict().items(), *loss.state_dict().items()]
    }


def train_alone(size, options, kind, weighted, steps=3):
    towers, loss = make(options)
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.5)
    values = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = [
            torch.cat(tensors) for tensors in zip(*(part(size, rank, step) for rank in range(size)))
        ]
        value = call(towers, loss, batch, kind, weighted)
        value = value / size if loss.reduction == "sum" else value
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values, towers.state_dict() | loss.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["batch", "mixed", "hard"])
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_that_of_one_process(size, kind, options):
    if kind == "mixed" and options == "open":
        pytest.skip("negatives of the whole catalog need its size")
    weighted = kind == "hard"
    want, state = train_alone(size, options, kind, weighted)
    for values, found in ranks(size).run(train, size, options, kind, weighted):
        assert values == pytest.approx(want, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def train_with_counts_of_all(rank):
    loss = xs.distributed.share_counts(xs.TwoTowerLoss(N, memory=5, dim=D))
    found = []
    for step in range(3):
        made = torch.Generator().manual_seed(10 * step + rank)
        query, item, ids = torch.randn(4, D, generator=made), torch.randn(
            4, D, generator=made), torch.randint(N, (4,), generator=made)
        if step == 2:
            with pytest.raises(IndexError, match="expected ids of negatives"):
                loss(query, item, ids, (item, ids + N))
            loss.eval()
        found.append((query, item, ids, loss(query, item, ids)))
    return found, dict(loss.state_dict())


def test_share_counts_shares_frequencies_but_not_candidates():
    """Frequencies cover all ranks; candidates and memory are those of each rank."""
    of_ranks = ranks(2).run(train_with_counts_of_all)
    for found, state in of_ranks:
        alone, counts = xs.TwoTowerLoss(N, memory=5, dim=D), xs.samplers.StreamingCounts(N)
        for step, (query, item, ids, value) in enumerate(found):
            if step < 2:
                counts.update(torch.cat([others[step][2] for others, _ in of_ranks]))
            alone.counts.load_state_dict(counts.state_dict())
            alone.train(step < 2).counts.eval()
            assert torch.equal(alone(query, item, ids), value)
        assert all(torch.equal(state[name], tensor) for name, tensor in alone.state_dict().items())


def refuse(rank):
    shared = xs.distributed.share_candidates(nn.Sequential(xs.TwoTowerLoss(N)))
    with pytest.raises(
            RuntimeError, match="share_candidates: expected a model whose candidates "
            "are not shared yet"):
        xs.distributed.share_candidates(shared)
    one = torch.zeros(1, D)
    # scripting must not silently give the loss of one rank's batch
    with pytest.raises(torch.jit.Error, match="annotated to be ignored"):
        torch.jit.script(shared[0])(one, one, torch.tensor([1]))
    with pytest.raises(
            ValueError, match="share_candidates: expected a model with a TwoTowerLoss, "
            "got a Linear without one"):
        xs.distributed.share_candidates(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="share_candidates: expected model to be a module, got int"):
        xs.distributed.share_candidates(3)
    with pytest.raises(
            ValueError, match="expected the same on all ranks, got options of two "
            "towers 0 of num_items=30,.* on rank 0 and num_items=31,"):
        xs.distributed.share_candidates(xs.TwoTowerLoss(N + rank))


def test_wrong_calls_are_refused():
    ranks(2).run(refuse)
