"""candidate_loss against its formula, one query and one candidate at a time."""

import itertools
import math
from typing import Optional

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from set_checks import columns, split

ops = torch.ops.xsoftmax
INF = float("inf")
TOLERANCE = {torch.float32: dict(rtol=2e-5, atol=2e-6), torch.float64: dict(rtol=1e-12, atol=1e-13)}


def candidate_loss(scores, target, **arguments):
    sets, options = split(arguments)
    return ops.candidate_loss(scores, target, *sets, options)


def candidate_loss_backward(grad, scores, target, **arguments):
    return ops.estimator_loss_backward(grad, scores, target, *columns(**arguments))


def log_sigmoid(x):
    return -torch.log1p((-x).exp())


def nce(own, adjusted, scores, weights):
    return -log_sigmoid(own) - sum((log_sigmoid(-a) for a in adjusted), torch.zeros((), dtype=torch.float64))


def one_vs_each(own, adjusted, scores, weights):
    return -sum((w * log_sigmoid(own - s) for s, w in zip(scores, weights)), torch.zeros((), dtype=torch.float64)) + 0 * own


def blackout(own, adjusted, scores, weights):
    p = torch.stack([own, *adjusted]).softmax(0)
    return -p[0].log() - (1 - p[1:]).log().sum()


def importance(own, adjusted, scores, weights):
    return torch.logsumexp(torch.stack(adjusted), 0) - own if adjusted else 0 * own


# From the target's score (corrected where the estimator does), the candidates' adjusted scores, their scores and their weights.
RIVALS = {"nce": nce, "negative_sampling": lambda own, adjusted, scores, weights: nce(own, scores, scores, weights),
          "one_vs_each": one_vs_each, "blackout": blackout, "importance": importance}
CANE = ("cane", "cane_log_of_mean")
COUNTING = ("ranking", "nce", "blackout", *CANE)  # need target_log_count
SMOOTHING = ("sampled_softmax", "ranking")  # have a form with label smoothing
every_estimator = pytest.mark.parametrize("estimator", [*SMOOTHING, *RIVALS, *CANE])


def cane(estimator, score, target_log_count, candidates, live, target):
    """score: of the target; candidates: all, as in naive."""
    draws = sum(c[3] and c[2] != INF for c in candidates)
    log_draws = math.log(draws) if draws else 0.0
    distinct = [c[1] - c[2] for c in live if not c[3]]
    noise = [c[1] - c[2] + log_draws for c in live if c[3]]
    if any(c[0] == target and not c[3] and c[2] != INF for c in candidates):
        a = torch.logsumexp(torch.stack([score, *distinct]), 0)
        if estimator == "cane":
            logs = [torch.logsumexp(torch.stack([a, m]), 0) for m in noise]
            return (sum(logs) / draws if draws else a) - score
        return torch.logsumexp(torch.stack([a, *(m - log_draws for m in noise)]), 0) - score
    if estimator == "cane":
        others, count = [], target_log_count - log_draws
    else:  # in the place of the first draw
        first = next((i for i, c in enumerate(candidates) if c[3] and c[2] != INF), None)
        others, count = [c[1] - c[2] for i, c in enumerate(candidates) if c in live and c[3] and i != first], target_log_count
    own = score - (0.0 if target_log_count == -INF else count)
    return torch.logsumexp(torch.stack([own, *distinct, *others]), 0) - score


def naive(scores, target, private_ids=None, shared_ids=None, private_log_count=None, shared_log_count=None, target_log_count=None,
          estimator="sampled_softmax", remove_accidental_hits=True, distinct_private=0, distinct_shared=0, label_smoothing=0.0):
    """In double and differentiable; what takes no part is left out, not masked."""
    losses = []
    for q in range(len(target)):
        candidates = []  # id, score, log count, independent
        sets = ((None if private_ids is None else private_ids[q], None if private_log_count is None else private_log_count[q],
                 distinct_private), (shared_ids, shared_log_count, distinct_shared))
        for ids, counts, fixed in sets:
            for j in range(0 if ids is None else len(ids)):
                count = 0.0 if counts is None else counts[j].double().item()
                candidates.append((ids[j].item(), scores[q, 1 + len(candidates)].double(), count, j >= fixed))
        own = scores[q, 0].double()
        if estimator in ("ranking", "nce", "blackout"):
            own = own - target_log_count[q].double()
        remove = remove_accidental_hits and estimator != "importance"
        stays = estimator in ("ranking", "nce", *CANE)  # a hit among independent draws
        live = [c for c in candidates if c[2] != INF and not (remove and c[0] == target[q] and not (stays and c[3]))]
        if estimator == "ranking" and distinct_private + distinct_shared > 0:  # a target outside the fixed sets stands for the first draw
            covered = any(c[0] == target[q] and c[2] != INF and not c[3] for c in candidates)
            first = next((c for c in candidates if c[3] and c[2] != INF), None)
            live = [c for c in live if covered or c is not first]
        M, m = (sum(c[3] and c[2] != INF for c in part) for part in (candidates, live))
        factor = 0.0
        drawn_sets = sum(ids is not None and len(ids) > fixed for ids, _, fixed in sets)  # of several no one q is renormalised
        if estimator in ("sampled_softmax", "one_vs_each") and remove_accidental_hits and target_log_count is not None and m > 0 and drawn_sets == 1:
            left = M - math.exp(target_log_count[q].item())
            factor = math.log(left / m) if left > 0 else -INF
        if estimator in CANE:
            losses.append(cane(estimator, own, target_log_count[q].double(), candidates, live, target[q].item()))
            continue
        terms, weights = [own], [1.0]
        for _, score, count, independent in live:
            terms.append(score - count + (factor if independent else 0.0))
            weights.append(math.exp(-count + (factor if independent else 0.0)))
        if estimator in RIVALS:
            losses.append(RIVALS[estimator](own, terms[1:], [c[1] for c in live], weights[1:]))
            continue
        normalizer = torch.logsumexp(torch.stack(terms), 0)
        mean = sum(w * s for w, s in zip(weights, [own] + [c[1] for c in live])) / sum(weights)
        losses.append((1 - label_smoothing) * (normalizer - own) + label_smoothing * (normalizer - mean))
    return torch.stack(losses)


LAYOUTS = {"private": (5, None), "shared": (None, 6), "both": (5, 6)}


def problem(layout="both", Q=7, N=4, dtype=torch.float32, counts=True, seed=0):
    """Few classes, so that most queries have hits, repeated ones and in both sets."""
    P, S = LAYOUTS[layout]
    g = torch.Generator().manual_seed(seed)
    arguments = dict(scores=torch.randn(Q, 1 + (P or 0) + (S or 0), generator=g, dtype=torch.float64).to(dtype) * 2,
                     target=torch.randint(N, (Q,), generator=g))
    if P is not None:
        arguments["private_ids"] = torch.randint(N, (Q, P), generator=g)
    if S is not None:
        arguments["shared_ids"] = torch.randint(N, (S,), generator=g)
    if counts:
        for name in ("private", "shared"):
            if name + "_ids" in arguments:
                arguments[name + "_log_count"] = torch.randn(arguments[name + "_ids"].shape, generator=g)
        arguments["target_log_count"] = torch.rand(Q, generator=g)
    return arguments


def loss_and_gradient(function, arguments, **changes):
    arguments = arguments | changes
    scores = arguments.pop("scores").detach().requires_grad_()
    loss = function(scores, **arguments)
    loss.backward(torch.linspace(0.5, 2.0, len(loss), dtype=loss.dtype))
    return loss.detach(), scores.grad


def assert_same(got, want, dtype):
    assert got[0].dtype == dtype
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b.to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("remove", [True, False])
@every_estimator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_formula(impl, layout, estimator, remove, dtype):
    """No, some and all candidates fixed; with and without label smoothing, log counts of +inf and a target that is never drawn."""
    arguments = problem(layout, dtype=dtype)
    own, shared = arguments.get("private_ids"), arguments.get("shared_ids")
    assert any((ids == arguments["target"].unsqueeze(-1)).any() for ids in (own, shared) if ids is not None)
    variants = [arguments]
    absent = {name: count.clone() for name, count in arguments.items() if name in ("private_log_count", "shared_log_count")}
    for count in absent.values():
        count[..., 1], count[..., -1] = INF, INF
    variants.append(arguments | absent)
    if estimator not in COUNTING:
        never = arguments["target_log_count"].clone()
        never[::2] = -INF
        variants += [arguments | dict(target_log_count=never), arguments | dict(target_log_count=None)]
        variants.append({k: v for k, v in arguments.items() if "count" not in k})
    for variant, fixed, label_smoothing in itertools.product(variants, (0, 2, None), (0.0, 0.2, 1.0) if estimator in SMOOTHING else (0.0,)):
        options = dict(estimator=estimator, remove_accidental_hits=remove, label_smoothing=label_smoothing,
                       distinct_private=0 if own is None else own.size(1) if fixed is None else fixed,
                       distinct_shared=0 if shared is None else len(shared) if fixed is None else fixed)
        assert_same(loss_and_gradient(candidate_loss, variant, **options), loss_and_gradient(naive, variant, **options), dtype)


@every_estimator
def test_equals_the_formula_on_many_queries(impl, estimator):
    """Enough scores for several threads, and rows past the width of a vector."""
    g = torch.Generator().manual_seed(0)
    Q, P, S = 60, 300, 77
    arguments = dict(scores=torch.randn(Q, 1 + P + S, generator=g), target=torch.randint(400, (Q,), generator=g),
                     private_ids=torch.randint(400, (Q, P), generator=g), shared_ids=torch.randint(400, (S,), generator=g),
                     private_log_count=torch.randn(Q, P, generator=g), shared_log_count=torch.randn(S, generator=g),
                     target_log_count=torch.rand(Q, generator=g), distinct_shared=13, estimator=estimator,
                     label_smoothing=0.1 if estimator in SMOOTHING else 0.0)
    some = torch.tensor([0, 1, 20, 21, 22, 43, 59])  # beside the borders of tasks, too
    rows = {name: value[some] if isinstance(value, torch.Tensor) and len(value) == Q else value for name, value in arguments.items()}
    loss, grad = candidate_loss(**arguments | dict(scores=arguments["scores"].requires_grad_())), arguments["scores"]
    (grad,) = torch.autograd.grad(loss.sum(), grad)
    scores = rows["scores"].detach().requires_grad_()
    want = naive(**rows | dict(scores=scores))
    assert_same((loss[some], grad[some]), (want, torch.autograd.grad(want.sum(), scores)[0]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_log_counts_of_any_floating_dtype(impl, dtype):
    arguments = problem()
    counts = {name: value.to(dtype) for name, value in arguments.items() if "count" in name}
    got = loss_and_gradient(candidate_loss, arguments | counts)
    assert_same(got, loss_and_gradient(naive, arguments | counts), torch.float32)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_no_live_candidate(impl, estimator, label_smoothing):
    """m = 0, for each reason: no candidates, hits only, infinite counts only. Loss and gradient are zero, not NaN."""
    target = torch.tensor([2, 2])
    options = dict(estimator=estimator, label_smoothing=label_smoothing, target_log_count=torch.tensor([0.1, 0.3]))
    cases = [dict(scores=torch.randn(2, 1), private_ids=torch.zeros(2, 0, dtype=torch.int64)),
             dict(scores=torch.randn(2, 1), shared_ids=torch.zeros(0, dtype=torch.int64)),
             dict(scores=torch.randn(2, 6), private_ids=torch.full((2, 2), 2), shared_ids=torch.full((3,), 2),
                  **(dict(distinct_private=2, distinct_shared=3) if estimator == "ranking" else {})),
             dict(scores=torch.randn(2, 4), shared_ids=torch.arange(3), shared_log_count=torch.full((3,), INF)),
             dict(scores=torch.randn(2, 4), shared_ids=torch.full((3,), 2), distinct_shared=3)]
    for case in cases:
        loss, grad = loss_and_gradient(candidate_loss, case | options, target=target)
        torch.testing.assert_close(loss, torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-6, rtol=0)


@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_no_draws_and_no_count(impl, estimator):
    """num_samples = 0 makes every log count -inf, the target's too: still no candidate, so still zero."""
    loss, grad = loss_and_gradient(candidate_loss, dict(
        scores=torch.randn(2, 1), target=torch.tensor([2, 2]), shared_ids=torch.zeros(0, dtype=torch.int64),
        target_log_count=torch.full((2,), -INF), estimator=estimator))
    assert loss.eq(0).all() and grad.eq(0).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_zero_gradient_rows_are_exactly_zero(impl, value, label_smoothing):
    """An ignored query must not poison the table, whatever its scores are."""
    arguments = problem()
    arguments["scores"][1] = value
    arguments["scores"][3, 4] = value
    grad_loss = torch.ones(7)
    grad_loss[[1, 3]] = 0
    grad = candidate_loss_backward(grad_loss, **arguments, label_smoothing=label_smoothing)
    assert grad[[1, 3]].eq(0).all() and grad[[0, 2, 4, 5, 6]].isfinite().all() and grad[0].ne(0).any()


def test_what_takes_no_part_may_be_anything(impl):
    """The scores of hits, and of candidates of infinite count, do not matter, even NaN ones."""
    arguments = problem("shared")
    arguments["shared_log_count"][2] = INF
    want = loss_and_gradient(candidate_loss, arguments)
    for value in (float("nan"), INF, -INF, 7.0):
        scores = arguments["scores"].clone()
        scores[:, 1:][arguments["shared_ids"] == arguments["target"][:, None]] = value
        scores[:, 3] = value
        assert not torch.equal(scores.nan_to_num(), arguments["scores"])
        loss, grad = loss_and_gradient(candidate_loss, arguments, scores=scores)
        assert torch.equal(loss, want[0])
        assert torch.equal(grad, want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_extreme_scores(impl, dtype, label_smoothing):
    """Scores of +-1e4: no overflow, whichever class is ahead."""
    for shift, scale in itertools.product((-1e4, 0.0, 1e4), (1.0, 1e4)):
        arguments = problem(dtype=dtype)
        arguments["scores"] = arguments["scores"] * scale + shift
        loss, grad = loss_and_gradient(candidate_loss, arguments, label_smoothing=label_smoothing)
        want = loss_and_gradient(naive, arguments, label_smoothing=label_smoothing)
        digits = 1e4 * torch.finfo(dtype).eps * 8
        assert loss.isfinite().all() and grad.isfinite().all()
        # What rounding leaves of the weights of the mean score meets the spread of the scores.
        spread = arguments["scores"].max() - arguments["scores"].min() if label_smoothing else 1.0
        torch.testing.assert_close(loss, want[0].to(dtype), rtol=1e-5, atol=float(digits * spread))
        torch.testing.assert_close(grad, want[1], rtol=1e-2, atol=digits)


@pytest.mark.parametrize("dtype, depth", [(torch.float32, 80.0), (torch.float64, 600.0)], ids=str)
def test_small_probabilities_keep_their_digits(impl, dtype, depth):
    """Far below the best score, too: the exponential is right to the last places."""
    scores = -torch.rand(1, 4096, dtype=dtype, generator=torch.Generator().manual_seed(0)) * depth
    scores[0, 0] = 0
    want = scores.double().softmax(1)[0, 1:]
    _, grad = loss_and_gradient(candidate_loss, dict(scores=scores, target=torch.zeros(1, dtype=torch.int64), shared_ids=torch.arange(1, 4096)))
    torch.testing.assert_close(2 * grad[0, 1:].double(), want, rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
@pytest.mark.parametrize("column", [0, 2, 9])
def test_scores_that_are_not_finite(impl, column, value):
    """As in cross entropy over the same logits: a candidate of -inf has no probability, what is undefined is not hidden."""
    arguments = problem(counts=False) | dict(remove_accidental_hits=False)
    arguments["scores"][2, column] = value
    got = loss_and_gradient(candidate_loss, arguments)
    want = loss_and_gradient(lambda scores, target, **_: F.cross_entropy(scores, torch.zeros_like(target), reduction="none"), arguments)
    for a, b in zip(got, want):
        assert torch.equal(a.isfinite(), b.isfinite())
        torch.testing.assert_close(a[b.isfinite()], b[b.isfinite()])


def test_every_logit_is_minus_infinity(impl):
    """Undefined, as in cross entropy, and no other query is touched."""
    arguments = problem(counts=False)
    arguments["scores"][2] = -INF
    loss = candidate_loss(**arguments)
    assert loss[2].isnan() and loss[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_strided(impl):
    arguments = problem()
    want = loss_and_gradient(candidate_loss, arguments)
    moved = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in arguments.items()}
    moved["private_ids"] = arguments["private_ids"].t().contiguous().t()
    moved["scores"] = arguments["scores"].t().contiguous().t()
    assert not any(t.is_contiguous() for t in moved.values())
    assert_same(loss_and_gradient(candidate_loss, moved), want, torch.float32)
    got = candidate_loss_backward(torch.ones(1).expand(7), **moved)
    torch.testing.assert_close(got, candidate_loss_backward(torch.ones(7), **arguments))


def test_shapes(impl):
    """No queries; one class."""
    loss, grad = loss_and_gradient(candidate_loss, problem(Q=0))
    assert loss.shape == (0,) and grad.shape == (0, 12)
    one = problem(N=1)
    assert loss_and_gradient(candidate_loss, one)[0].eq(0).all()
    one["remove_accidental_hits"] = False
    assert_same(loss_and_gradient(candidate_loss, one), loss_and_gradient(naive, one), torch.float32)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@every_estimator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(impl, layout, estimator, label_smoothing):
    if estimator not in SMOOTHING and label_smoothing:
        pytest.skip("has no form with label smoothing")
    arguments = problem(layout, Q=3, dtype=torch.float64)
    scores = arguments.pop("scores").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: candidate_loss(s, **arguments, estimator=estimator, label_smoothing=label_smoothing), scores)


def extreme(estimator, dtype):
    """Scores far apart: the best candidate, or the target, has all of the softmax."""
    scores = torch.tensor([[0.0, 90, -90, 1], [90, 0, -90, 1], [-90, 89, 88, 0]], dtype=dtype)
    return dict(scores=scores, target=torch.full((3,), 9), shared_ids=torch.arange(3), target_log_count=torch.zeros(3), estimator=estimator)


@every_estimator
def test_scores_far_apart(impl, estimator):
    want = loss_and_gradient(candidate_loss, extreme(estimator, torch.float64))
    got = loss_and_gradient(candidate_loss, extreme(estimator, torch.float32))
    assert all(part.isfinite().all() for part in (*want, *got))
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_no_second_derivative(impl):
    arguments = problem()
    scores = arguments.pop("scores").requires_grad_()
    (grad,) = torch.autograd.grad(candidate_loss(scores, **arguments).sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


def test_impl_may_change_before_backward():
    """Nothing but the scores is kept."""
    arguments = problem()
    scores = arguments.pop("scores").requires_grad_()
    with xs.use_impl("reference"):
        loss = candidate_loss(scores, **arguments).sum()
    (grad,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(grad, loss_and_gradient(naive, arguments | dict(scores=scores))[1] / torch.linspace(0.5, 2.0, 7)[:, None])


def test_threads_give_the_same_bits(same_for_any_threads):
    g = torch.Generator().manual_seed(0)
    arguments = dict(scores=torch.randn(500, 101, generator=g), target=torch.randint(50, (500,), generator=g),
                     shared_ids=torch.randint(50, (100,), generator=g), target_log_count=torch.rand(500, generator=g))
    same_for_any_threads(lambda: loss_and_gradient(candidate_loss, arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout, dtype):
    arguments = problem(layout, dtype=dtype)
    scores, target = arguments.pop("scores"), arguments.pop("target")
    for options in (dict(estimator="sampled_softmax"), dict(estimator="ranking", remove_accidental_hits=False, label_smoothing=0.2)):
        lists = columns(**arguments, **options)
        torch.library.opcheck(ops.estimator_loss_backward.default, (torch.ones(7, dtype=dtype), scores, target, *lists))
        torch.library.opcheck(ops.estimator_loss.default, (scores.clone().requires_grad_(), target, *lists))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def step(scores, **arguments):
        return candidate_loss(scores * 2, **arguments, label_smoothing=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seed in (0, 1):
        assert_same(loss_and_gradient(compiled, problem(seed=seed)), loss_and_gradient(step, problem(seed=seed)), torch.float32)


def test_export():
    class Loss(torch.nn.Module):
        def forward(self, scores, target, shared_ids, shared_log_count, target_log_count):
            return ops.candidate_loss(scores, target, [shared_ids], [shared_log_count], [target_log_count], [False])

    Q = torch.export.Dim("Q")
    arguments = problem("shared")
    program = torch.export.export(Loss(), tuple(arguments.values()), dynamic_shapes=({0: Q}, {0: Q}, None, None, {0: Q}))
    arguments = problem("shared", Q=11)
    assert torch.equal(program.module()(*arguments.values()), candidate_loss(**arguments))


def test_torchscript():
    @torch.jit.script
    def loss(scores: torch.Tensor, target: torch.Tensor, shared_ids: torch.Tensor):
        none: Optional[torch.Tensor] = None
        counts = [none]
        return torch.ops.xsoftmax.candidate_loss(scores, target, [shared_ids], [torch.zeros(shared_ids.shape)], counts, [False],
                                                 "label_smoothing=0.1")

    arguments = problem("shared", counts=False)
    assert_same(loss_and_gradient(loss, arguments), loss_and_gradient(naive, arguments, label_smoothing=0.1), torch.float32)


def test_autocast():
    """Scores of any floating dtype, the loss in float32."""
    arguments = problem()
    low = arguments["scores"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss = candidate_loss(**arguments | dict(scores=low))
    assert loss.dtype == torch.float32 and torch.equal(loss, candidate_loss(**arguments | dict(scores=low.float())))


@pytest.mark.parametrize("change, error, message", [
    (dict(scores=torch.zeros(2)), ValueError, "expected scores with 2 dimensions"),
    (dict(scores=torch.zeros(2, 7)), ValueError,
     r"expected scores with size 6 \(the target, then the private, then the shared candidates\)"),
    (dict(scores=torch.zeros(2, 6, dtype=torch.bfloat16)), TypeError, "expected scores of dtype float32 or float64, got bfloat16"),
    (dict(scores=torch.zeros(2, 6, dtype=torch.complex64)), TypeError, "expected scores of dtype float32 or float64, got complex64"),
    (dict(target=torch.zeros(3, dtype=torch.int64)), ValueError, r"expected target with size 2 \(the rows of scores\)"),
    (dict(target=torch.zeros(2, 1, dtype=torch.int64)), ValueError, "expected target with 1 dimension,"),
    (dict(target=torch.zeros(2)), TypeError, "expected target of dtype int64, got float32"),
    (dict(target=torch.zeros(2, dtype=torch.int64, device="meta")), TypeError, "expected target on scores's device cpu, got meta"),
    (dict(private_ids=torch.zeros(3, 2, dtype=torch.int64)), ValueError, "expected private_ids with size 2"),
    (dict(private_ids=torch.zeros(2, 2, dtype=torch.int32)), TypeError, "expected ids of a set of dtype int64, got int32"),
    (dict(shared_ids=torch.zeros(1, 1, 3, dtype=torch.int64)), ValueError, r"expected ids of a set of shape \[M\], or \[Q, M\], got"),
    (dict(shared_ids=torch.zeros(3, dtype=torch.int64, device="meta")), TypeError, "expected shared_ids on scores's device cpu"),
    (dict(private_log_count=torch.zeros(2, 3)), ValueError, "expected log_count of a set of the shape of its ids"),
    (dict(shared_log_count=torch.zeros(2)), ValueError, "expected log_count of a set of the shape of its ids"),
    (dict(shared_log_count=torch.zeros(3, dtype=torch.int64)), TypeError, "expected log_count of a set of dtype float32"),
    (dict(shared_log_count=torch.zeros(3, device="meta")), TypeError, "expected shared_log_count on scores's device cpu"),
    (dict(scores=torch.zeros(2, 4), private_ids=None, target_log_count=torch.zeros(3)), ValueError, "expected target_log_count with size 2"),
    (dict(scores=torch.zeros(2, 4), private_ids=None, target_log_count=torch.zeros(2, dtype=torch.int64)), TypeError,
     "expected target_log_count of a set of dtype float32"),
    (dict(estimator="nce2"), ValueError, 'expected estimator to be one of "sampled_softmax", "ranking", .*got "nce2"'),
    (dict(estimator="blackout"), ValueError, 'expected target_log_count of the sets that are drawn, for estimator "blackout", got none'),
    (dict(estimator="one_vs_each", label_smoothing=0.1), ValueError, 'expected label_smoothing=0 for estimator "one_vs_each", got 0.1'),
    (dict(label_smoothing=1.5), ValueError, r"expected label_smoothing in \[0, 1\], got 1.5"),
    (dict(label_smoothing=float("nan")), ValueError, r"expected label_smoothing in \[0, 1\], got nan"),
    (dict(reduction="mean"), ValueError, "expected options among estimator, remove_accidental_hits, label_smoothing|reduction"),
])
def test_bad_inputs(impl, change, error, message):
    arguments = dict(scores=torch.zeros(2, 6), target=torch.zeros(2, dtype=torch.int64),
                     private_ids=torch.zeros(2, 2, dtype=torch.int64), shared_ids=torch.zeros(3, dtype=torch.int64)) | change
    with pytest.raises(error, match="candidate_loss: " + message):
        candidate_loss(**arguments)


def test_sets_and_lists_that_do_not_fit():
    scores, target, ids = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="with an entry for each set, got 1, 1, 0 and 1"):
        ops.candidate_loss(scores, target, [ids], [torch.zeros(3)], [], [False])
    private = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected sets in the order of the columns of scores"):
        ops.candidate_loss(scores, target, [ids, private], [torch.zeros(3), torch.zeros(2, 2)], [None, None], [False, False])


@pytest.mark.parametrize("grad", [torch.ones(3), torch.ones(2, 1)])
def test_gradient_of_the_wrong_shape(impl, grad):
    """Read past its end otherwise."""
    with pytest.raises(ValueError, match="grad"):
        candidate_loss_backward(grad, torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), shared_ids=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_shared_counts_by_query(smoothing):
    """shared_log_count [Q, S]: as the same candidates given privately; and equal rows are as [S]."""
    torch.manual_seed(0)
    q, s = 5, 7
    scores, target, ids = torch.randn(q, 1 + s), torch.randint(20, (q,)), torch.randint(20, (s,))
    count, of_target = torch.randn(q, s), -torch.rand(q)
    options = dict(target_log_count=of_target, label_smoothing=smoothing)
    for impl in ("kernel", "reference"):
        with xs.use_impl(impl):
            got = candidate_loss(scores, target, shared_ids=ids, shared_log_count=count, **options)
            private = candidate_loss(scores, target, private_ids=ids.expand(q, s).contiguous(), private_log_count=count, **options)
            torch.testing.assert_close(got, private)
            torch.testing.assert_close(candidate_loss(scores, target, shared_ids=ids, shared_log_count=count[:1].expand(q, s), **options),
                                       candidate_loss(scores, target, shared_ids=ids, shared_log_count=count[0], **options))
    with pytest.raises(ValueError, match="shared_log_count of the shape of shared_ids, or with a row for each query"):
        candidate_loss(scores, target, shared_ids=ids, shared_log_count=count[:3], **options)
