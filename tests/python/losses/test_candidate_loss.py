"""candidate_loss against its formula, one query and one candidate at a time."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from candidate_loss_checks import (COUNTING, INF, LAYOUTS, SMOOTHING, assert_same, candidate_loss,
                                   candidate_loss_backward, every_estimator, loss_and_gradient,
                                   naive, problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("remove", [True, False])
@every_estimator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_formula(impl, layout, estimator, remove, dtype):
    """With no, some and all candidates fixed, with and without label smoothing, with infinite log
    counts and with a target that is never drawn."""
    arguments = problem(layout, dtype=dtype)
    own, shared = arguments.get("private_ids"), arguments.get("shared_ids")
    assert any((ids == arguments["target"].unsqueeze(-1)).any()
               for ids in (own, shared) if ids is not None)
    variants = [arguments]
    absent = {
        name: count.clone()
        for name, count in arguments.items() if name in ("private_log_count", "shared_log_count")
    }
    for count in absent.values():
        count[..., 1], count[..., -1] = INF, INF
    variants.append(arguments | absent)
    if estimator not in COUNTING:
        never = arguments["target_log_count"].clone()
        never[::2] = -INF
        variants += [
            arguments | dict(target_log_count=never), arguments | dict(target_log_count=None)
        ]
        variants.append({k: v for k, v in arguments.items() if "count" not in k})
    for variant, fixed, label_smoothing in itertools.product(variants, (0, 2, None),
                                                             (0.0, 0.2,
                                                              1.0) if estimator in SMOOTHING else
                                                             (0.0,)):
        options = dict(
            estimator=estimator, remove_accidental_hits=remove, label_smoothing=label_smoothing,
            distinct_private=0 if own is None else own.size(1) if fixed is None else fixed,
            distinct_shared=0 if shared is None else len(shared) if fixed is None else fixed)
        assert_same(loss_and_gradient(candidate_loss, variant, **options),
                    loss_and_gradient(naive, variant, **options), dtype)


@every_estimator
def test_equals_the_formula_on_many_queries(impl, estimator):
    """Enough scores for several threads, and rows longer than a SIMD vector."""
    g = torch.Generator().manual_seed(0)
    Q, P, S = 60, 300, 77
    arguments = dict(scores=torch.randn(Q, 1 + P + S,
                                        generator=g), target=torch.randint(400, (Q,), generator=g),
                     private_ids=torch.randint(400, (Q, P), generator=g), shared_ids=torch.randint(
                         400, (S,), generator=g), private_log_count=torch.randn(Q, P, generator=g),
                     shared_log_count=torch.randn(S, generator=g),
                     target_log_count=torch.rand(Q, generator=g), distinct_shared=13,
                     estimator=estimator, label_smoothing=0.1 if estimator in SMOOTHING else 0.0)
    some = torch.tensor([0, 1, 20, 21, 22, 43, 59])  # also next to the borders of tasks
    rows = {
        name: value[some] if isinstance(value, torch.Tensor) and len(value) == Q else value
        for name, value in arguments.items()
    }
    loss, grad = candidate_loss(
        **arguments | dict(scores=arguments["scores"].requires_grad_())), arguments["scores"]
    (grad,) = torch.autograd.grad(loss.sum(), grad)
    scores = rows["scores"].detach().requires_grad_()
    want = naive(**rows | dict(scores=scores))
    assert_same((loss[some], grad[some]), (want, torch.autograd.grad(want.sum(), scores)[0]),
                torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_log_counts_of_any_floating_dtype(impl, dtype):
    arguments = problem()
    counts = {name: value.to(dtype) for name, value in arguments.items() if "count" in name}
    got = loss_and_gradient(candidate_loss, arguments | counts)
    assert_same(got, loss_and_gradient(naive, arguments | counts), torch.float32)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_without_candidates_the_loss_is_zero(impl, estimator, label_smoothing):
    """No candidates, only hits, or only infinite counts: loss and gradient are zero, not NaN."""
    target = torch.tensor([2, 2])
    options = dict(estimator=estimator, label_smoothing=label_smoothing,
                   target_log_count=torch.tensor([0.1, 0.3]))
    cases = [
        dict(scores=torch.randn(2, 1), private_ids=torch.zeros(2, 0, dtype=torch.int64)),
        dict(scores=torch.randn(2, 1), shared_ids=torch.zeros(0, dtype=torch.int64)),
        dict(scores=torch.randn(2, 6), private_ids=torch.full((2, 2), 2), shared_ids=torch.full(
            (3,), 2),
             **(dict(distinct_private=2, distinct_shared=3) if estimator == "ranking" else {})),
        dict(scores=torch.randn(2, 4), shared_ids=torch.arange(3), shared_log_count=torch.full(
            (3,), INF)),
        dict(scores=torch.randn(2, 4), shared_ids=torch.full((3,), 2), distinct_shared=3)
    ]
    for case in cases:
        loss, grad = loss_and_gradient(candidate_loss, case | options, target=target)
        torch.testing.assert_close(loss, torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-6, rtol=0)


@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_without_draws_the_loss_is_zero(impl, estimator):
    """num_samples = 0 makes every log count -inf, also the target's: loss and gradient are zero."""
    loss, grad = loss_and_gradient(
        candidate_loss,
        dict(scores=torch.randn(2, 1), target=torch.tensor([2, 2]),
             shared_ids=torch.zeros(0, dtype=torch.int64), target_log_count=torch.full(
                 (2,), -INF), estimator=estimator))
    assert loss.eq(0).all() and grad.eq(0).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_zero_gradient_rows_are_exactly_zero(impl, value, label_smoothing):
    """An ignored query must not write NaN to the table, whatever its scores are."""
    arguments = problem()
    arguments["scores"][1] = value
    arguments["scores"][3, 4] = value
    grad_loss = torch.ones(7)
    grad_loss[[1, 3]] = 0
    grad = candidate_loss_backward(grad_loss, **arguments, label_smoothing=label_smoothing)
    assert grad[[1, 3]].eq(0).all() and grad[[0, 2, 4, 5, 6
                                              ]].isfinite().all() and grad[0].ne(0).any()


def test_scores_of_hits_and_infinite_counts_do_not_matter(impl):
    """They may even be NaN."""
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
    """Scores of +-1e4 do not overflow, whichever class is largest."""
    for shift, scale in itertools.product((-1e4, 0.0, 1e4), (1.0, 1e4)):
        arguments = problem(dtype=dtype)
        arguments["scores"] = arguments["scores"] * scale + shift
        loss, grad = loss_and_gradient(candidate_loss, arguments, label_smoothing=label_smoothing)
        want = loss_and_gradient(naive, arguments, label_smoothing=label_smoothing)
        digits = 1e4 * torch.finfo(dtype).eps * 8
        assert loss.isfinite().all() and grad.isfinite().all()
        # The rounding error of the smoothing weights is multiplied by the spread of the scores.
        spread = arguments["scores"].max() - arguments["scores"].min() if label_smoothing else 1.0
        torch.testing.assert_close(loss, want[0].to(dtype), rtol=1e-5, atol=float(digits * spread))
        torch.testing.assert_close(grad, want[1], rtol=1e-2, atol=digits)


@pytest.mark.parametrize("dtype, depth", [(torch.float32, 80.0), (torch.float64, 600.0)], ids=str)
def test_small_probabilities_keep_their_digits(impl, dtype, depth):
    """exp is accurate to the last digits also far below the best score."""
    scores = -torch.rand(1, 4096, dtype=dtype, generator=torch.Generator().manual_seed(0)) * depth
    scores[0, 0] = 0
    want = scores.double().softmax(1)[0, 1:]
    _, grad = loss_and_gradient(
        candidate_loss,
        dict(scores=scores, target=torch.zeros(1, dtype=torch.int64),
             shared_ids=torch.arange(1, 4096)))
    torch.testing.assert_close(2 * grad[0, 1:].double(), want, rtol=8 * torch.finfo(dtype).eps,
                               atol=0)


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
@pytest.mark.parametrize("column", [0, 2, 9])
def test_scores_that_are_not_finite(impl, column, value):
    """As in cross entropy over the same logits: a candidate of -inf has probability 0, and
    undefined results are NaN."""
    arguments = problem(counts=False) | dict(remove_accidental_hits=False)
    arguments["scores"][2, column] = value
    got = loss_and_gradient(candidate_loss, arguments)
    want = loss_and_gradient(
        lambda scores, target, **_: F.cross_entropy(scores, torch.zeros_like(target), reduction=
                                                    "none"), arguments)
    for a, b in zip(got, want):
        assert torch.equal(a.isfinite(), b.isfinite())
        torch.testing.assert_close(a[b.isfinite()], b[b.isfinite()])


def test_every_logit_is_minus_infinity(impl):
    """The loss of that query is NaN, as in cross entropy, and other queries are not affected."""
    arguments = problem(counts=False)
    arguments["scores"][2] = -INF
    loss = candidate_loss(**arguments)
    assert loss[2].isnan() and loss[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_shapes(impl):
    """No queries; one class."""
    loss, grad = loss_and_gradient(candidate_loss, problem(Q=0))
    assert loss.shape == (0,) and grad.shape == (0, 12)
    one = problem(N=1)
    assert loss_and_gradient(candidate_loss, one)[0].eq(0).all()
    one["remove_accidental_hits"] = False
    assert_same(loss_and_gradient(candidate_loss, one), loss_and_gradient(naive, one),
                torch.float32)


def extreme(estimator, dtype):
    """Scores so far apart that the best candidate, or the target, has all of the softmax."""
    scores = torch.tensor([[0.0, 90, -90, 1], [90, 0, -90, 1], [-90, 89, 88, 0]], dtype=dtype)
    return dict(scores=scores, target=torch.full((3,), 9), shared_ids=torch.arange(3),
                target_log_count=torch.zeros(3), estimator=estimator)


@every_estimator
def test_scores_far_apart(impl, estimator):
    want = loss_and_gradient(candidate_loss, extreme(estimator, torch.float64))
    got = loss_and_gradient(candidate_loss, extreme(estimator, torch.float32))
    assert all(part.isfinite().all() for part in (*want, *got))
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_shared_counts_by_query(smoothing):
    """shared_log_count [Q, S] equals the same candidates passed as private; equal rows equal
    [S]."""
    torch.manual_seed(0)
    q, s = 5, 7
    scores, target, ids = torch.randn(q, 1 + s), torch.randint(20, (q,)), torch.randint(20, (s,))
    count, of_target = torch.randn(q, s), -torch.rand(q)
    options = dict(target_log_count=of_target, label_smoothing=smoothing)
    for impl in ("kernel", "reference"):
        with xs.use_impl(impl):
            got = candidate_loss(scores, target, shared_ids=ids, shared_log_count=count, **options)
            private = candidate_loss(scores, target, private_ids=ids.expand(q, s).contiguous(),
                                     private_log_count=count, **options)
            torch.testing.assert_close(got, private)
            torch.testing.assert_close(
                candidate_loss(scores, target, shared_ids=ids,
                               shared_log_count=count[:1].expand(q, s), **options),
                candidate_loss(scores, target, shared_ids=ids, shared_log_count=count[0],
                               **options))
    with pytest.raises(
            ValueError, match="shared_log_count of the shape of shared_ids, or with a "
            "row for each query"):
        candidate_loss(scores, target, shared_ids=ids, shared_log_count=count[:3], **options)
