"""TwoTowerLoss against its formula, and what stands behind it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import op_samples
import xsoftmax as xs
from xsoftmax.samplers import CandidateSet

ops = torch.ops.xsoftmax
N, D, Q, S, P = 30, 6, 12, 7, 3
ESTIMATORS = [name for name in ops.estimator_names() if not name.startswith("cane")]


def batch(seed=0, dtype=torch.float64):
    """Items stand twice in the batch and in the negatives, and one negative of a query is its item."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, (Q,), generator=made)
    vectors = lambda *shape: torch.randn(*shape, D, generator=made, dtype=dtype).requires_grad_()  # noqa: E731
    hard = torch.randint(15, (Q, P), generator=made)
    hard[0, 1], hard[1, 2] = ids[0], hard[1, 0]
    return vectors(Q), vectors(Q), ids, (vectors(S), torch.randint(15, (S,), generator=made)), (vectors(Q, P), hard)


def included(p, draws, uniform=0):
    return 1 - (1 - p) ** draws * (1 - 1 / N) ** uniform


def naive(query, item, ids, negatives, hard, p, memory=(), temperature=1.0, estimator="sampled_softmax"):
    """Query by query; p: frequencies of ids. What takes no part is left out."""
    columns = [(i.item(), v) for i, v in zip(ids, item)]
    columns += [] if negatives is None else [(i.item(), v) for i, v in zip(negatives[1], negatives[0])]
    columns += list(memory)
    first = {}
    for i, vector in columns:
        first.setdefault(i, vector)
    draws, uniform = len(ids) - 1 + len(memory), 0 if negatives is None else len(negatives[1])
    losses = []
    for q in range(len(ids)):
        of_query = {} if hard is None else {i.item(): v for i, v in zip(reversed(hard[1][q]), hard[0][q].flip(0))}
        sets = [of_query, first]
        scores = [[query[q] @ vector / temperature for vector in one.values()] for one in sets]
        counts = [[math.log(included(p[i], draws, uniform) + (i in of_query)) for i in one] for one in sets]
        y = ids[q].item()
        of_target = [torch.tensor([0.0 if y in of_query else -math.inf]), torch.tensor([math.log(included(p[y], draws, uniform))])]
        row = torch.stack([query[q] @ item[q] / temperature, *scores[0], *scores[1]])[None]
        losses.append(ops.candidate_loss(row, ids[q:q + 1], [torch.tensor([list(one)], dtype=torch.int64).reshape(1, -1) for one in sets],
                                         [torch.tensor([part], dtype=torch.float64).reshape(1, -1) for part in counts], of_target, [True, True],
                                         f"estimator={estimator}"))
    return torch.cat(losses)


def frequencies(*batches):
    seen = torch.cat(batches)
    return {i: (seen == i).sum().item() / len(seen) if (seen == i).any() else 0.0 for i in range(N)}


def check_same(got, want, tensors, rtol=1e-5):
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-7)
    factor = torch.linspace(0.5, 2, got.numel(), dtype=got.dtype).view_as(got)
    grads = [torch.autograd.grad((loss * factor).sum(), tensors, allow_unused=True) for loss in (got, want)]
    for one, other in zip(*grads):
        torch.testing.assert_close(torch.zeros(()) if one is None else one, torch.zeros(()) if other is None else other, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["batch", "mixed", "hard"])
def test_equals_the_formula(impl, kind, estimator, reduction):
    """Counts are float32, so the tolerance is theirs."""
    query, item, ids, mixed, hard = batch()
    negatives = {"batch": None, "mixed": mixed, "hard": hard}[kind]
    loss = xs.TwoTowerLoss(N, estimator=estimator, temperature=0.5, reduction=reduction)
    got = loss(query, item, ids, negatives)
    want = naive(query, item, ids, mixed if kind == "mixed" else None, hard if kind == "hard" else None, frequencies(ids), temperature=0.5, estimator=estimator)
    want = {"mean": want.mean(), "sum": want.sum(), "none": want}[reduction]
    check_same(got, want, [query, item] + ([] if negatives is None else [negatives[0]]))


@pytest.mark.parametrize("memory", [0, 6])
@pytest.mark.parametrize("kind", ["batch", "mixed", "hard"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_counts_all_counts_are_one(impl, kind, memory, estimator):
    """A hard negative whose count is 2 would weigh half of what the documented loss gives it."""
    query, item, ids, mixed, hard = batch()
    negatives = {"batch": None, "mixed": mixed, "hard": hard}[kind]
    loss = xs.TwoTowerLoss(N, counts=False, estimator=estimator, reduction="none", memory=memory, dim=D)
    before = torch.randn(memory, D, dtype=query.dtype, generator=torch.Generator().manual_seed(3)).float().to(query.dtype)
    old = torch.arange(memory) + 10
    if memory:
        loss(before, before, old)
    got, rows = loss.eval()(query, item, ids, negatives), []
    first = {}
    places = [*zip(ids.tolist(), item), *(() if kind != "mixed" else zip(mixed[1].tolist(), mixed[0])), *zip(old.tolist()[::-1], before.flip(0))]
    for i, vector in places:
        first.setdefault(i, vector)
    for q in range(Q):
        candidates = dict(first)
        for i, vector in zip(hard[1][q].tolist(), hard[0][q]) if kind == "hard" else ():
            candidates.setdefault(i, vector)
        row = torch.stack([query[q] @ item[q], *(query[q] @ vector for vector in candidates.values())])[None]
        rows.append(ops.candidate_loss(row, ids[q:q + 1], [torch.tensor([list(candidates)])], [torch.zeros(1, len(candidates), dtype=query.dtype)],
                                       [torch.zeros(1)], [True], f"estimator={estimator}"))
    check_same(got, torch.cat(rows), [query, item] + ([] if negatives is None else [negatives[0]]))


def test_cosine_is_the_product_of_unit_vectors():
    query, item, ids, mixed, _ = batch()
    unit = [F.normalize(vectors, dim=1) for vectors in (query, item, mixed[0])]
    got = xs.TwoTowerLoss(N, similarity="cosine", temperature=0.1)(query, item, ids, mixed)
    check_same(got, xs.TwoTowerLoss(N, temperature=0.1)(*unit[:2], ids, (unit[2], mixed[1])), [query, item, mixed[0]])


@pytest.mark.parametrize("cast", [lambda loss: loss, lambda loss: loss.half(), lambda loss: loss.double()])
def test_temperature_is_no_rounded_one(cast):
    query, item, ids, *_ = batch()
    check_same(cast(xs.TwoTowerLoss(counts=False, temperature=0.07))(query, item, ids), xs.TwoTowerLoss(counts=False)(query / 0.07, item, ids), [query, item],
               rtol=1e-12)
    low = query.detach().bfloat16()
    torch.testing.assert_close(cast(xs.TwoTowerLoss(counts=False, temperature=0.07))(low, item.bfloat16(), ids),
                               xs.TwoTowerLoss(counts=False)((low.float() / 0.07).bfloat16(), item.bfloat16(), ids), rtol=0, atol=0)


def test_temperature_is_trained():
    query, item, ids, *_ = batch()
    temperature = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    loss = xs.TwoTowerLoss(N, temperature=temperature)
    assert [name for name, _ in loss.named_parameters()] == ["temperature"]
    loss(query, item, ids).backward()
    step = 1e-6
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            temperature.add_(sign * step)
            ends.append(loss.eval()(query, item, ids))
            temperature.sub_(sign * step)
    torch.testing.assert_close(temperature.grad, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-6)


def test_memory_is_of_past_batches():
    """A ring: fewer places than items; no gradient; of the vectors of an item that of the batch counts, or the newest."""
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
        check_same(got, naive(query, item, ids, None, None, frequencies(*seen), memory=memory), [query, item])
        assert step == 0 or not torch.equal(before, loss.memory)
        ring = {k % places: past[k] for k in range(len(past))}
        assert loss.memory_id.tolist()[:len(ring)] == [ring[k][0] for k in range(len(ring))]
        torch.testing.assert_close(loss.memory[:len(ring)], torch.stack([ring[k][1] for k in range(len(ring))]))
    assert loss.memory_state.tolist() == [5 * Q, 5]
    state, other = loss.state_dict(), xs.TwoTowerLoss(N, memory=places, dim=D, memory_warmup=1, reduction="none")
    other.load_state_dict(state)
    forgets = xs.TwoTowerLoss(N)
    forgets.load_state_dict({name: table for name, table in forgets.state_dict().items() if table.numel() > 0})  # empty tables may be left out
    with pytest.raises(RuntimeError, match='Missing key.*"memory"'):
        other.load_state_dict({name: table for name, table in state.items() if name != "memory"})
    assert torch.equal(other(query, item, ids), loss(query, item, ids))
    frozen = copy.deepcopy(loss.eval())
    loss(query, item, ids)
    assert all(torch.equal(one, other) for one, other in zip(loss.state_dict().values(), frozen.state_dict().values()))


def test_more_items_than_memory():
    loss = xs.TwoTowerLoss(N, memory=5, dim=D)
    _, item, ids, *_ = batch()
    loss(item, item, ids)
    assert loss.memory_id.sort().values.tolist() == ids[-5:].sort().values.tolist()


@pytest.mark.parametrize("mixed", [False, True])
def test_the_normaliser_is_unbiased(mixed):
    """With the frequencies of the law that items come from, and a fixed target: e^(loss + s_y) is on average the sum over all items."""
    torch.manual_seed(0)
    items, law = torch.randn(N, D, dtype=torch.float64), torch.rand(N).softmax(0)
    law = (law / law.sum()).double()
    counts = xs.samplers.StreamingCounts(N)
    counts.load_state_dict(counts.state_dict() | {"count": (law * 10**9).long(), "total": (law * 10**9).long().sum()})
    loss = xs.TwoTowerLoss(N, counts=counts, reduction="none").eval()
    query = torch.randn(1, D, dtype=torch.float64)
    found = []
    for _ in range(6000):
        ids = torch.multinomial(law, Q, replacement=True)
        ids[0] = 4
        more = torch.randint(N, (S,))
        found.append(loss(query.expand(Q, D), items[ids], ids, (items[more], more) if mixed else None)[0])
    total = (torch.stack(found) + (query @ items[4]).squeeze()).exp()
    want = (items @ query[0]).exp().sum()
    assert abs(total.mean() - want) < 4 * total.std() / len(found) ** 0.5
    assert total.std() / len(found) ** 0.5 < 0.05 * want


def test_the_gradient_of_the_refined_correction():
    """Khrylchenko et al. (2025): (1 - P_y) times the gradient of log sum_{j != y} e^{s_j} / c_j - s_y, P_y not differentiated."""
    query, item, ids, mixed, _ = batch()
    vectors = torch.cat([item, mixed[0]])
    all_ids = torch.cat([ids, mixed[1]])
    log_count = torch.rand(Q + S)
    one = CandidateSet(all_ids, log_count.masked_fill(~ops.first_occurrences(all_ids), math.inf), torch.rand(Q), True)
    got = xs.functional.tower_loss(query, item, ids, [(vectors, one)], reduction="sum")
    s = (query @ vectors.T - one.log_count).masked_fill(all_ids == ids[:, None], -math.inf)
    negative, positive = torch.logsumexp(s, 1), (query * item).sum(1)
    uncertainty = 1 - (positive - torch.logaddexp(positive, negative)).exp()
    want = (uncertainty.detach() * (negative - positive)).sum()
    tensors = [query, item, mixed[0]]
    for one, other in zip(torch.autograd.grad(got, tensors), torch.autograd.grad(want, tensors)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_without_correction():
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(counts=False)
    first = ops.first_occurrences(ids)
    s = (query @ item.T)[:, first].masked_fill(ids[first] == ids[:, None], -math.inf)
    check_same(loss(query, item, ids), F.cross_entropy(torch.cat([(query * item).sum(1, keepdim=True), s], 1), torch.zeros(Q, dtype=torch.int64)),
               [query, item])


def test_open_ids():
    """Any number is an id; a new one is no error."""
    query, item, ids, _, hard = batch()
    raw = torch.randint(-2**63, 2**63 - 1, (N,), generator=torch.Generator().manual_seed(1))
    loss, dense = xs.TwoTowerLoss(), xs.TwoTowerLoss(N)
    for _ in range(3):
        got, want = loss(query, item, raw[ids], (hard[0], raw[hard[1]])), dense(query, item, ids, hard)
    torch.testing.assert_close(got, want, rtol=0.2, atol=0)  # the smoothed gaps are no frequencies
    assert loss.eval()(query, item, raw[ids] + 1).isfinite()  # never counted: no candidates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    query, item, ids, mixed, hard = batch(dtype=dtype)
    for negatives in (mixed, hard):
        got = xs.TwoTowerLoss(N)(query, item, ids, negatives)
        want = xs.TwoTowerLoss(N)(query.double(), item.double(), ids, (negatives[0].double(), negatives[1]))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)  # products are in float32
        assert got.dtype == torch.float32
        grads = torch.autograd.grad(got, [query, item, negatives[0]])
        for one, other in zip(grads, torch.autograd.grad(want, [query, item, negatives[0]])):
            assert one.dtype == dtype
            torch.testing.assert_close(one.float(), other.float(), rtol=8 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_autocast():
    query, item, ids, *_ = batch(dtype=torch.float32)
    tower = torch.nn.Linear(D, D)
    with torch.autocast("cpu", torch.bfloat16):
        made = tower(query)
        assert made.dtype == torch.bfloat16
        loss = xs.TwoTowerLoss(N)(made, item, ids)
    loss.backward()
    assert loss.dtype == torch.float32 and tower.weight.grad.isfinite().all()


def test_weights_of_queries():
    query, item, ids, *_ = batch()
    weight = torch.rand(Q)
    for reduction in ("none", "sum", "mean"):
        want = xs.TwoTowerLoss(N, reduction="none")(query, item, ids) * weight
        want = {"none": want, "sum": want.sum(), "mean": want.sum() / weight.sum()}[reduction]
        check_same(xs.TwoTowerLoss(N, reduction=reduction)(query, item, ids, weight=weight), want, [query, item])


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)])
def test_gradients_that_are_wanted(wanted):
    query, item, ids, mixed, _ = batch()
    tensors = [tensor.detach().requires_grad_(want) for tensor, want in zip((query, item, mixed[0]), wanted)]
    xs.TwoTowerLoss(N)(tensors[0], tensors[1], ids, (tensors[2], mixed[1])).backward()
    whole = torch.autograd.grad(xs.TwoTowerLoss(N)(query, item, ids, mixed), [query, item, mixed[0]])
    for tensor, want, grad in zip(tensors, wanted, whole):
        assert (tensor.grad is not None) == want
        assert not want or torch.allclose(tensor.grad, grad)


@pytest.mark.parametrize("width", [8, 64, 384])
def test_blocks_of_queries_and_threads(same_for_any_threads, width):
    """More scores than a block holds, and sums of as many terms as MKL orders by the number of threads."""
    made = torch.Generator().manual_seed(0)
    query, item = (torch.randn(3000, width, generator=made).div(width**0.25).requires_grad_() for _ in range(2))
    ids = torch.randint(2500, (3000,), generator=made)

    def compute():
        loss = xs.TwoTowerLoss(2500)(query, item, ids)
        return [loss, *torch.autograd.grad(loss, [query, item])]

    same_for_any_threads(compute)
    with torch.no_grad():
        first = ops.first_occurrences(ids)
        log_count = torch.log(1 - (1 - torch.bincount(ids, minlength=2500)[ids].double() / 3000) ** 2999)
        s = (query @ item.T - log_count)[:, first].masked_fill(ids[first] == ids[:, None], -math.inf)
        own = (query * item).sum(1)
        want = (torch.logaddexp(own, torch.logsumexp(s, 1)) - own).mean()
    torch.testing.assert_close(compute()[0], want.float())


def test_scripted_and_compiled():
    query, item, ids, mixed, hard = batch(dtype=torch.float32)
    loss = xs.TwoTowerLoss(N, memory=9, dim=D, similarity="cosine", temperature=0.2)
    scripted, copied, compiled = torch.jit.script(copy.deepcopy(loss)), copy.deepcopy(loss), copy.deepcopy(loss)
    traced = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for negatives in (mixed, hard, None):
        want = copied(query, item, ids, negatives)
        torch.testing.assert_close(scripted(query, item, ids, negatives), want)
        torch.testing.assert_close(traced(query, item, ids, negatives), want)
    for name, value in copied.state_dict().items():
        torch.testing.assert_close(scripted.state_dict()[name], value)
        torch.testing.assert_close(compiled.state_dict()[name], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_empty_batches(reduction, dtype):
    """As torch: a mean over no query is NaN, a sum is 0; and nothing is counted."""
    loss = xs.TwoTowerLoss(N, reduction=reduction, memory=4, dim=D)
    none, no_ids = torch.zeros(0, D, dtype=dtype, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    for negatives in (None, (torch.zeros(S, D, dtype=dtype), torch.arange(S)), (torch.zeros(0, P, D, dtype=dtype), torch.zeros(0, P, dtype=torch.int64))):
        for weight in (None, torch.zeros(0)):
            value = loss(none, none, no_ids, negatives, weight)
            want = F.cross_entropy(torch.zeros(0, N), no_ids, reduction=reduction)
            torch.testing.assert_close(value, want.to(value.dtype), equal_nan=True)
            grads = torch.autograd.grad(value.sum(), none)
            assert grads[0].shape == (0, D)
    assert loss.counts.total == 0 and loss.memory_state.tolist() == [0, 6]


def test_alone_in_its_batch():
    one = torch.randn(1, D)
    assert xs.TwoTowerLoss(N)(one, one, torch.tensor([3])) == 0  # no candidate but the item itself


def test_frozen_counts():
    """counts.eval() keeps frequencies that are known, while the loss trains."""
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(N, memory=4, dim=D)
    loss(query, item, ids)
    loss.counts.eval()
    before = loss.counts.count.clone()
    loss(query, item, ids + 1)
    assert torch.equal(loss.counts.count, before) and loss.memory_state.tolist() == [2 * Q, 2]


def test_candidates_of_each_query_alone():
    query, item, ids, _, hard = batch()
    log_count = torch.rand(Q, P)
    got = xs.functional.tower_loss(query, item, ids, [(hard[0], CandidateSet(hard[1], log_count, None, True))], reduction="none")
    s = ((query.unsqueeze(1) * hard[0]).sum(2) - log_count).masked_fill(hard[1] == ids[:, None], -math.inf)
    want = F.cross_entropy(torch.cat([(query * item).sum(1, keepdim=True), s], 1), torch.zeros(Q, dtype=torch.int64), reduction="none")
    check_same(got, want, [query, item, hard[0]], rtol=1e-10)
    mean = xs.functional.tower_loss(query, item, ids, [(hard[0], CandidateSet(hard[1], log_count, None, True))])
    check_same(mean, F.cross_entropy(torch.cat([(query * item).sum(1, keepdim=True), ((query.unsqueeze(1) * hard[0]).sum(2) - log_count).masked_fill(
        hard[1] == ids[:, None], -math.inf)], 1), torch.zeros(Q, dtype=torch.int64)), [query, item, hard[0]], rtol=1e-10)


def test_bad_input():
    query, item, ids, mixed, hard = batch()
    loss = xs.TwoTowerLoss(N, memory=4, dim=D)
    loss(query, item, ids)
    before = copy.deepcopy(loss.state_dict())
    for error, message, arguments in [
            (ValueError, r"expected query and item of one shape \[Q, D\], got \[12, 6\] and \[12, 5\]", (query, item[:, 1:], ids)),
            (ValueError, r"expected item_id of shape \[12\], got \[11\]", (query, item, ids[1:])),
            (TypeError, "expected item_id of dtype int64, got float32", (query, item, ids.float())),
            (TypeError, "expected query of dtype float32, .*, got int64", (query.long(), item, ids)),
            (TypeError, "expected vectors of negatives of dtype float32, .*, got int64", (query, item, ids, (mixed[0].long(), mixed[1]))),
            (TypeError, "expected item on query's device cpu, got meta", (query, item.to("meta"), ids)),
            (TypeError, "expected ids of negatives on query's device cpu, got meta", (query, item, ids, (mixed[0], mixed[1].to("meta")))),
            (TypeError, r"expected item as a dense \(strided\) tensor", (query, item.detach().to_sparse(), ids)),
            (TypeError, "expected query as a tensor, got list", ([1.0], item, ids)),
            (IndexError, rf"expected item_id in \[0, {N}\), got", (query, item, ids + N)),
            (IndexError, rf"expected item_id in \[0, {N}\), got -1 at \[0\]", (query, item, ids.index_fill(0, torch.tensor(0), -1))),
            (IndexError, rf"expected ids of negatives in \[0, {N}\), got {N} at \[2\]",
             (query, item, ids, (mixed[0], mixed[1].index_fill(0, torch.tensor(2), N)))),
            (IndexError, rf"expected ids of negatives in \[0, {N}\), got -1 at \[0, 0\]", (query, item, ids, (hard[0], torch.full((Q, P), -1)))),
            (TypeError, r"expected negatives as \(vectors, ids\), got Tensor", (query, item, ids, mixed[0])),
            (ValueError, r"expected vectors of negatives of shape \[S, 6\] or \[12, P, 6\], got \[7, 5\]", (query, item, ids, (mixed[0][:, 1:], mixed[1]))),
            (ValueError, r"expected ids of negatives of shape \[7\], got \[6\]", (query, item, ids, (mixed[0], mixed[1][1:]))),
            (TypeError, "expected weight of dtype float32, .*, got int64", (query, item, ids, None, torch.ones(Q, dtype=torch.int64))),
            (ValueError, r"expected weight with size 12 \(the queries\) in dimension 0, got shape \[3\]", (query, item, ids, None, torch.ones(3)))]:
        with pytest.raises(error, match="(?i)(TwoTowerLoss:|two_tower_loss_(:|\\(\\))) " + message):
            loss(*arguments)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loss.state_dict().items())  # an error counts and remembers nothing
    with pytest.raises(IndexError, match=r"expected item_id in \[0, 5\), got"):
        xs.TwoTowerLoss(5, counts=False)(query, item, ids)
    with pytest.raises(ValueError, match="expected num_items, from which negatives .* got none"):
        xs.TwoTowerLoss()(query, item, ids, mixed)
    with pytest.raises(ValueError, match="expected vectors of the width of memory, 5, got 6"):
        xs.TwoTowerLoss(memory=3, dim=5)(query, item, ids)
    for error, message, options in [
            (ValueError, "expected an estimator of the library without noise, got 'cane'", dict(estimator="cane")),
            (ValueError, "expected estimator to be one of", dict(estimator="logq")),
            (ValueError, "expected temperature above 0, got 0", dict(temperature=0)),
            (ValueError, "expected temperature above 0, got nan", dict(temperature=math.nan)),
            (ValueError, "expected temperature above 0, got -1", dict(temperature=torch.tensor(-1.0))),
            (ValueError, "expected temperature above 0, got 0", dict(temperature=torch.nn.Parameter(torch.tensor(0.0)))),
            (ValueError, "expected temperature as a torch.nn.Parameter to train it", dict(temperature=torch.zeros((), requires_grad=True).exp())),
            (ValueError, "expected similarity to be one of", dict(similarity="l2")),
            (ValueError, "expected dim, the width of the vectors, for memory=4, got none", dict(memory=4)),
            (ValueError, "expected counts of 30 ids, got those of 4", dict(num_items=N, counts=xs.samplers.StreamingCounts(4))),
            (TypeError, "expected counts as a StreamingCounts, None or False, got True", dict(counts=True)),
            (ValueError, "reduction", dict(reduction="max"))]:
        with pytest.raises(error, match=message):
            xs.TwoTowerLoss(**options)


@pytest.mark.parametrize("private", [False, True])
def test_opcheck(private):
    query, item, ids, mixed, hard = batch()
    columns = ([hard[1], None, torch.rand(Q, P), None, torch.rand(Q)] if private else [None, mixed[1], None, torch.rand(S), torch.rand(Q)])
    arguments = (query, item, ids, None if private else mixed[0], hard[0] if private else None, columns, [0, 0])
    torch.library.opcheck(ops.tower_losses.default, (*arguments, ""))
    torch.library.opcheck(ops.weighted_tower_loss.default, (*arguments, torch.rand(Q, dtype=torch.float64), ""))
    torch.library.opcheck(ops.tower_loss_forward.default, (*(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments),
                                                           torch.rand(Q, dtype=torch.float64), "", [True] * 4), test_utils=("test_schema", "test_faketensor"))


ADVICE = r": make the loss with num_items=None for ids of any size, or call resize_classes\(num_items\)$"


@pytest.mark.parametrize("counts", [None, False, "half_life"])
def test_a_new_id_is_told_how_to_get_in(counts):
    """Without the advice a user with a new item has no way on; both ways that it names must work."""
    query, item, ids, mixed, _ = batch()
    make = lambda number: xs.TwoTowerLoss(number, counts=xs.samplers.StreamingCounts(number, half_life=9) if counts else counts)  # noqa: E731
    loss, new = make(N), ids.index_fill(0, torch.tensor(3), N)
    with pytest.raises(IndexError, match=rf"expected item_id in \[0, {N}\), got {N} at \[3\]" + ADVICE):
        loss(query, item, new)
    with pytest.raises(IndexError, match=rf"expected ids of negatives in \[0, {N}\), got {N} at \[0\]" + ADVICE):
        loss(query, item, ids, (mixed[0], mixed[1].index_fill(0, torch.tensor(0), N)))
    assert make(None)(query, item, new).isfinite()
    loss.resize_classes(N + 1)
    torch.testing.assert_close(loss(query, item, new), make(N + 1)(query, item, new), rtol=0, atol=0)


def test_counts_alone_limit_ids():
    """num_items=None is no advice for one who gave None."""
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(counts=xs.samplers.StreamingCounts(5))
    with pytest.raises(IndexError, match=r"make the loss with counts=StreamingCounts\(None\) for ids of any size, or call resize_classes"):
        loss(query, item, ids)
    loss.resize_classes(N)
    assert loss.counts.num_ids == N and loss(query, item, ids).isfinite()


@pytest.mark.parametrize("half_life", [None, 20.0])
@pytest.mark.parametrize("memory", [0, 20])
@pytest.mark.parametrize("kind", ["batch", "mixed", "hard"])
def test_a_loss_that_grew_is_a_larger_one(kind, memory, half_life):
    """Other counts than those of a loss made at that size would weigh candidates wrongly."""
    def make(number):
        return xs.TwoTowerLoss(number, counts=xs.samplers.StreamingCounts(number, half_life=half_life), memory=memory, dim=D)

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
        if step >= 2 or kind != "mixed":  # uniform negatives are of all items
            torch.testing.assert_close(*values, rtol=0, atol=0)
    for name, table in larger.state_dict().items():
        torch.testing.assert_close(grown.state_dict()[name], table, rtol=0, atol=0)
    assert all(buffers[name] is table for name, table in grown.named_buffers())
    assert grown.extra_repr().startswith(f"num_items={N}, ")
    restored = make(N)
    restored.load_state_dict(grown.state_dict())
    torch.testing.assert_close(restored.eval()(query, item, ids), grown.eval()(query, item, ids), rtol=0, atol=0)


@pytest.mark.parametrize("counts", [None, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_items_that_are_gone_leave_counts_and_memory(steps, counts):
    """An item that is gone would be a candidate, or an error at each step, while memory holds it. 12 and 36 items of 20 places."""
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
        assert loss.counts.count.tolist() == [sum(i == other for other, _ in past) for i in range(6)]
        assert loss.counts.total == loss.counts.count.sum()
    value = loss(query, item, ids % 6)
    assert value.isfinite() and loss.memory_state.tolist() == [len(stay) + Q, steps + 1]
    with pytest.raises(IndexError, match=r"expected item_id in \[0, 6\), got 6"):
        loss(query, item, torch.full_like(ids, 6))


def test_resizing_of_open_ids():
    """Nothing to resize but the number that uniform negatives are drawn from; any id stays one."""
    query, item, ids, mixed, _ = batch()
    loss = xs.TwoTowerLoss(memory=20, dim=D)
    loss(query, item, ids + 10**12)
    before = copy.deepcopy(loss.state_dict())
    loss.resize_classes(3)
    assert all(torch.equal(table, before[name]) for name, table in loss.state_dict().items())
    drawn, wanted = (xs.TwoTowerLoss(number, counts=xs.samplers.StreamingCounts(None), memory=20, dim=D) for number in (2 * N, N))
    for one in (drawn, wanted):
        one(query, item, ids + 10**12)
    drawn.resize_classes(N)
    torch.testing.assert_close(drawn(query, item, ids, mixed), wanted(query, item, ids, mixed), rtol=0, atol=0)
    assert loss(query, item, ids + 10**12).isfinite()


@pytest.mark.parametrize("error, number", [(ValueError, 0), (ValueError, -3), (TypeError, 3.5), (TypeError, None), (TypeError, True)])
def test_a_number_that_is_none(error, number):
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(N, memory=20, dim=D)
    loss(query, item, ids)
    before, options = copy.deepcopy(loss.state_dict()), repr(loss)
    with pytest.raises(error, match="TwoTowerLoss: expected num_items of "):
        loss.resize_classes(number)
    assert repr(loss) == options and all(torch.equal(table, before[name]) for name, table in loss.state_dict().items())


def best(query, item_vectors, k, similarity, temperature, exclude=None):
    """topk as a user would write it, equal scores by id."""
    if similarity == "cosine":
        query, item_vectors = F.normalize(query, dim=-1), F.normalize(item_vectors, dim=-1)
    values = torch.log_softmax(query @ item_vectors.T / temperature, -1)
    if exclude is not None:
        for row, unwanted in zip(values.reshape(-1, values.shape[-1]), exclude.reshape(-1, exclude.shape[-1])):
            row[unwanted[unwanted >= 0]] = -math.inf
    values, ids = values.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids.masked_fill(values.isneginf(), -1)[..., :k]


@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.bfloat16),
                                    (torch.bfloat16, torch.float64)], ids=str)
@pytest.mark.parametrize("temperature", [0.07, 2.0])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_topk(impl, similarity, temperature, dtypes, excluding):
    """16-bit vectors that were scaled or normalised in 16 bits would be in another order."""
    made = torch.Generator().manual_seed(2)
    query, vectors = torch.randn(2, 3, D, generator=made).to(dtypes[0]), torch.randn(N, D, generator=made).to(dtypes[1])
    exclude = torch.randint(-1, N, (2, 3, 4), generator=made) if excluding else None
    loss = xs.TwoTowerLoss(N, similarity=similarity, temperature=temperature)
    want = best(query.double(), vectors.double(), 7, similarity, temperature, exclude)
    got = loss.topk(query.requires_grad_(), vectors, 7, exclude)
    scripted = torch.jit.script(loss).topk(query, vectors, 7, exclude)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = loss.topk(query, vectors, 7, exclude)
    for values, ids in (got, scripted, under_autocast):
        assert values.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32) and not values.requires_grad
        assert torch.equal(ids, want[1])
        torch.testing.assert_close(values.double(), want[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_topk_of_equal_scores_and_of_few_items(similarity):
    loss, query = xs.TwoTowerLoss(temperature=0.1, similarity=similarity), torch.randn(2, D, generator=torch.Generator().manual_seed(0))
    twins = torch.randn(4, D, generator=torch.Generator().manual_seed(1)).repeat(3, 1)
    values, ids = loss.topk(query, twins, 12)
    assert ids.view(2, 4, 3).diff().eq(4).all() and values.view(2, 4, 3).diff().eq(0).all()
    assert loss.topk(query[0], twins, 2)[1].tolist() == ids[0, :2].tolist()
    assert loss.topk(query, twins, 0)[0].shape == (2, 0) and loss.topk(query[:0], twins, 3)[1].shape == (0, 3)
    values, left = loss.topk(query, twins, 12, ids[:, :10])
    assert torch.equal(left[:, :2], ids[:, 10:]) and left[:, 2:].eq(-1).all() and values[:, 2:].isneginf().all()


def test_topk_follows_a_trained_temperature():
    query, item, *_ = batch()
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    loss = xs.TwoTowerLoss(temperature=temperature)
    with torch.no_grad():
        temperature.fill_(0.25)
    torch.testing.assert_close(loss.topk(query, item, 3)[0], best(query.detach(), item.detach(), 3, "dot", 0.25)[0])


def test_topk_is_exported_for_any_number_of_queries():
    class Search(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss, self.vectors = xs.TwoTowerLoss(N, similarity="cosine", temperature=0.2), torch.nn.Parameter(torch.randn(N, D))

        def forward(self, query, exclude):
            return self.loss.topk(query, self.vectors, 5, exclude)

    torch.manual_seed(0)
    search, queries = Search().eval(), torch.export.Dim("Q")
    program = torch.export.export(search, (torch.randn(4, D), torch.randint(N, (4, 2))), dynamic_shapes=({0: queries}, {0: queries}))
    compiled = torch.compile(search, backend="aot_eager", fullgraph=True)
    query, exclude = torch.randn(9, D), torch.randint(N, (9, 2))
    for found in (program.module()(query, exclude), compiled(query, exclude)):
        torch.testing.assert_close(found, search(query, exclude))


@pytest.mark.parametrize("error, message, change", [
    (ValueError, r"expected k in \[0, 30\] \(the rows of item_vectors\), got 31", dict(k=N + 1)), (ValueError, r"expected k in .*, got -1", dict(k=-1)),
    (TypeError, "expected k of type int, got float", dict(k=2.0)),
    (ValueError, r"expected item_vectors with size 6 \(the width of query\) in dimension 1", dict(item_vectors=torch.zeros(N, D + 1))),
    (ValueError, "expected item_vectors with 2 dimensions", dict(item_vectors=torch.zeros(D))),
    (ValueError, r"expected query of shape \[\*, D\], got \[\]", dict(query=torch.tensor(1.0))),
    (TypeError, "expected query of dtype float32, .*, got int64", dict(query=torch.ones(4, D, dtype=torch.int64))),
    (TypeError, "expected item_vectors of dtype float32, .*, got int64", dict(item_vectors=torch.ones(N, D, dtype=torch.int64))),
    (TypeError, "expected item_vectors on query's device cpu, got meta", dict(item_vectors=torch.zeros(N, D, device="meta"))),
    (TypeError, "expected exclude of dtype int64, got int32", dict(exclude=torch.zeros(4, 2, dtype=torch.int32))),
    (ValueError, r"expected exclude of shape \[\*, E\]", dict(exclude=torch.zeros(3, 2, dtype=torch.int64))),
    (IndexError, rf"expected exclude in \[0, {N}\), or -1 for none, got {N}", dict(exclude=torch.full((4, 2), N)))])
def test_topk_of_bad_input(error, message, change):
    with pytest.raises(error, match=message):
        xs.TwoTowerLoss(N).topk(**dict(query=torch.zeros(4, D), item_vectors=torch.zeros(N, D), k=3) | change)


@pytest.mark.parametrize("name", ["two_tower_loss_", "two_tower_update_", "check_two_tower", "two_tower_topk"])
def test_opcheck_of_steps(name):
    arguments = op_samples.samples()[name]
    if name == "two_tower_loss_":
        for vectors in (arguments[0], arguments[1], arguments[3][0]):
            vectors.requires_grad_()
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_rows_and_lists():
    ids = torch.randint(-3, 4, (5, 9), generator=torch.Generator().manual_seed(0))
    want = [[i not in row[:k] for k, i in enumerate(row)] for row in ids.tolist()]
    assert ops.first_occurrences(ids).tolist() == want
    assert ops.first_occurrences(ids[:, :0]).shape == (5, 0)
    lists = ids[:, :4]
    assert ops.listed(ids, lists).tolist() == [[i in row for i in asked] for asked, row in zip(ids.tolist(), lists.tolist())]
    assert ops.listed(ids[0], lists).tolist() == [[i in row for i in ids[0].tolist()] for row in lists.tolist()]
    assert not ops.listed(ids, lists[:, :0]).any()


def test_inclusion_is_that_of_draws():
    p = torch.tensor([0.5, 0.1, 1e-9, 0.0, 1.0])
    got = ops.inclusion_log_count(p.log(), torch.tensor(9), 3, 20)
    want = torch.log1p(-(1 - p.double()) ** 9 * (1 - 1 / 20) ** 3)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
    rare = ops.inclusion_log_count(torch.tensor([-40.0]), torch.tensor(1000), 0, 0)
    torch.testing.assert_close(rare, torch.tensor([math.log(1000) - 40]))
    assert ops.inclusion_log_count(torch.tensor([0.0]), torch.tensor(0), 0, 0) == -math.inf
