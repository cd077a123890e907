"""Losses built with each option: estimators, heads, samplers and reductions match the operators."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from gradient_checks import seeded  # noqa: F401 (a fixture of every test)
from loss_checks import D, N, batch, exact, sampled
from xsoftmax._core.options import option_text
from xsoftmax.samplers import (InBatchSampler, LogUniformSampler, MidxSampler, UniformSampler,
                               UnigramSampler, UnionSampler, columns_of)


@pytest.mark.parametrize("kwargs", [
    dict(),
    dict(bias=True),
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(ignore_index=3),
    dict(label_smoothing=0.2),
    dict(weight=torch.linspace(0.1, 2, N))
], ids=str)
def test_eval_is_cross_entropy(kwargs):
    options = {k: v for k, v in kwargs.items() if k != "bias"}
    for loss in (sampled(**kwargs).eval(), xs.LinearCrossEntropyLoss(D, N, **kwargs)):
        for shape in ((5,), (3, 4)):
            input, target = batch(*shape)
            target.view(-1)[1] = options.get("ignore_index", -100)
            got, want = loss(input, target), exact(loss, input, target, **options)
            torch.testing.assert_close(got, want.view(got.shape))
            assert got.shape == (target.shape if options.get("reduction") == "none" else ())


@pytest.mark.parametrize(
    "loss", [sampled(bias=True), xs.LinearCrossEntropyLoss(D, N, bias=True)],
    ids=["sampled", "exact"])
def test_prediction(loss):
    for shape in ((), (5,), (3, 4), (0,)):
        input = torch.randn(*shape, D)
        want = F.log_softmax(loss.linear(input), -1)
        torch.testing.assert_close(loss.log_prob(input), want)
        values, ids = loss.topk(input, 3)
        torch.testing.assert_close(values, want.topk(3).values)
        assert torch.equal(ids, want.topk(3).indices)
        assert torch.equal(loss.predict(input), want.argmax(-1))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_batch_shapes(reduction):
    """[D] with a scalar target, [Q, D] and [B, T, D] give the losses of the flattened batch: one
    set of classes is drawn whatever the shape."""
    loss = sampled(reduction=reduction, head_classes=5)
    for shape in ((), (6,), (2, 3)):
        input, target = batch(*shape)
        got = loss(input, target, torch.Generator().manual_seed(1))
        flat = loss(input.reshape(-1, D), target.reshape(-1), torch.Generator().manual_seed(1))
        torch.testing.assert_close(got, flat.view(got.shape))
        assert got.shape == (target.shape if reduction == "none" else ())
        got.sum().backward()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("estimator, remove", [("sampled_softmax", True),
                                               ("sampled_softmax", False), ("ranking", True),
                                               ("nce", True), ("negative_sampling", True),
                                               ("one_vs_each", True), ("blackout", True),
                                               ("importance", True), ("cane", True),
                                               ("cane_log_of_mean", True)])
def test_the_module_equals_the_operator_on_the_same_draws(estimator, remove, shared):
    """Draws without replacement (shared) and with (private, or noise), with a head, an ignored
    target and one in the head."""
    distinct = shared and not estimator.startswith("cane")
    loss = xs.SampledSoftmaxLoss(D, N, sampler=LogUniformSampler(N, 8, shared=shared,
                                                                 distinct=distinct), bias=True,
                                 estimator=estimator, remove_accidental_hits=remove, head_classes=4)
    input, target = batch(6, ignored=1)
    target[1] = 2
    got = loss(input, target, torch.Generator().manual_seed(5))
    (drawn,) = loss.sampler.sample(input, target.masked_fill(target < 0, -1),
                                   torch.Generator().manual_seed(5))
    assert drawn.ids.min() >= 4 and drawn.distinct == distinct and (drawn.ids.dim() == 1) == shared
    # draws of CANE are noise, which is private
    assert sampled(estimator=estimator,
                   head_classes=4).sampler.shared != estimator.startswith("cane")
    want = torch.ops.xsoftmax.sampled_softmax_loss(
        input, loss.linear.weight, loss.linear.bias, target, [torch.arange(4), drawn.ids],
        [torch.zeros(4), drawn.log_count], [None, drawn.target_log_count], [True, distinct], None,
        None, option_text(estimator=estimator, remove_accidental_hits=remove))
    assert torch.equal(got, want) and got.isfinite()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("log_z", [2.5, "learned"])
def test_nce_with_a_log_z(log_z, shared, reduction):
    """log_z is subtracted from all scores; a learned one gets the matching gradient."""
    loss = sampled(bias=True, estimator="nce", shared=shared, head_classes=4, log_z=log_z,
                   reduction=reduction, weight=torch.linspace(0.5, 2, N))
    value = torch.tensor(2.5, requires_grad=True)
    if log_z == "learned":
        torch.nn.init.constant_(loss.log_z, 2.5)
    else:
        assert loss.log_z is None
    input, target = batch(6, ignored=1)
    got = loss(input, target, torch.Generator().manual_seed(5))
    known = target.clamp_min(0)
    # private sets first
    sets = sorted(loss.propose(input, known,
                               torch.Generator().manual_seed(5)),
                  key=lambda part: part.ids.dim() == 1)
    private = torch.cat([known[:, None], *(part.ids for part in sets if part.ids.dim() == 2)], 1)
    ids = torch.cat([part.ids for part in sets if part.ids.dim() == 1])
    scores = torch.ops.xsoftmax.candidate_scores(input, loss.linear.weight, loss.linear.bias,
                                                 private, ids) - value
    parts = torch.ops.xsoftmax.candidate_loss(scores, known, *columns_of(sets), "estimator=nce")
    share = torch.where(target >= 0, loss.weight[known], 0.0)
    want = {
        "none": parts * share, "sum": (parts * share).sum(),
        "mean": (parts * share).sum() / share.sum()
    }[reduction]
    torch.testing.assert_close(got, want)
    got.sum().backward()
    if log_z == "learned":
        torch.testing.assert_close(loss.log_z.grad, torch.autograd.grad(want.sum(), value)[0])
    other = sampled(bias=True)
    assert other.load_state_dict({k: v
                                  for k, v in loss.state_dict().items()
                                  if k != "weight"}).unexpected_keys == []


def test_a_learned_log_z_converges_to_the_log_normaliser():
    """With the table fixed, NCE is minimised over log Z only."""
    torch.manual_seed(0)
    loss = sampled(estimator="nce", shared=False, num_samples=30, log_z="learned")
    input = torch.randn(1500, D)
    with torch.no_grad():
        logits = loss.linear(input)
        logits += 3.0 - logits.logsumexp(1, keepdim=True)  # the same normaliser for all
        target = torch.multinomial(logits.exp(), 1).squeeze(1)
        ids = torch.cat([target[:, None], torch.randint(N, (1500, 30))], 1)
    optimizer, count = torch.optim.Adam([loss.log_z], lr=0.1), torch.full((1500, 30),
                                                                          math.log(30 / N))
    for _ in range(100):
        optimizer.zero_grad()
        scores = logits.gather(1, ids) - loss.log_z
        torch.ops.xsoftmax.candidate_loss(scores, target, [ids[:, 1:]], [count], [count[:, 0]],
                                          [False], "estimator=nce").mean().backward()
        optimizer.step()
    assert loss.log_z.item() == pytest.approx(3.0, abs=0.05)


def test_complementary_sum_draws_with_replacement():
    """More samples than classes are allowed."""
    loss = sampled(estimator="complementary_sum", num_samples=3 * N, sampler="uniform")
    assert loss(*batch(3)).isfinite()


def test_complementary_sum():
    """Draws exclude the target; the sum over the other classes is estimated without bias (Botev et
    al., 2017)."""
    loss = sampled(bias=True, estimator="complementary_sum", num_samples=None, reduction="none",
                   sampler=UnigramSampler(torch.arange(1, N + 1), 3, shared=False))
    assert not loss.sampler.shared
    input, target = batch(1)
    many, targets = input.detach().expand(20_000, D), target.expand(20_000)
    (drawn,) = loss.propose(many, targets, torch.Generator().manual_seed(1))
    assert (drawn.ids != target).all() and drawn.ids.shape == (20_000, 3)
    got = loss(many, targets, torch.Generator().manual_seed(1))
    scores = loss.linear(input)[0]
    weights = (scores[drawn.ids] - drawn.log_count).exp().sum(1)
    torch.testing.assert_close(got, (scores[target].exp() + weights).log() - scores[target])
    rest = scores.exp().sum() - scores[target].exp()
    assert abs(weights.mean() - rest) < 4.5 * weights.std() / 20_000**0.5


@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_head_of_all_but_one_class_is_exact(estimator):
    """The last class is always drawn, so the sampled loss is the exact one."""
    loss = sampled(head_classes=N - 1, num_samples=1, estimator=estimator, bias=True)
    input, target = batch(20)
    torch.testing.assert_close(loss(input, target), exact(loss, input, target))


def test_head_classes_as_ids():
    """Head ids may come in any order. The sampler never draws them, and a sampler passed as a
    module is not modified."""
    ids = torch.tensor([30, 2, 17])
    given = UnigramSampler(torch.arange(1, N + 1).float(), N - 3)
    loss = sampled(sampler=given, num_samples=None, head_classes=ids)
    assert torch.equal(loss.head, ids.sort().values)
    assert loss.sampler.log_count(torch.zeros(1, D), ids).isneginf().all() and given.log_count(
        torch.zeros(1, D), ids).isfinite().all()
    input, target = batch(20)
    # the head and the draws together hold every class
    torch.testing.assert_close(loss(input, target), exact(loss, input, target))
    by_number, by_ids = sampled(head_classes=3), sampled(head_classes=torch.arange(3))
    by_ids.load_state_dict(by_number.state_dict())
    draws = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(by_number(input, target, draws[0]), by_ids(input, target, draws[1]))


@pytest.mark.parametrize("name, kind", [("uniform", UniformSampler),
                                        ("log_uniform", LogUniformSampler),
                                        ("in_batch", InBatchSampler)])
def test_samplers_by_name(name, kind):
    loss = sampled(sampler=name, num_samples=None if name == "in_batch" else 8)
    assert type(loss.sampler) is kind and loss.sampler.num_classes == N
    input, target = batch(6)
    module = sampled(sampler=kind(N) if name == "in_batch" else kind(N, 8), num_samples=None)
    module.load_state_dict(loss.state_dict())
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(loss(input, target, seeds[0]), module(input, target, seeds[1]))


def test_numpy_numbers_are_accepted():
    loss = xs.SampledSoftmaxLoss(np.int64(D), np.int32(N), sampler="uniform",
                                 num_samples=np.int64(4), head_classes=np.int64(2),
                                 ignore_index=np.int64(-1), estimator="nce", log_z=np.float32(1.5))
    assert loss(*batch(3)).isfinite() and type(loss.num_classes) is int


def test_in_batch():
    """Candidates are the targets that are not ignored, weighted by their streamed frequencies;
    repeated targets count repeatedly."""
    loss = sampled(sampler="in_batch", num_samples=None, reduction="none")
    input = torch.randn(5, D)
    target = torch.tensor([3, 7, 7, -100, 0])
    got = loss(input, target)
    assert loss.sampler.total == 4 and loss.sampler.counts[[0, 3, 7]].tolist() == [1, 1, 2]
    scores = input @ loss.linear.weight.T
    p = torch.tensor([1, 1, 2]) / 4
    for q, y in ((0, 3), (1, 7), (4, 0)):
        others = [c for c in (3, 7, 7, 0) if c != y]
        share = {0: p[0], 3: p[1], 7: p[2]}
        sum_others = sum(scores[q, c].exp() / share[c]
                         for c in others) * (1 - share[y]) / len(others)
        torch.testing.assert_close(got[q], (scores[q, y].exp() + sum_others).log() - scores[q, y])
    assert got[3] == 0
    loss.eval()(input, target)
    assert loss.sampler.total == 4


def test_draws_are_reproducible():
    loss, (input, target) = sampled(), batch(6)
    torch.manual_seed(3)
    first, second = loss(input, target), loss(input, target)
    torch.manual_seed(3)
    assert torch.equal(loss(input, target), first) and not torch.equal(first, second)
    assert torch.equal(loss(input, target, torch.Generator().manual_seed(3)), first)


def test_sparse_gradient():
    """Row-sparse and dense gradients hold the same numbers."""
    grads = []
    input, target = batch(6)
    for sparse_grad in (True, False):
        torch.manual_seed(1)
        loss = sampled(sparse_grad=sparse_grad, bias=True)
        loss(input, target, torch.Generator().manual_seed(2)).backward()
        assert loss.linear.weight.grad.is_sparse == sparse_grad
        assert loss.linear.bias.grad.is_sparse == sparse_grad
        grads.append([loss.linear.weight.grad.to_dense(), loss.linear.bias.grad.to_dense()])
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


OPTIMIZERS = {
    "RowAdam": lambda p: xs.optim.RowAdam(p, lr=0.05),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=2.0),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3)
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kwargs", [
    dict(),
    dict(shared=False),
    dict(sampler="in_batch", num_samples=None),
    dict(head_classes=4, sampler="log_uniform")
], ids=str)
def test_training_reduces_the_exact_loss(optimizer, kwargs):
    loss, centers = sampled(bias=True, sparse_grad=True if optimizer == "SparseAdam" else None,
                            **kwargs), torch.randn(N, D)
    optimizer = OPTIMIZERS[optimizer](list(loss.parameters()))
    target = torch.arange(N).repeat(4)
    input = centers[target] + 0.1 * torch.randn(len(target), D)
    before = exact(loss, input, target).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss(input, target).backward()
        optimizer.step()
    assert loss.eval()(input, target) < 0.5 * before


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_no_samples(estimator, shared):
    """With no samples the loss is that over the head; without a head nothing is learned."""
    input, target = batch(5)
    loss = sampled(num_samples=0, estimator=estimator, shared=shared, head_classes=4,
                   reduction="none")
    torch.testing.assert_close(
        loss(input, target % 4),
        F.cross_entropy(loss.linear(input)[:, :4], target % 4, reduction="none"))
    with pytest.raises(ValueError, match="expected classes to score, got num_samples=0 and "
                       "head_classes=0"):
        sampled(num_samples=0, estimator=estimator, shared=shared)


def test_one_class_and_one_feature():
    for d, n in ((1, 1), (1, N), (D, 1), (0, N)):
        loss = xs.SampledSoftmaxLoss(d, n, sampler="uniform", num_samples=1, bias=True)
        input, target = torch.randn(5, d), torch.randint(n, (5,))
        loss(input, target).backward()
        assert loss.linear.weight.grad.to_dense().isfinite().all()
        torch.testing.assert_close(loss.eval()(input, target), exact(loss, input, target))


@pytest.mark.parametrize("shared", [True, False])
def test_empty_batch_and_all_ignored(shared):
    """As in F.cross_entropy, the sum is 0 and the mean NaN."""
    for input, target in (batch(0), batch(3, ignored=3)):
        for reduction in ("sum", "mean"):
            loss = sampled(reduction=reduction, shared=shared)
            value = loss(input, target)
            value.backward()
            torch.testing.assert_close(value, exact(loss, input, target, reduction=reduction),
                                       equal_nan=True)
        assert sampled(reduction="none", shared=shared)(input, target).eq(0).all()


def test_extra_repr():
    text = repr(
        sampled(head_classes=3, estimator="ranking", reduction="sum", ignore_index=0,
                label_smoothing=0.1))
    for part in ("num_classes=40", "num_samples=8", "head_classes=3", "estimator='ranking'",
                 "reduction='sum'", "ignore_index=0", "label_smoothing=0.1"):
        assert part in text


def test_options_may_change_after_construction():
    input, target = batch(5, ignored=1)
    for loss in (sampled().eval(), xs.LinearCrossEntropyLoss(D, N)):
        for reduction in ("sum", "none", "mean"):
            loss.reduction, loss.ignore_index = reduction, 3
            torch.testing.assert_close(
                loss(input, target.clamp(min=0)),
                exact(loss, input, target.clamp(min=0), reduction=reduction, ignore_index=3))
        with pytest.raises(ValueError, match="expected reduction"):
            loss.reduction = "median"
        assert loss.reduction == "mean"
    # the sample holds all classes
    loss = sampled(head_classes=N - 1, num_samples=1, label_smoothing=0.2)
    loss.reduction, loss.ignore_index, loss.sparse_grad = "sum", 3, False
    value = loss(input, target.clamp(min=0))
    value.backward()
    torch.testing.assert_close(
        value,
        exact(loss, input, target.clamp(min=0), reduction="sum", ignore_index=3,
              label_smoothing=0.2))
    assert not loss.linear.weight.grad.is_sparse


def test_class_weights_of_any_floating_dtype():
    input, target = batch(6)
    loss = sampled(weight=torch.rand(N, dtype=torch.float64))
    want = loss.eval()(input, target)
    loss.weight = loss.weight.float()
    torch.testing.assert_close(loss(input, target), want)


def test_the_default_estimator_depends_on_the_sampler():
    """If all draws are private and with replacement, the default is "ranking", whose optimum is
    then the softmax; otherwise "sampled_softmax". An estimator that is named is kept."""
    counts = torch.arange(50, 0, -1)
    midx = lambda **options: MidxSampler(50, 8, 4, codewords=4, **options)
    for options, want in ((dict(sampler="midx",
                                num_samples=4), "ranking"), (dict(sampler="lsh",
                                                                  num_samples=4), "ranking"),
                          (dict(sampler=midx(),
                                head_classes=5), "ranking"), (dict(sampler="sphere"), "ranking"),
                          (dict(sampler=UnionSampler(UniformSampler(50, 4, shared=False), midx())),
                           "ranking"),
                          (dict(sampler=UnionSampler(UnigramSampler(counts, 8), midx())),
                           "sampled_softmax"), (dict(sampler=midx(distinct=True)),
                                                "sampled_softmax"),
                          (dict(sampler="midx", num_samples=4, shared=True),
                           "sampled_softmax"), (dict(sampler="uniform", num_samples=4,
                                                     shared=False), "ranking"),
                          (dict(sampler=UnigramSampler(counts, 8, shared=False, distinct=True)),
                           "sampled_softmax"),
                          (dict(sampler=xs.samplers.ComplementSampler(None, 4, num_classes=50)),
                           "sampled_softmax"), (dict(sampler="midx", num_samples=4,
                                                     estimator="sampled_softmax"),
                                                "sampled_softmax")):
        loss = xs.SampledSoftmaxLoss(8, 50, **options)
        assert loss.estimator == want
        assert loss(torch.randn(3, 8), torch.tensor([1, 2, 49])).isfinite()


def test_the_reduction_of_two_tower_may_be_assigned():
    loss, vectors = xs.TwoTowerLoss(20), torch.randn(3, 4)
    loss.reduction = "none"
    assert loss(vectors, vectors, torch.arange(3)).shape == (3,)
    for made in (lambda: setattr(loss, "reduction", None),
                 lambda: xs.TwoTowerLoss(20, reduction=None)):
        with pytest.raises(ValueError, match="expected reduction to be"):
            made()
