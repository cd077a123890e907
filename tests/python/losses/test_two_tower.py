"""Values and gradients of TwoTowerLoss against its formula, and its calls under torch."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import op_samples
import xsoftmax as xs
from two_tower_checks import D, N, P, Q, S, batch, check_same, frequencies, naive, ops
from xsoftmax.samplers import CandidateSet

ESTIMATORS = [name for name in ops.estimator_names() if not name.startswith("cane")]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["batch", "mixed", "hard"])
def test_equals_the_formula(impl, kind, estimator, reduction):
    """The loss and its gradients match the formula for every kind of negatives. Counts are float32,
    so the tolerance is float32's."""
    query, item, ids, mixed, hard = batch()
    negatives = {"batch": None, "mixed": mixed, "hard": hard}[kind]
    loss = xs.TwoTowerLoss(N, estimator=estimator, temperature=0.5, reduction=reduction)
    got = loss(query, item, ids, negatives)
    want = naive(query, item, ids,
                 mixed if kind == "mixed" else None, hard if kind == "hard" else None,
                 frequencies(ids), temperature=0.5, estimator=estimator)
    want = {"mean": want.mean(), "sum": want.sum(), "none": want}[reduction]
    check_same(got, want, [query, item] + ([] if negatives is None else [negatives[0]]))


@pytest.mark.parametrize("memory", [0, 6])
@pytest.mark.parametrize("kind", ["batch", "mixed", "hard"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_counts_all_counts_are_one(impl, kind, memory, estimator):
    """With counts=False every candidate has weight 1, also a hard negative that is in the batch: a
    count of 2 would halve its weight."""
    query, item, ids, mixed, hard = batch()
    negatives = {"batch": None, "mixed": mixed, "hard": hard}[kind]
    loss = xs.TwoTowerLoss(N, counts=False, estimator=estimator, reduction="none", memory=memory,
                           dim=D)
    before = torch.randn(memory, D, dtype=query.dtype,
                         generator=torch.Generator().manual_seed(3)).float().to(query.dtype)
    old = torch.arange(memory) + 10
    if memory:
        loss(before, before, old)
    got, rows = loss.eval()(query, item, ids, negatives), []
    first = {}
    places = [
        *zip(ids.tolist(), item), *(() if kind != "mixed" else zip(mixed[1].tolist(), mixed[0])),
        *zip(old.tolist()[::-1], before.flip(0))
    ]
    for i, vector in places:
        first.setdefault(i, vector)
    for q in range(Q):
        candidates = dict(first)
        for i, vector in zip(hard[1][q].tolist(), hard[0][q]) if kind == "hard" else ():
            candidates.setdefault(i, vector)
        row = torch.stack(
            [query[q] @ item[q], *(query[q] @ vector for vector in candidates.values())])[None]
        rows.append(
            ops.candidate_loss(row, ids[q:q + 1], [torch.tensor([list(candidates)])],
                               [torch.zeros(1, len(candidates), dtype=query.dtype)],
                               [torch.zeros(1)], [True], f"estimator={estimator}"))
    check_same(got, torch.cat(rows), [query, item] + ([] if negatives is None else [negatives[0]]))


def test_cosine_is_the_product_of_unit_vectors():
    query, item, ids, mixed, _ = batch()
    unit = [F.normalize(vectors, dim=1) for vectors in (query, item, mixed[0])]
    got = xs.TwoTowerLoss(N, similarity="cosine", temperature=0.1)(query, item, ids, mixed)
    check_same(got,
               xs.TwoTowerLoss(N, temperature=0.1)(*unit[:2], ids, (unit[2], mixed[1])),
               [query, item, mixed[0]])


@pytest.mark.parametrize("cast",
                         [lambda loss: loss, lambda loss: loss.half(), lambda loss: loss.double()])
def test_temperature_is_not_rounded(cast):
    """Casting the loss must not round its temperature, nor must 16-bit vectors."""
    query, item, ids, *_ = batch()
    check_same(
        cast(xs.TwoTowerLoss(counts=False, temperature=0.07))(query, item, ids),
        xs.TwoTowerLoss(counts=False)(query / 0.07, item, ids), [query, item], rtol=1e-12)
    low = query.detach().bfloat16()
    torch.testing.assert_close(
        cast(xs.TwoTowerLoss(counts=False, temperature=0.07))(low, item.bfloat16(), ids),
        xs.TwoTowerLoss(counts=False)((low.float() / 0.07).bfloat16(), item.bfloat16(), ids),
        rtol=0, atol=0)


def test_temperature_is_trained():
    """The gradient of a temperature parameter matches finite differences."""
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
    torch.testing.assert_close(temperature.grad, (ends[0] - ends[1]) / (2 * step), rtol=1e-4,
                               atol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_normaliser_is_unbiased(mixed):
    """With items drawn by their known frequencies and a fixed target, the mean of e^(loss + s_y) is
    the sum over all items."""
    torch.manual_seed(0)
    items, distribution = torch.randn(N, D, dtype=torch.float64), torch.rand(N).softmax(0)
    distribution = (distribution / distribution.sum()).double()
    counts = xs.samplers.StreamingCounts(N)
    counts.load_state_dict(
        counts.state_dict()
        | {"count": (distribution * 10**9).long(), "total": (distribution * 10**9).long().sum()})
    loss = xs.TwoTowerLoss(N, counts=counts, reduction="none").eval()
    query = torch.randn(1, D, dtype=torch.float64)
    found = []
    for _ in range(6000):
        ids = torch.multinomial(distribution, Q, replacement=True)
        ids[0] = 4
        more = torch.randint(N, (S,))
        found.append(
            loss(query.expand(Q, D), items[ids], ids, (items[more], more) if mixed else None)[0])
    total = (torch.stack(found) + (query @ items[4]).squeeze()).exp()
    want = (items @ query[0]).exp().sum()
    assert abs(total.mean() - want) < 4 * total.std() / len(found)**0.5
    assert total.std() / len(found)**0.5 < 0.05 * want


def test_the_gradient_of_the_refined_correction():
    """The gradient is (1 - P_y) times that of log sum_{j != y} e^{s_j} / c_j - s_y, with P_y not
    differentiated (Khrylchenko et al., 2025)."""
    query, item, ids, mixed, _ = batch()
    vectors = torch.cat([item, mixed[0]])
    all_ids = torch.cat([ids, mixed[1]])
    log_count = torch.rand(Q + S)
    one = CandidateSet(all_ids, log_count.masked_fill(~ops.first_occurrences(all_ids), math.inf),
                       torch.rand(Q), True)
    got = xs.functional.tower_loss(query, item, ids, [(vectors, one)], reduction="sum")
    s = (query @ vectors.T - one.log_count).masked_fill(all_ids == ids[:, None], -math.inf)
    negative, positive = torch.logsumexp(s, 1), (query * item).sum(1)
    uncertainty = 1 - (positive - torch.logaddexp(positive, negative)).exp()
    want = (uncertainty.detach() * (negative - positive)).sum()
    tensors = [query, item, mixed[0]]
    for one, other in zip(torch.autograd.grad(got, tensors), torch.autograd.grad(want, tensors)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_without_counts_the_loss_is_cross_entropy_over_the_batch():
    query, item, ids, *_ = batch()
    loss = xs.TwoTowerLoss(counts=False)
    first = ops.first_occurrences(ids)
    s = (query @ item.T)[:, first].masked_fill(ids[first] == ids[:, None], -math.inf)
    check_same(
        loss(query, item, ids),
        F.cross_entropy(torch.cat([(query * item).sum(1, keepdim=True), s], 1),
                        torch.zeros(Q, dtype=torch.int64)), [query, item])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    """The loss of 16-bit vectors is summed in float32, and gradients have the dtype of their
    vectors."""
    query, item, ids, mixed, hard = batch(dtype=dtype)
    for negatives in (mixed, hard):
        got = xs.TwoTowerLoss(N)(query, item, ids, negatives)
        want = xs.TwoTowerLoss(N)(query.double(), item.double(), ids,
                                  (negatives[0].double(), negatives[1]))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)  # products are in float32
        assert got.dtype == torch.float32
        grads = torch.autograd.grad(got, [query, item, negatives[0]])
        for one, other in zip(grads, torch.autograd.grad(want, [query, item, negatives[0]])):
            assert one.dtype == dtype
            torch.testing.assert_close(one.float(), other.float(), rtol=8 * torch.finfo(dtype).eps,
                                       atol=4 * torch.finfo(dtype).eps)


def test_autocast():
    query, item, ids, *_ = batch(dtype=torch.float32)
    tower = torch.nn.Linear(D, D)
    with torch.autocast("cpu", torch.bfloat16):
        made = tower(query)
        assert made.dtype == torch.bfloat16
        loss = xs.TwoTowerLoss(N)(made, item, ids)
    loss.backward()
    assert loss.dtype == torch.float32 and tower.weight.grad.isfinite().all()


def test_query_weights_follow_the_reduction():
    query, item, ids, *_ = batch()
    weight = torch.rand(Q)
    for reduction in ("none", "sum", "mean"):
        want = xs.TwoTowerLoss(N, reduction="none")(query, item, ids) * weight
        want = {"none": want, "sum": want.sum(), "mean": want.sum() / weight.sum()}[reduction]
        check_same(
            xs.TwoTowerLoss(N, reduction=reduction)(query, item, ids, weight=weight), want,
            [query, item])


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False),
                                    (False, False, True), (True, True, True)])
def test_gradients_of_some_inputs_only(wanted):
    query, item, ids, mixed, _ = batch()
    tensors = [
        tensor.detach().requires_grad_(want)
        for tensor, want in zip((query, item, mixed[0]), wanted)
    ]
    xs.TwoTowerLoss(N)(tensors[0], tensors[1], ids, (tensors[2], mixed[1])).backward()
    whole = torch.autograd.grad(
        xs.TwoTowerLoss(N)(query, item, ids, mixed), [query, item, mixed[0]])
    for tensor, want, grad in zip(tensors, wanted, whole):
        assert (tensor.grad is not None) == want
        assert not want or torch.allclose(tensor.grad, grad)


@pytest.mark.parametrize("width", [8, 64, 384])
def test_blocks_of_queries_and_threads(same_for_any_threads, width):
    """Large batches match the formula, with the same bits for any number of threads. They have more
    scores than a block holds, and sums long enough for MKL to split by threads."""
    made = torch.Generator().manual_seed(0)
    query, item = (torch.randn(3000, width, generator=made).div(width**0.25).requires_grad_()
                   for _ in range(2))
    ids = torch.randint(2500, (3000,), generator=made)

    def compute():
        loss = xs.TwoTowerLoss(2500)(query, item, ids)
        return [loss, *torch.autograd.grad(loss, [query, item])]

    same_for_any_threads(compute)
    with torch.no_grad():
        first = ops.first_occurrences(ids)
        log_count = torch.log(1 -
                              (1 - torch.bincount(ids, minlength=2500)[ids].double() / 3000)**2999)
        s = (query @ item.T - log_count)[:, first].masked_fill(ids[first] == ids[:, None],
                                                               -math.inf)
        positive = (query * item).sum(1)
        want = (torch.logaddexp(positive, torch.logsumexp(s, 1)) - positive).mean()
    torch.testing.assert_close(compute()[0], want.float())


def test_scripted_and_compiled():
    query, item, ids, mixed, hard = batch(dtype=torch.float32)
    loss = xs.TwoTowerLoss(N, memory=9, dim=D, similarity="cosine", temperature=0.2)
    scripted, copied, compiled = torch.jit.script(
        copy.deepcopy(loss)), copy.deepcopy(loss), copy.deepcopy(loss)
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
    """As in torch, a mean over no query is NaN and a sum is 0. Nothing is counted."""
    loss = xs.TwoTowerLoss(N, reduction=reduction, memory=4, dim=D)
    none, no_ids = torch.zeros(0, D, dtype=dtype,
                               requires_grad=True), torch.zeros(0, dtype=torch.int64)
    for negatives in (None, (torch.zeros(S, D, dtype=dtype), torch.arange(S)),
                      (torch.zeros(0, P, D, dtype=dtype), torch.zeros(0, P, dtype=torch.int64))):
        for weight in (None, torch.zeros(0)):
            value = loss(none, none, no_ids, negatives, weight)
            want = F.cross_entropy(torch.zeros(0, N), no_ids, reduction=reduction)
            torch.testing.assert_close(value, want.to(value.dtype), equal_nan=True)
            grads = torch.autograd.grad(value.sum(), none)
            assert grads[0].shape == (0, D)
    assert loss.counts.total == 0 and loss.memory_state.tolist() == [0, 6]


def test_one_query_without_other_candidates():
    one = torch.randn(1, D)
    assert xs.TwoTowerLoss(N)(one, one, torch.tensor([3])) == 0  # the item is its only candidate


def test_candidates_private_to_each_query():
    query, item, ids, _, hard = batch()
    log_count = torch.rand(Q, P)
    got = xs.functional.tower_loss(query, item, ids,
                                   [(hard[0], CandidateSet(hard[1], log_count, None, True))],
                                   reduction="none")
    s = ((query.unsqueeze(1) * hard[0]).sum(2) - log_count).masked_fill(
        hard[1] == ids[:, None], -math.inf)
    want = F.cross_entropy(torch.cat([(query * item).sum(1, keepdim=True), s], 1),
                           torch.zeros(Q, dtype=torch.int64), reduction="none")
    check_same(got, want, [query, item, hard[0]], rtol=1e-10)
    mean = xs.functional.tower_loss(query, item, ids,
                                    [(hard[0], CandidateSet(hard[1], log_count, None, True))])
    check_same(
        mean,
        F.cross_entropy(
            torch.cat([(query * item).sum(1, keepdim=True),
                       ((query.unsqueeze(1) * hard[0]).sum(2) - log_count).masked_fill(
                           hard[1] == ids[:, None], -math.inf)], 1),
            torch.zeros(Q, dtype=torch.int64)), [query, item, hard[0]], rtol=1e-10)


def test_bad_input():
    query, item, ids, mixed, hard = batch()
    loss = xs.TwoTowerLoss(N, memory=4, dim=D)
    loss(query, item, ids)
    before = copy.deepcopy(loss.state_dict())
    for error, message, arguments in [
        (ValueError, r"expected query and item of one shape \[Q, D\], got \[12, 6\] and \[12, "
         r"5\]", (query, item[:, 1:], ids)),
        (ValueError, r"expected item_id of shape \[12\], got \[11\]", (query, item, ids[1:])),
        (TypeError, "expected item_id of dtype int64, got float32", (query, item, ids.float())),
        (TypeError, "expected query of dtype float32, .*, got int64", (query.long(), item, ids)),
        (TypeError, "expected vectors of negatives of dtype float32, .*, got int64",
         (query, item, ids, (mixed[0].long(), mixed[1]))),
        (TypeError, "expected item on query's device cpu, got meta", (query, item.to("meta"), ids)),
        (TypeError, "expected ids of negatives on query's device cpu, got meta",
         (query, item, ids, (mixed[0], mixed[1].to("meta")))),
        (TypeError, r"expected item as a dense \(strided\) tensor",
         (query, item.detach().to_sparse(), ids)),
        (TypeError, "expected query as a tensor, got list", ([1.0], item, ids)),
        (IndexError, rf"expected item_id in \[0, {N}\), got", (query, item, ids + N)),
        (IndexError, rf"expected item_id in \[0, {N}\), got -1 at \[0\]",
         (query, item, ids.index_fill(0, torch.tensor(0), -1))),
        (IndexError, rf"expected ids of negatives in \[0, {N}\), got {N} at \[2\]",
         (query, item, ids, (mixed[0], mixed[1].index_fill(0, torch.tensor(2), N)))),
        (IndexError, rf"expected ids of negatives in \[0, {N}\), got -1 at \[0, 0\]",
         (query, item, ids, (hard[0], torch.full((Q, P), -1)))),
        (TypeError, r"expected negatives as \(vectors, ids\), got Tensor", (query, item, ids,
                                                                            mixed[0])),
        (ValueError, r"expected vectors of negatives of shape \[S, 6\] or \[12, P, 6\], got "
         r"\[7, 5\]", (query, item, ids, (mixed[0][:, 1:], mixed[1]))),
        (ValueError, r"expected ids of negatives of shape \[7\], got \[6\]",
         (query, item, ids, (mixed[0], mixed[1][1:]))),
        (TypeError, "expected weight of dtype float32, .*, got int64",
         (query, item, ids, None, torch.ones(Q, dtype=torch.int64))),
        (ValueError, r"expected weight with size 12 \(the queries\) in dimension 0, got shape "
         r"\[3\]", (query, item, ids, None, torch.ones(3)))
    ]:
        with pytest.raises(error, match="(?i)(TwoTowerLoss:|two_tower_loss_(:|\\(\\))) " + message):
            loss(*arguments)
    # no error changed counts or memory
    assert all(torch.equal(tensor, before[name]) for name, tensor in loss.state_dict().items())
    with pytest.raises(IndexError, match=r"expected item_id in \[0, 5\), got"):
        xs.TwoTowerLoss(5, counts=False)(query, item, ids)
    with pytest.raises(ValueError, match="expected num_items, from which negatives .* got none"):
        xs.TwoTowerLoss()(query, item, ids, mixed)
    with pytest.raises(ValueError, match="expected vectors of the width of memory, 5, got 6"):
        xs.TwoTowerLoss(memory=3, dim=5)(query, item, ids)
    for error, message, options in [
        (ValueError, "expected an estimator of the library without noise, got 'cane'",
         dict(estimator="cane")),
        (ValueError, "expected estimator to be one of", dict(estimator="logq")),
        (ValueError, "expected temperature above 0, got 0", dict(temperature=0)),
        (ValueError, "expected temperature above 0, got nan", dict(temperature=math.nan)),
        (ValueError, "expected temperature above 0, got -1", dict(temperature=torch.tensor(-1.0))),
        (ValueError, "expected temperature above 0, got 0",
         dict(temperature=torch.nn.Parameter(torch.tensor(0.0)))),
        (ValueError, "expected temperature as a torch.nn.Parameter to train it",
         dict(temperature=torch.zeros((), requires_grad=True).exp())),
        (ValueError, "expected similarity to be one of", dict(similarity="l2")),
        (ValueError, "expected dim, the width of the vectors, for memory=4, got none",
         dict(memory=4)),
        (ValueError, "expected counts of 30 ids, got those of 4",
         dict(num_items=N, counts=xs.samplers.StreamingCounts(4))),
        (TypeError, "expected counts as a StreamingCounts, None or False, got True",
         dict(counts=True)), (ValueError, "reduction", dict(reduction="max"))
    ]:
        with pytest.raises(error, match=message):
            xs.TwoTowerLoss(**options)


@pytest.mark.parametrize("private", [False, True])
def test_opcheck(private):
    query, item, ids, mixed, hard = batch()
    columns = ([hard[1], None, torch.rand(Q, P), None,
                torch.rand(Q)] if private else [None, mixed[1], None,
                                                torch.rand(S),
                                                torch.rand(Q)])
    arguments = (query, item, ids, None if private else mixed[0], hard[0] if private else None,
                 columns, [0, 0])
    torch.library.opcheck(ops.tower_losses.default, (*arguments, ""))
    torch.library.opcheck(ops.weighted_tower_loss.default,
                          (*arguments, torch.rand(Q, dtype=torch.float64), ""))
    torch.library.opcheck(
        ops.tower_loss_forward.default,
        (*(a.detach() if isinstance(a, torch.Tensor) else a
           for a in arguments), torch.rand(Q, dtype=torch.float64), "", [True] * 4),
        test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "name", ["two_tower_loss_", "two_tower_update_", "check_two_tower", "two_tower_topk"])
def test_opcheck_of_module_operators(name):
    arguments = op_samples.samples()[name]
    if name == "two_tower_loss_":
        for vectors in (arguments[0], arguments[1], arguments[3][0]):
            vectors.requires_grad_()
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_first_occurrences_and_listed():
    ids = torch.randint(-3, 4, (5, 9), generator=torch.Generator().manual_seed(0))
    want = [[i not in row[:k] for k, i in enumerate(row)] for row in ids.tolist()]
    assert ops.first_occurrences(ids).tolist() == want
    assert ops.first_occurrences(ids[:, :0]).shape == (5, 0)
    lists = ids[:, :4]
    assert ops.listed(ids, lists).tolist() == [[i in row for i in asked]
                                               for asked, row in zip(ids.tolist(), lists.tolist())]
    assert ops.listed(ids[0], lists).tolist() == [[i in row for i in ids[0].tolist()]
                                                  for row in lists.tolist()]
    assert not ops.listed(ids, lists[:, :0]).any()


def test_inclusion_log_count_matches_its_formula():
    p = torch.tensor([0.5, 0.1, 1e-9, 0.0, 1.0])
    got = ops.inclusion_log_count(p.log(), torch.tensor(9), 3, 20)
    want = torch.log1p(-(1 - p.double())**9 * (1 - 1 / 20)**3)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
    rare = ops.inclusion_log_count(torch.tensor([-40.0]), torch.tensor(1000), 0, 0)
    torch.testing.assert_close(rare, torch.tensor([math.log(1000) - 40]))
    assert ops.inclusion_log_count(torch.tensor([0.0]), torch.tensor(0), 0, 0) == -math.inf
