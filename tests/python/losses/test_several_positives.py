"""Several positives of a query (target [*, T]), against one row for each positive without the other
positives."""

import functools
import math

import pytest
import torch

import xsoftmax as xs

N, D, Q, T = 23, 5, 9, 4
PAD = -100
samplers = xs.samplers
COUNTS = torch.arange(1.0, N + 1)
SAMPLERS = {
    "uniform": lambda: samplers.UniformSampler(N, 9),
    "uniform independent": lambda: samplers.UniformSampler(N, 12, distinct=False),
    "uniform private": lambda: samplers.UniformSampler(N, 7, shared=False),
    "unigram private": lambda: samplers.UnigramSampler(COUNTS, 8, shared=False),
    "in_batch": lambda: samplers.InBatchSampler(N),
    "midx": lambda: samplers.MidxSampler(N, D, 6, codewords=3, bias=True),
    "union": lambda: samplers.UnionSampler(samplers.UniformSampler(N, 4),
                                           samplers.UnigramSampler(COUNTS, 5, shared=False)),
    "unions of draws": lambda: samplers.UnionSampler(
        samplers.UniformSampler(N, 4, shared=False), samplers.UnigramSampler(
            COUNTS, 5, shared=False)),
    "complement": lambda: samplers.ComplementSampler(
        samplers.UnigramSampler(COUNTS, 8, shared=False), 4),
}
ESTIMATORS = [name for name in torch.ops.xsoftmax.estimator_names() if not name.startswith("cane")]
CORRECTS, KEEPS_DRAWS = ("ranking", "nce", "blackout"), ("ranking", "nce", "importance")


def batch(seed=0, dtype=torch.float64):
    """Some positives repeat, some places are padding, and one query has only padding, with values
    that must not matter."""
    made = torch.Generator().manual_seed(seed)
    target = torch.randint(N, (Q, T), generator=made)
    target[0, 1:], target[1,
                          0], target[2,
                                     2], target[3], target[4,
                                                           1] = PAD, PAD, target[2,
                                                                                 0], PAD, target[4,
                                                                                                 0]
    input = torch.randn(Q, D, generator=made, dtype=dtype)
    input[3] = math.nan
    return input.requires_grad_(), target


def scored(loss, input):
    """Scores of an ignored query, which may hold anything, are those of zeros."""
    return loss.linear(torch.where(input.isnan(), 0.0, input))


def positives_of(row):
    return sorted({y for y in row.tolist() if y != PAD}, reverse=True)


def exact_loss(scores, target, positives, weight):
    """Returns the loss of each query, and its weight in a mean."""
    losses, shares = [], []
    for s, row in zip(scores, target):
        ys = positives_of(row)
        others = torch.tensor([j for j in range(N) if j not in ys])
        if positives == "sum":
            losses.append(torch.logsumexp(s, 0) - torch.logsumexp(s[ys], 0) if ys else 0 * s[0])
            shares.append(float(bool(ys)))
        else:
            each = [
                weight[y] / len(ys) *
                (torch.logsumexp(s[torch.cat([torch.tensor([y]), others])], 0) - s[y]) for y in ys
            ]
            losses.append(sum(each) if ys else 0 * s[0])
            shares.append(sum(weight[y].item() for y in ys) / max(1, len(ys)))
    return torch.stack(losses), torch.tensor(shares, dtype=torch.float64)


def reduced(loss, shares, reduction):
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / shares.sum()}[reduction]


def gradients(loss, input, module):
    """Gradients of a sum with another factor for each query."""
    tables = [input, module.linear.weight
              ] + ([module.linear.bias] if module.linear.bias is not None else [])
    return [
        grad.to_dense() for grad in torch.autograd.grad((
            loss *
            torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view_as(loss)).sum(), tables)
    ]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positives, weighs", [("mean", False), ("mean", True), ("sum", False)])
def test_the_exact_loss_and_its_gradients(positives, weighs, bias, reduction):
    torch.manual_seed(1)
    weight = torch.linspace(0.5, 2, N, dtype=torch.float64) if weighs else None
    loss = xs.LinearCrossEntropyLoss(D, N, bias=bias, weight=weight, reduction=reduction,
                                     positives=positives, dtype=torch.float64)
    input, target = batch()
    want = reduced(
        *exact_loss(scored(loss, input), target, positives,
                    torch.ones(N, dtype=torch.float64) if weight is None else weight), reduction)
    got = loss(input, target)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for one, other in zip(gradients(got, input, loss), gradients(want, input, loss)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_positives_near_certainty():
    """The normaliser of the other classes is not computed by a subtraction, so it keeps its
    digits."""
    loss = xs.LinearCrossEntropyLoss(1, 4, positives="sum", reduction="none")
    with torch.no_grad():
        loss.linear.weight.copy_(torch.tensor([[30.0], [0.0], [30.0], [0.0]]))
    torch.testing.assert_close(loss(torch.ones(1, 1), torch.tensor([[0, 2]])),
                               torch.tensor([math.exp(-30.0)]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    torch.manual_seed(1)
    loss, exact = xs.LinearCrossEntropyLoss(D, N, dtype=dtype), xs.LinearCrossEntropyLoss(
        D, N, dtype=torch.float64)
    exact.load_state_dict(loss.state_dict())
    input, target = batch(dtype=dtype)
    got, want = loss(input, target), exact(input.double(), target)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=20 * torch.finfo(dtype).eps, atol=0)
    got.backward()
    assert loss.linear.weight.grad.dtype == dtype and input.grad.isfinite().all()


def left(sets, q, drop, others, renormalizes):
    """The candidates that query q sees: sets marked `drop` lose the ids in `drop`, and draws with
    replacement are those outside."""
    seen = []
    for number, one in enumerate(sets):
        ids = (one.ids if one.ids.dim() == 1 else one.ids[q]).tolist()
        counts = (one.log_count if one.log_count.dim() == 1 else one.log_count[q]).double()
        of_target = None if one.target_log_count is None else one.target_log_count[q].double()
        gone = drop(one)
        kept = [j for j, i in enumerate(ids) if counts[j] != math.inf and i not in gone]
        scale = 0.0
        if renormalizes and not one.distinct and gone:
            draws = sum(counts[j] != math.inf for j in range(len(ids)))
            expected = draws - sum(of_target[k].exp() for k in others)
            scale = math.log(len(kept) / expected) if kept and expected > 0 else 0.0
        seen.append((number, kept, [ids[j] for j in kept], counts[kept] + scale, of_target, scale))
    return seen


def of_rows(scores_of, sets, rows, estimator, removes):
    """The loss of each (score of the target, its id, its column, candidates), by the operator for
    one positive."""
    losses = []
    for score, y, column, seen in rows:
        order = sorted(range(len(sets)), key=lambda k: (not sets[k].distinct))
        row = torch.cat([score.reshape(1), *(scores_of(seen[k][2]) for k in order)])
        ids = [torch.tensor([seen[k][2]], dtype=torch.int64) for k in order]
        of_target = [
            None if seen[k][4] is None or column is None and estimator in CORRECTS else
            (seen[k][4][column or 0] + seen[k][5]).reshape(1) for k in order
        ]
        if column is None and estimator in CORRECTS:
            of_target = [torch.full((1,), -math.inf) for _ in order]  # the score is corrected
        losses.append(
            torch.ops.xsoftmax.candidate_loss(
                row[None], torch.tensor([y]), ids, [seen[k][3][None] for k in order], of_target,
                [sets[k].distinct for k in order],
                f"estimator={estimator},remove_accidental_hits={str(removes).lower()}")[0])
    return losses


def reference(loss, input, target, sets, positives, estimator, removes):
    draws = [one for one in sets if not one.distinct and one.ids.size(-1) > 0]
    result = []
    for q, row in enumerate(target):
        ys = positives_of(row)
        if not ys:
            result.append(torch.zeros((), dtype=torch.float64))
            continue
        scores = scored(loss, input[q])
        if positives == "mean":
            rows = []
            for t, y in enumerate(ys):
                others = [k for k in range(len(ys)) if k != t]
                gone = {ys[k] for k in others}
                rows.append((scores[y], y, t,
                             left(sets, q, lambda one, gone=gone: gone, others,
                                  len(draws) == 1)))
            result.append(
                sum(of_rows(lambda ids: scores[ids], sets, rows, estimator, removes)) / len(ys))
            continue
        present = {
            i
            for one in sets if one.distinct
            for i, c in zip((one.ids if one.ids.dim() == 1 else one.ids[q]).tolist(), (
                one.log_count if one.log_count.dim() == 1 else one.log_count[q]).tolist())
            if c != math.inf
        }
        t = next((k for k, y in enumerate(ys) if y in present), 0)
        others = [k for k in range(len(ys)) if k != t]
        gone = {ys[k] for k in others}
        count = torch.logsumexp(
            torch.stack([
                one.target_log_count[q].double() for one in sets if one.target_log_count is not None
            ]), 0)
        corrected = scores[ys] - (torch.where(count[:len(ys)] == -math.inf, 0.0, count[:len(ys)])
                                  if estimator in CORRECTS else 0.0)

        def drop(one):
            return gone if removes and estimator != "importance" and (
                one.distinct or estimator not in KEEPS_DRAWS) else set()

        column = None if estimator in CORRECTS else t
        result += of_rows(lambda ids: scores[ids], sets, [(torch.logsumexp(
            corrected, 0), ys[t], column, left(sets, q, drop, others,
                                               len(draws) == 1))], estimator, removes)
    return torch.stack(result)


@pytest.mark.parametrize("positives", ["mean", "sum"])
@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_sampled_loss_and_its_gradients(sampler, estimator, removes, positives):
    for head in (0, 4):
        torch.manual_seed(1)
        loss = xs.SampledSoftmaxLoss(D, N, sampler=SAMPLERS[sampler](), estimator=estimator,
                                     remove_accidental_hits=removes, positives=positives, bias=True,
                                     head_classes=head, reduction="none", dtype=torch.float64)
        input, target = batch()
        queries, counted = loss._prepare_sampling(input, target)
        loss.sampler.prepare(loss.linear.weight, loss.linear.bias)
        sets = loss.propose(queries, counted, torch.Generator().manual_seed(2))
        got, want = loss._loss(input, target, sets), reference(loss, input, target, sets, positives,
                                                               estimator, removes)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        for one, other in zip(gradients(got, input, loss), gradients(want, input, loss)):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("positives", ["mean", "sum"])
@pytest.mark.parametrize("sampler", [
    "uniform", "uniform independent", "uniform private", "unigram private", "union",
    "unions of draws"
])
def test_the_normaliser_excludes_the_positives(sampler, positives):
    """On average over draws. Class weights of 0 leave one positive in the mean."""
    torch.manual_seed(0)
    row, calls, queries = [20, 3, 11], 1, 6000
    if sampler in ("uniform", "uniform independent", "union"):  # with a part shared by the batch
        calls, queries = 3000, 1
    weight = None if positives == "sum" else torch.zeros(N, dtype=torch.float64).index_fill_(
        0, torch.tensor(row[:1]), len(row))
    loss = xs.SampledSoftmaxLoss(D, N, sampler=SAMPLERS[sampler](), weight=weight,
                                 positives=positives, reduction="none", estimator="sampled_softmax",
                                 dtype=torch.float64)
    input, target = torch.randn(1, D,
                                dtype=torch.float64).expand(queries,
                                                            D), torch.tensor([row
                                                                              ]).expand(queries, 3)
    with torch.no_grad():
        s = loss.linear(input[0]).exp()
        ours = s[row].sum() if positives == "sum" else s[row[0]]
        found = torch.cat([
            loss(input, target,
                 torch.Generator().manual_seed(seed)).exp() * ours - ours for seed in range(calls)
        ])
    want = s.sum() - s[row].sum()
    assert abs(found.mean() - want) < 4 * found.std() / len(found)**0.5 + 1e-9
    assert found.std() / len(found)**0.5 < 0.01 * want


def with_seed(call, *arguments):
    return call(*arguments, torch.Generator().manual_seed(3))


def test_one_positive_or_none():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=6, dtype=torch.float64)
    input, target = batch()
    for call in (loss, loss.exact):
        again = functools.partial(with_seed, call) if call is loss else call
        torch.testing.assert_close(again(input, target[:, :1]), again(input, target[:, 0]),
                                   rtol=1e-12, atol=0)
        assert again(input, target[:, :0]).isnan()  # a mean over no query is NaN
        assert again(input.view(3, 3, D), target.view(3, 3, T)) == again(input, target)


def test_padding_ids():
    """ignore_index may be a class id."""
    torch.manual_seed(0)
    loss = xs.LinearCrossEntropyLoss(D, N, ignore_index=0, dtype=torch.float64)
    input, target = batch()
    other = torch.where(target == PAD, 0, target.clamp_min(1))
    loss_of_pads = xs.LinearCrossEntropyLoss.from_linear(loss.linear)
    torch.testing.assert_close(loss(input, other),
                               loss_of_pads(input, torch.where(other == 0, PAD, other)))


@pytest.mark.parametrize("make", [
    lambda: xs.CaneLoss(D, N, candidates=6, num_noises=3, dtype=torch.float64, reduction="none"),
    lambda: xs.CaneLoss(D, N, num_noises=2, noise_reduction="log_of_mean", dtype=torch.float64,
                        reduction="none")
])
def test_cane(make):
    """Each positive is a query without the other positives, and no noise is another positive."""
    torch.manual_seed(0)
    loss, (input, target) = make(), batch()
    candidates = () if loss.candidates is not None else (torch.arange(6),)
    got = loss(input, target, *candidates)
    assert got.shape == (Q,) and got.isfinite().all() and got[3] == 0
    got.sum().backward()
    assert input.grad[3].eq(0).all() and input.grad.isfinite().all()


def test_scripted_and_traced():
    torch.manual_seed(0)
    loss, (input, target) = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=6,
                                                  positives="sum", dtype=torch.float64), batch()
    scripted = torch.jit.script(loss)
    for module in (loss, scripted):
        torch.manual_seed(3)
        module.train()
        first = module(input, target)
        torch.manual_seed(3)
        torch.testing.assert_close(loss.train()(input, target), first)
        torch.testing.assert_close(module.eval()(input, target), loss.eval()(input, target))
    torch.manual_seed(3)
    compiled = torch.compile(loss.train(), backend="aot_eager", fullgraph=True)(input, target)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled, loss(input, target))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(together, bias):
    torch.manual_seed(0)
    input, weight = torch.randn(Q, D, dtype=torch.float64,
                                requires_grad=True), torch.randn(N, D, dtype=torch.float64,
                                                                 requires_grad=True)
    shares = torch.rand(Q, 1 if together else T, dtype=torch.float64)
    positives = torch.stack([torch.randperm(N)[:T] for _ in range(Q)]).sort(1,
                                                                            descending=True).values
    positives[2, 2:], positives[5], shares[5] = -1, -1, 0
    if not together:
        shares[2, 2:] = 0
    table = torch.randn(N, dtype=torch.float64, requires_grad=True) if bias else None
    options = "softcap=2.0,z_loss=0.1,positives=" + ("sum" if together else "mean")
    torch.library.opcheck(torch.ops.xsoftmax.positives_cross_entropy.default,
                          (input, weight, table, positives, shares, options))
    torch.autograd.gradcheck(
        lambda *a: torch.ops.xsoftmax.positives_cross_entropy(*a[:2], a[2] if bias else None,
                                                              positives, shares, options),
        (input, weight) + ((table,) if bias else ()))


def test_blocks_of_queries():
    """More logits than a block holds give the losses of query by query."""
    torch.manual_seed(0)
    loss = xs.LinearCrossEntropyLoss(3, 60_000, reduction="sum")
    input, target = torch.randn(500, 3), torch.randint(60_000, (500, 2))
    want = sum(loss(input[q:q + 1], target[q:q + 1]) for q in range(500))
    got = loss(input, target)
    torch.testing.assert_close(got, want)
    for one, other in zip(torch.autograd.grad(got, loss.linear.weight),
                          torch.autograd.grad(want, loss.linear.weight)):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_any_number_of_threads_gives_the_same_bits(same_for_any_threads):
    torch.manual_seed(0)
    loss, (input, target) = xs.SampledSoftmaxLoss(D, N, sampler="uniform",
                                                  num_samples=6), batch(dtype=torch.float32)

    def compute():
        values = [loss(input, target, torch.Generator().manual_seed(1)), loss.exact(input, target)]
        return [
            *values, *(g.to_dense() for value in values
                       for g in torch.autograd.grad(value, [loss.linear.weight]))
        ]

    same_for_any_threads(compute)


@pytest.mark.parametrize("width, classes, queries", [(8, 9000, 30), (384, 9000, 300), (8, 40, 500)])
def test_long_sums_have_the_same_bits_for_any_number_of_threads(same_for_any_threads, width,
                                                                classes, queries):
    """Many features, classes and queries: sums long enough for MKL to split by threads."""
    torch.manual_seed(0)
    loss, input, target = xs.LinearCrossEntropyLoss(width, classes), torch.randn(
        queries, width, requires_grad=True), torch.randint(classes, (queries, 3))

    def compute():
        value = loss(input, target)
        return [value, *torch.autograd.grad(value, [input, loss.linear.weight])]

    same_for_any_threads(compute)


def test_bad_input():
    input, target = torch.randn(Q, D), torch.zeros(Q, T, dtype=torch.int64)
    for make in (lambda **o: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=6, **o),
                 lambda **o: xs.LinearCrossEntropyLoss(D, N, **o)):
        with pytest.raises(ValueError, match="expected positives to be \"mean\" or \"sum\", got "
                           "'max'"):
            make(positives="max")
        with pytest.raises(ValueError, match="for several positives, got"):
            make()(input, target[1:])
        with pytest.raises(IndexError, match=rf"expected target in \[0, {N}\)"):
            make()(input, target + N)
        with pytest.raises(
                ValueError, match=rf"T below the number of classes, got shape \[{Q}, "
                rf"{N}\], a number for each class as one-hot targets "
                r"have"):
            make()(input, torch.nn.functional.one_hot(target[:, 0], N))
        with pytest.raises(ValueError, match="label_smoothing"):
            make(label_smoothing=0.1)(input, target)
        with pytest.raises(ValueError, match="no class weights with positives=\"sum\""):
            make(positives="sum", weight=torch.ones(N))(input, target)
    with pytest.raises(ValueError, match="expected positives=\"mean\" with estimator \"cane\""):
        xs.CaneLoss(D, N, candidates=6, positives="sum")(input, target)
