"""TwoTowerLoss: item counts, the memory of past batches, added and removed items, and topk."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from two_tower_checks import D, N, Q, batch, check_same, frequencies, naive


def test_memory_adds_items_of_past_batches():
    """Memory is a ring buffer with fewer places than items seen. Its vectors have no gradient; of
    several vectors of one item, that of the batch or else the newest is used."""
    places = 20
    loss = xs.TwoTowerLoss(N, memory=places, dim=D, memory_warmup=1, reduction="none")
    past, seen = [], []
    for step in range(5):
        query, item, ids, *_ = batch(step)
        before = copy.deepcopy(loss.memory)
        got = loss(query, item, ids)
        seen.append(ids)
        window = past[-places:]
        memory = [(i, v.double()) for i, v in (reversed(window) if step >= 1 else [])]
        past += [(i.item(), v.detach().float()) for i, v in zip(ids, item)]
        assert step == 0 or len({i for i, _ in memory}) < len(memory)
        check_same(got, naive(query, item, ids, None, None, frequencies(*seen), memory=memory),
                   [query, item])
        assert step == 0 or not torch.equal(before, loss.memory)
        ring = {k % places: past[k] for k in range(len(past))}
        assert loss.memory_id.tolist()[:len(ring)] == [ring[k][0] for k in range(len(ring))]
        torch.testing.assert_close(loss.memory[:len(ring)],
                                   torch.stack([ring[k][1] for k in range(len(ring))]))
    assert loss.memory_state.tolist() == [5 * Q, 5]
    state, other = loss.state_dict(), xs.TwoTowerLoss(N, memory=places, dim=D, memory_warmup=1,
                                                      reduction="none")
    other.load_state_dict(state)
    forgets = xs.TwoTowerLoss(N)
    # a state dict may omit empty tables
    forgets.load_state_dict(
        {name: table
         for name, table in forgets.state_dict().items() if table.numel() > 0})
    with pytest.raises(RuntimeError, match='Missing key.*"memory"'):
        other.load_state_dict({name: table for name, table in state.items() if name != "memory"})
    assert torch.equal(other(query, item, ids), loss(query, item, ids))
    frozen = copy.deepcopy(loss.eval())
    loss(query, item, ids)
    assert all(
        torch.equal(one, other) for one, other in zip(loss.state_dict().values(),
                                                      frozen.state_dict().values()))


def test_a_batch_larger_than_memory_keeps_its_last_items():
    loss = xs.TwoTowerLoss(N, memory=5, dim=D)
    _, item, ids, *_ = batch()
    loss(item, item, ids)
    assert loss.memory_id.sort().values.tolist() == ids[-5:].sort().values.tolist()


def test_open_ids():
    """With num_items=None any int64 is an item id, and a new id raises no error."""
    query, item, ids, _, hard = batch()
    raw = torch.randint(-2**63, 2**63 - 1, (N,), generator=torch.Generator().manual_seed(1))
    loss, dense = xs.TwoTowerLoss(), xs.TwoTowerLoss(N)
    for _ in range(3):
        got, want = loss(query, item, raw[ids],
                         (hard[0], raw[hard[1]])), dense(query, item, ids, hard)
    torch.testing.assert_close(got, want, rtol=0.2,
                               atol=0)  # smoothed gaps only approximate frequencies
    assert loss.eval()(query, item, raw[ids] + 1).isfinite()  # ids that were never counted


def test_frozen_counts():
    """counts.eval() freezes the frequencies while the loss trains."""
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(N, memory=4, dim=D)
    loss(query, item, ids)
    loss.counts.eval()
    before = loss.counts.count.clone()
    loss(query, item, ids + 1)
    assert torch.equal(loss.counts.count, before) and loss.memory_state.tolist() == [2 * Q, 2]


ADVICE = (r": make the loss with num_items=None for ids of any size, or call "
          r"resize_classes\(num_items\)$")


@pytest.mark.parametrize("counts", [None, False, "half_life"])
def test_the_error_for_a_new_id_names_both_ways_to_add_it(counts):
    """Both ways must work: num_items=None, and resize_classes."""
    query, item, ids, mixed, _ = batch()
    make = lambda number: xs.TwoTowerLoss(
        number, counts=xs.samplers.StreamingCounts(number, half_life=9) if counts else counts)
    loss, new = make(N), ids.index_fill(0, torch.tensor(3), N)
    with pytest.raises(IndexError,
                       match=rf"expected item_id in \[0, {N}\), got {N} at \[3\]" + ADVICE):
        loss(query, item, new)
    with pytest.raises(
            IndexError, match=rf"expected ids of negatives in \[0, {N}\), got {N} at "
            r"\[0\]" + ADVICE):
        loss(query, item, ids, (mixed[0], mixed[1].index_fill(0, torch.tensor(0), N)))
    assert make(None)(query, item, new).isfinite()
    loss.resize_classes(N + 1)
    torch.testing.assert_close(loss(query, item, new),
                               make(N + 1)(query, item, new), rtol=0, atol=0)


def test_the_error_for_a_new_id_names_the_limit_of_counts():
    """If only `counts` limits the ids, the error must not advise num_items=None, which is already
    set."""
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(counts=xs.samplers.StreamingCounts(5))
    with pytest.raises(
            IndexError, match=r"make the loss with counts=StreamingCounts\(None\) for "
            r"ids of any size, or call resize_classes"):
        loss(query, item, ids)
    loss.resize_classes(N)
    assert loss.counts.num_ids == N and loss(query, item, ids).isfinite()


@pytest.mark.parametrize("half_life", [None, 20.0])
@pytest.mark.parametrize("memory", [0, 20])
@pytest.mark.parametrize("kind", ["batch", "mixed", "hard"])
def test_a_resized_loss_equals_one_built_at_that_size(kind, memory, half_life):
    """Different counts would weight candidates wrongly."""
    def make(number):
        return xs.TwoTowerLoss(number,
                               counts=xs.samplers.StreamingCounts(number, half_life=half_life),
                               memory=memory, dim=D)

    grown, larger = make(15), make(N)
    buffers = dict(grown.named_buffers())
    for step in range(4):
        query, item, ids, mixed, hard = batch(step)
        if step == 2:
            grown.resize_classes(N)
        if step >= 2:
            ids = ids + 12
        negatives = {"batch": None, "mixed": mixed, "hard": hard}[kind]
        values = [loss(query, item, ids, negatives) for loss in (grown, larger)]
        if step >= 2 or kind != "mixed":  # uniform negatives depend on the number of items
            torch.testing.assert_close(*values, rtol=0, atol=0)
    for name, table in larger.state_dict().items():
        torch.testing.assert_close(grown.state_dict()[name], table, rtol=0, atol=0)
    assert all(buffers[name] is table for name, table in grown.named_buffers())
    assert grown.extra_repr().startswith(f"num_items={N}, ")
    restored = make(N)
    restored.load_state_dict(grown.state_dict())
    torch.testing.assert_close(restored.eval()(query, item, ids),
                               grown.eval()(query, item, ids), rtol=0, atol=0)


@pytest.mark.parametrize("counts", [None, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_removed_items_leave_counts_and_memory(steps, counts):
    """A removed item left in memory would be a candidate, or an error in each step. Memory has 20
    places; 12 and 36 items were seen."""
    loss, past = xs.TwoTowerLoss(N, counts=counts, memory=20, dim=D), []
    for step in range(steps):
        query, item, ids, *_ = batch(step)
        loss(query, item, ids)
        past += zip(ids.tolist(), item.detach().float())
    loss.resize_classes(6)
    stay = [(i, vector) for i, vector in past[-20:] if i < 6]
    assert 0 < len(stay) < min(20, len(past))
    assert loss.memory_state.tolist() == [len(stay), steps]
    assert loss.memory_id.tolist() == [i for i, _ in stay] + [0] * (20 - len(stay))
    torch.testing.assert_close(loss.memory[:len(stay)], torch.stack([vector for _, vector in stay]))
    if counts is None:
        assert loss.counts.count.tolist() == [
            sum(i == other for other, _ in past) for i in range(6)
        ]
        assert loss.counts.total == loss.counts.count.sum()
    value = loss(query, item, ids % 6)
    assert value.isfinite() and loss.memory_state.tolist() == [len(stay) + Q, steps + 1]
    with pytest.raises(IndexError, match=r"expected item_id in \[0, 6\), got 6"):
        loss(query, item, torch.full_like(ids, 6))


def test_resizing_with_open_ids():
    """Resizing only changes the number that uniform negatives are drawn from; any id stays
    valid."""
    query, item, ids, mixed, _ = batch()
    loss = xs.TwoTowerLoss(memory=20, dim=D)
    loss(query, item, ids + 10**12)
    before = copy.deepcopy(loss.state_dict())
    loss.resize_classes(3)
    assert all(torch.equal(table, before[name]) for name, table in loss.state_dict().items())
    drawn, wanted = (xs.TwoTowerLoss(number, counts=xs.samplers.StreamingCounts(None), memory=20,
                                     dim=D) for number in (2 * N, N))
    for one in (drawn, wanted):
        one(query, item, ids + 10**12)
    drawn.resize_classes(N)
    torch.testing.assert_close(drawn(query, item, ids, mixed), wanted(query, item, ids, mixed),
                               rtol=0, atol=0)
    assert loss(query, item, ids + 10**12).isfinite()


@pytest.mark.parametrize("error, number", [(ValueError, 0), (ValueError, -3), (TypeError, 3.5),
                                           (TypeError, None), (TypeError, True)])
def test_a_wrong_num_items_changes_nothing(error, number):
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(N, memory=20, dim=D)
    loss(query, item, ids)
    before, options = copy.deepcopy(loss.state_dict()), repr(loss)
    with pytest.raises(error, match="TwoTowerLoss: expected num_items of "):
        loss.resize_classes(number)
    assert repr(loss) == options and all(
        torch.equal(table, before[name]) for name, table in loss.state_dict().items())


def best(query, item_vectors, k, similarity, temperature, exclude=None):
    """topk in plain PyTorch; equal scores are sorted by id."""
    if similarity == "cosine":
        query, item_vectors = F.normalize(query, dim=-1), F.normalize(item_vectors, dim=-1)
    values = torch.log_softmax(query @ item_vectors.T / temperature, -1)
    if exclude is not None:
        for row, unwanted in zip(values.reshape(-1, values.shape[-1]),
                                 exclude.reshape(-1, exclude.shape[-1])):
            row[unwanted[unwanted >= 0]] = -math.inf
    values, ids = values.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids.masked_fill(values.isneginf(), -1)[..., :k]


@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("dtypes",
                         [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16,) * 2,
                          (torch.float16,) * 2, (torch.float32, torch.bfloat16),
                          (torch.bfloat16, torch.float64)], ids=str)
@pytest.mark.parametrize("temperature", [0.07, 2.0])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_topk(impl, similarity, temperature, dtypes, excluding):
    """topk matches plain PyTorch: scaling or normalising 16-bit vectors in 16 bits would change the
    order."""
    made = torch.Generator().manual_seed(2)
    query, vectors = torch.randn(2, 3, D, generator=made).to(dtypes[0]), torch.randn(
        N, D, generator=made).to(dtypes[1])
    exclude = torch.randint(-1, N, (2, 3, 4), generator=made) if excluding else None
    loss = xs.TwoTowerLoss(N, similarity=similarity, temperature=temperature)
    want = best(query.double(), vectors.double(), 7, similarity, temperature, exclude)
    got = loss.topk(query.requires_grad_(), vectors, 7, exclude)
    scripted = torch.jit.script(loss).topk(query, vectors, 7, exclude)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = loss.topk(query, vectors, 7, exclude)
    for values, ids in (got, scripted, under_autocast):
        assert values.dtype == (torch.float64 if torch.float64 in dtypes else
                                torch.float32) and not values.requires_grad
        assert torch.equal(ids, want[1])
        torch.testing.assert_close(values.double(), want[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_topk_with_ties_and_few_items(similarity):
    loss, query = xs.TwoTowerLoss(temperature=0.1, similarity=similarity), torch.randn(
        2, D, generator=torch.Generator().manual_seed(0))
    twins = torch.randn(4, D, generator=torch.Generator().manual_seed(1)).repeat(3, 1)
    values, ids = loss.topk(query, twins, 12)
    assert ids.view(2, 4, 3).diff().eq(4).all() and values.view(2, 4, 3).diff().eq(0).all()
    assert loss.topk(query[0], twins, 2)[1].tolist() == ids[0, :2].tolist()
    assert loss.topk(query, twins, 0)[0].shape == (2, 0) and loss.topk(query[:0], twins,
                                                                       3)[1].shape == (0, 3)
    values, left = loss.topk(query, twins, 12, ids[:, :10])
    assert torch.equal(left[:, :2],
                       ids[:, 10:]) and left[:, 2:].eq(-1).all() and values[:, 2:].isneginf().all()


def test_topk_follows_a_trained_temperature():
    query, item, *_ = batch()
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    loss = xs.TwoTowerLoss(temperature=temperature)
    with torch.no_grad():
        temperature.fill_(0.25)
    torch.testing.assert_close(
        loss.topk(query, item, 3)[0],
        best(query.detach(), item.detach(), 3, "dot", 0.25)[0])


def test_topk_is_exported_for_any_number_of_queries():
    class Search(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss, self.vectors = xs.TwoTowerLoss(N, similarity="cosine",
                                                      temperature=0.2), torch.nn.Parameter(
                                                          torch.randn(N, D))

        def forward(self, query, exclude):
            return self.loss.topk(query, self.vectors, 5, exclude)

    torch.manual_seed(0)
    search, queries = Search().eval(), torch.export.Dim("Q")
    program = torch.export.export(search, (torch.randn(4, D), torch.randint(N, (4, 2))),
                                  dynamic_shapes=({0: queries}, {0: queries}))
    compiled = torch.compile(search, backend="aot_eager", fullgraph=True)
    query, exclude = torch.randn(9, D), torch.randint(N, (9, 2))
    for found in (program.module()(query, exclude), compiled(query, exclude)):
        torch.testing.assert_close(found, search(query, exclude))


@pytest.mark.parametrize(
    "error, message, change",
    [(ValueError, r"expected k in \[0, 30\] \(the rows of item_vectors\), got 31", dict(k=N + 1)),
     (ValueError, r"expected k in .*, got -1", dict(k=-1)),
     (TypeError, "expected k of type int, got float", dict(k=2.0)),
     (ValueError, r"expected item_vectors with size 6 \(the width of query\) in dimension 1",
      dict(item_vectors=torch.zeros(N, D + 1))),
     (ValueError, "expected item_vectors with 2 dimensions", dict(item_vectors=torch.zeros(D))),
     (ValueError, r"expected query of shape \[\*, D\], got \[\]", dict(query=torch.tensor(1.0))),
     (TypeError, "expected query of dtype float32, .*, got int64",
      dict(query=torch.ones(4, D, dtype=torch.int64))),
     (TypeError, "expected item_vectors of dtype float32, .*, got int64",
      dict(item_vectors=torch.ones(N, D, dtype=torch.int64))),
     (TypeError, "expected item_vectors on query's device cpu, got meta",
      dict(item_vectors=torch.zeros(N, D, device="meta"))),
     (TypeError, "expected exclude of dtype int64, got int32",
      dict(exclude=torch.zeros(4, 2, dtype=torch.int32))),
     (ValueError, r"expected exclude of shape \[\*, E\]",
      dict(exclude=torch.zeros(3, 2, dtype=torch.int64))),
     (IndexError, rf"expected exclude in \[0, {N}\) or -1, got {N}",
      dict(exclude=torch.full((4, 2), N)))])
def test_topk_of_bad_input(error, message, change):
    with pytest.raises(error, match=message):
        xs.TwoTowerLoss(N).topk(**dict(query=torch.zeros(4, D), item_vectors=torch.zeros(N, D), k=3)
                                | change)
