"""Negatives passed to a call, ``loss(input, target, negatives=ids)``, in addition to the
sampler's."""

import math

import pytest
import torch

import xsoftmax as xs

N, D, Q, P = 23, 5, 8, 6
samplers = xs.samplers
COUNTS = torch.arange(1.0, N + 1)
SHARED = {
    "uniform": lambda: samplers.UniformSampler(N, 9),
    "uniform independent": lambda: samplers.UniformSampler(N, 12, distinct=False),
    "midx": lambda: samplers.MidxSampler(N, D, 6, codewords=3, shared=True),
    "union": lambda: samplers.UnionSampler(samplers.UniformSampler(N, 4),
                                           samplers.UnigramSampler(COUNTS, 5)),
}
PRIVATE = {
    "uniform": lambda: samplers.UniformSampler(N, 7, shared=False),
    "unigram distinct": lambda: samplers.UnigramSampler(COUNTS, 5, shared=False, distinct=True),
    "midx": lambda: samplers.MidxSampler(N, D, 6, codewords=3),
    "union of both": lambda: samplers.UnionSampler(samplers.UniformSampler(
        N, 4), samplers.UnigramSampler(COUNTS, 5, shared=False)),
}
ESTIMATORS = [name for name in torch.ops.xsoftmax.estimator_names() if not name.startswith("cane")]


def batch(queries=Q, seed=0):
    made = torch.Generator().manual_seed(seed)
    input, target = torch.randn(queries, D, generator=made,
                                dtype=torch.float64), torch.randint(N, (queries,), generator=made)
    target[1] = -100
    return input.requires_grad_(), target


def loss_of(sampler, estimator="sampled_softmax", **options):
    torch.manual_seed(1)
    return xs.SampledSoftmaxLoss(D, N, sampler=sampler, estimator=estimator, reduction="none",
                                 dtype=torch.float64, **options)


def call(loss, *arguments, **named):
    """Returns the loss and its gradients, with the same draws each time."""
    loss.zero_grad()
    value = loss(*arguments, generator=torch.Generator().manual_seed(5), **named)
    grads = torch.autograd.grad(value.sum(), [arguments[0], loss.linear.weight])
    return [value, *(grad.to_dense() for grad in grads)]


def check_same(got, want):
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("sampler", SHARED)
def test_shared_negatives_equal_a_fixed_sampler_in_a_union(sampler, estimator):
    ids = torch.tensor([3, 17, 0, 9])
    beside = loss_of(samplers.UnionSampler(SHARED[sampler](), samplers.FixedSampler(N, ids)),
                     estimator)
    check_same(
        call(loss_of(SHARED[sampler](), estimator), *batch(),
             negatives=torch.tensor([3, 17, -1, 0, 9, 3])), call(beside, *batch()))


@pytest.mark.parametrize("head", [0, 4])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("sampler", SHARED)
def test_private_negatives_equal_those_of_a_batch_of_one(sampler, estimator, head):
    """Shared draws do not depend on the batch, except for MIDX, whose mixture is over all queries;
    there all queries are equal."""
    input, target = batch()
    if sampler == "midx":
        input = input[:1].detach().expand(Q, D).clone().requires_grad_()
        target[1] = 5
    negatives = torch.randint(-1, N, (Q, P), generator=torch.Generator().manual_seed(3))
    value, grad, _ = call(loss_of(SHARED[sampler](), estimator, head_classes=head), input, target,
                          negatives=negatives)
    for q in range(Q):
        one = input[q:q + 1].detach().requires_grad_()
        alone = call(loss_of(SHARED[sampler](), estimator, head_classes=head), one, target[q:q + 1],
                     negatives=negatives[q])
        check_same([value[q:q + 1], grad[q:q + 1]], alone[:2])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("sampler", PRIVATE)
def test_counts_of_negatives_and_private_draws_add_up(sampler, estimator):
    """The log count of a given class is log(count + 1) in the sets, that of other classes is
    unchanged; also for targets."""
    loss, (input, target) = loss_of(PRIVATE[sampler](), estimator), batch()
    negatives = torch.randint(-1, N, (Q, P), generator=torch.Generator().manual_seed(3))
    negatives[:, 0] = torch.where(target >= 0, target, 0)  # accidental hits
    queries, counted = loss._prepare_sampling(input, target)
    loss.sampler.prepare(loss.linear.weight, None)
    given = loss._make_negative_set(input, negatives, None)
    sets = loss._draw_with_negatives(given, queries, counted, torch.Generator().manual_seed(5))
    of_target = torch.zeros(Q, dtype=torch.float64)
    for number, one in enumerate(sets):
        ids = one.ids.expand(Q, -1) if one.ids.dim() == 1 else one.ids
        sampled = loss.sampler.log_count(queries, ids).double().exp()
        there = (ids.unsqueeze(2) == torch.where(negatives < 0, N, negatives).unsqueeze(1)).any(2)
        want = sampled + there
        if number == 0:
            assert torch.equal(
                ids[there & (one.log_count != math.inf)].sort().values,
                torch.cat([row[row >= 0].unique() for row in negatives]).sort().values)
            want = torch.where(one.log_count == math.inf, math.inf, want)
        torch.testing.assert_close(one.log_count.double().expand(Q, -1), want.log(), rtol=1e-5,
                                   atol=1e-5)
        if one.target_log_count is not None:
            of_target += one.target_log_count.double().exp()
    counts = target >= 0
    want = loss.sampler.log_count(queries,
                                  counted.clamp_min(0).unsqueeze(1)).squeeze(1).double().exp() + 1
    torch.testing.assert_close(of_target[counts], want[counts], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", [*PRIVATE])
def test_the_normaliser_is_unbiased(sampler):
    """On average over draws, with classes that are always scored."""
    queries = 6000
    loss = loss_of(PRIVATE[sampler](), remove_accidental_hits=True)
    input, target = torch.randn(1, D, dtype=torch.float64).expand(queries, D), torch.full(
        (queries,), 7)
    calls = 3000 if sampler == "union of both" else 1
    with torch.no_grad():
        s = loss.linear(input[0]).exp()
        rows = slice(0, 2) if calls > 1 else slice(None)
        found = torch.cat([
            loss(input[rows], target[rows],
                 torch.Generator().manual_seed(seed), negatives=torch.tensor(
                     [1, 4, 22])).exp()[:queries] for seed in range(calls)
        ]) * s[7] - s[7]
    want = s.sum() - s[7]
    assert abs(found.mean() - want) < 5 * found.std() / len(found)**0.5
    assert found.std() / len(found)**0.5 < 0.02 * want


@pytest.mark.parametrize("estimator", [*ESTIMATORS])
def test_negatives_with_log_counts(estimator):
    """Equals a sampler that draws these classes with these counts, except for the target's count,
    which is unknown."""
    input, target = batch()
    negatives = torch.randint(-1, N, (Q, P), generator=torch.Generator().manual_seed(3))
    log_count = torch.randn(Q, P, generator=torch.Generator().manual_seed(4))
    got = None
    if estimator not in ("ranking", "nce", "blackout"):
        got = call(loss_of(None, estimator), input, target, negatives=negatives,
                   negative_log_count=log_count)
    if got is None:  # estimators that correct the target need its count
        loss = loss_of(samplers.UniformSampler(N, 4), estimator)
        got = call(loss, input, target, negatives=negatives, negative_log_count=log_count)
        sets = loss.propose(*loss._prepare_sampling(input, target),
                            torch.Generator().manual_seed(5))
    else:
        loss, sets = loss_of(None, estimator), []
    one = samplers.CandidateSet(negatives.clamp_min(0),
                                log_count.masked_fill(negatives < 0, math.inf), None, False)
    value = loss._loss(input, target, sets + [one])
    check_same(got, [
        value, *(grad.to_dense()
                 for grad in torch.autograd.grad(value.sum(), [input, loss.linear.weight]))
    ])


def test_all_classes_given_are_the_exact_loss():
    loss, (input, target) = loss_of(None), batch()
    several = torch.stack(
        [target, torch.arange(Q),
         torch.where(target < 0, target, N - 1 - target)], 1)
    for y in (target, several):
        torch.testing.assert_close(loss(input, y, negatives=torch.arange(N)), loss.exact(input, y))
    shape = (2, Q // 2)
    torch.testing.assert_close(
        loss(input.view(*shape, D), target.view(shape), negatives=torch.arange(N).expand(*shape,
                                                                                         N)),
        loss.exact(input, target).view(shape))


def test_scripted_and_compiled():
    loss, (input, target) = loss_of(PRIVATE["unigram distinct"](), head_classes=2), batch()
    negatives = torch.randint(-1, N, (Q, P), generator=torch.Generator().manual_seed(3))
    want = call(loss, input, target, negatives=negatives)[0]
    torch.testing.assert_close(
        torch.jit.script(loss)(input, target, torch.Generator().manual_seed(5), negatives), want)
    torch.manual_seed(5)
    eager = loss(input, target, negatives=negatives)
    torch.manual_seed(5)
    torch.testing.assert_close(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(input, target,
                                                                 negatives=negatives), eager)


def test_bad_input():
    loss, (input, target) = loss_of(samplers.InBatchSampler(N)), batch()
    counted = loss.sampler.total.clone()
    for error, message, arguments in [
        (IndexError, rf"expected negatives in \[0, {N}\)", dict(negatives=torch.tensor([N]))),
        (TypeError, "expected negatives of dtype int64, got float32",
         dict(negatives=torch.zeros(3))),
        (TypeError, "expected negatives as a tensor, got list", dict(negatives=[1, 2])),
        (ValueError, r"expected negatives of shape \[P\], or with one more dimension than the "
         rf"queries, \[{Q}\], got \[3, 2\]", dict(negatives=torch.zeros(3, 2, dtype=torch.int64))),
        (ValueError, "expected negatives with negative_log_count, got none",
         dict(negative_log_count=torch.zeros(3))),
        (ValueError, "expected negative_log_count of the shape of negatives",
         dict(negatives=torch.zeros(3, dtype=torch.int64), negative_log_count=torch.zeros(2)))
    ]:
        with pytest.raises(error, match=message):
            loss(input, target, **arguments)
    assert loss.sampler.total == counted  # errors change no count
    with pytest.raises(
            ValueError, match="expected negatives in each call of a loss without a "
            "sampler, got none"):
        loss_of(None)(input, target)
    assert loss_of(None, head_classes=3)(input, target).isfinite().all()
    with pytest.raises(
            TypeError, match="expected sampler as a Sampler or one of .* with "
            "num_samples=4, got None"):
        loss_of(None, num_samples=4)
