"""What losses compute by the names of their options: estimators, heads, samplers, and what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from xsoftmax._options import option_text
from xsoftmax.samplers import InBatchSampler, LogUniformSampler, MidxSampler, UniformSampler, UnigramSampler, UnionSampler, columns_of
from gradient_checks import seeded  # noqa: F401 (a fixture of every test)
from loss_checks import D, N, batch, exact, sampled



@pytest.mark.parametrize("kwargs", [dict(), dict(bias=True), dict(reduction="sum"), dict(reduction="none"), dict(ignore_index=3),
                                    dict(label_smoothing=0.2), dict(weight=torch.linspace(0.1, 2, N))], ids=str)
def test_eval_is_cross_entropy(kwargs):
    options = {k: v for k, v in kwargs.items() if k != "bias"}
    for loss in (sampled(**kwargs).eval(), xs.LinearCrossEntropyLoss(D, N, **kwargs)):
        for shape in ((5,), (3, 4)):
            input, target = batch(*shape)
            target.view(-1)[1] = options.get("ignore_index", -100)
            got, want = loss(input, target), exact(loss, input, target, **options)
            torch.testing.assert_close(got, want.view(got.shape))
            assert got.shape == (target.shape if options.get("reduction") == "none" else ())


@pytest.mark.parametrize("loss", [sampled(bias=True), xs.LinearCrossEntropyLoss(D, N, bias=True)], ids=["sampled", "exact"])
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
def test_shapes_of_a_batch(reduction):
    """[D] and a scalar target, [B, T, D]; one sample of classes whatever the shape, so the same losses as flattened."""
    loss = sampled(reduction=reduction, head_classes=5)
    for shape in ((), (6,), (2, 3)):
        input, target = batch(*shape)
        got = loss(input, target, torch.Generator().manual_seed(1))
        flat = loss(input.reshape(-1, D), target.reshape(-1), torch.Generator().manual_seed(1))
        torch.testing.assert_close(got, flat.view(got.shape))
        assert got.shape == (target.shape if reduction == "none" else ())
        got.sum().backward()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("estimator, remove", [("sampled_softmax", True), ("sampled_softmax", False), ("ranking", True), ("nce", True),
                                               ("negative_sampling", True), ("one_vs_each", True), ("blackout", True), ("importance", True),
                                               ("cane", True), ("cane_log_of_mean", True)])
def test_is_the_functional_op_on_the_samplers_draws(estimator, remove, shared):
    """Distinct (shared) and independent (private, or noise) draws, with a head, an ignored target and one in the head."""
    distinct = shared and not estimator.startswith("cane")
    loss = xs.SampledSoftmaxLoss(D, N, sampler=LogUniformSampler(N, 8, shared=shared, distinct=distinct), bias=True, estimator=estimator,
                                 remove_accidental_hits=remove, head_classes=4)
    input, target = batch(6, ignored=1)
    target[1] = 2
    got = loss(input, target, torch.Generator().manual_seed(5))
    (drawn,) = loss.sampler.sample(input, target.masked_fill(target < 0, -1), torch.Generator().manual_seed(5))
    assert drawn.ids.min() >= 4 and drawn.distinct == distinct and (drawn.ids.dim() == 1) == shared
    assert sampled(estimator=estimator, head_classes=4).sampler.shared != estimator.startswith("cane")  # whose draws are noise
    want = torch.ops.xsoftmax.sampled_softmax_loss(
        input, loss.linear.weight, loss.linear.bias, target, [torch.arange(4), drawn.ids], [torch.zeros(4), drawn.log_count],
        [None, drawn.target_log_count], [True, distinct], None, None, option_text(estimator=estimator, remove_accidental_hits=remove))
    assert torch.equal(got, want) and got.isfinite()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("log_z", [2.5, "learned"])
def test_nce_with_a_log_z(log_z, shared, reduction):
    """All scores are lowered by it; a learned one has the gradient of that."""
    loss = sampled(bias=True, estimator="nce", shared=shared, head_classes=4, log_z=log_z, reduction=reduction, weight=torch.linspace(0.5, 2, N))
    value = torch.tensor(2.5, requires_grad=True)
    if log_z == "learned":
        torch.nn.init.constant_(loss.log_z, 2.5)
    else:
        assert loss.log_z is None
    input, target = batch(6, ignored=1)
    got = loss(input, target, torch.Generator().manual_seed(5))
    known = target.clamp_min(0)
    sets = sorted(loss.propose(input, known, torch.Generator().manual_seed(5)), key=lambda part: part.ids.dim() == 1)  # private ones first
    private = torch.cat([known[:, None], *(part.ids for part in sets if part.ids.dim() == 2)], 1)
    ids = torch.cat([part.ids for part in sets if part.ids.dim() == 1])
    scores = torch.ops.xsoftmax.candidate_scores(input, loss.linear.weight, loss.linear.bias, private, ids) - value
    parts = torch.ops.xsoftmax.candidate_loss(scores, known, *columns_of(sets), "estimator=nce")
    share = torch.where(target >= 0, loss.weight[known], 0.0)
    want = {"none": parts * share, "sum": (parts * share).sum(), "mean": (parts * share).sum() / share.sum()}[reduction]
    torch.testing.assert_close(got, want)
    got.sum().backward()
    if log_z == "learned":
        torch.testing.assert_close(loss.log_z.grad, torch.autograd.grad(want.sum(), value)[0])
    other = sampled(bias=True)
    assert other.load_state_dict({k: v for k, v in loss.state_dict().items() if k != "weight"}).unexpected_keys == []


def test_a_learned_log_z_finds_the_normaliser():
    """Of a table that stays as it is: the optimum of NCE over log Z alone."""
    torch.manual_seed(0)
    loss = sampled(estimator="nce", shared=False, num_samples=30, log_z="learned")
    input = torch.randn(1500, D)
    with torch.no_grad():
        logits = loss.linear(input)
        logits += 3.0 - logits.logsumexp(1, keepdim=True)  # the same normaliser for all
        target = torch.multinomial(logits.exp(), 1).squeeze(1)
        ids = torch.cat([target[:, None], torch.randint(N, (1500, 30))], 1)
    optimizer, count = torch.optim.Adam([loss.log_z], lr=0.1), torch.full((1500, 30), math.log(30 / N))
    for _ in range(100):
        optimizer.zero_grad()
        scores = logits.gather(1, ids) - loss.log_z
        torch.ops.xsoftmax.candidate_loss(scores, target, [ids[:, 1:]], [count], [count[:, 0]], [False], "estimator=nce").mean().backward()
        optimizer.step()
    assert loss.log_z.item() == pytest.approx(3.0, abs=0.05)


def test_complementary_sum_draws_with_replacement():
    """So many as one likes."""
    loss = sampled(estimator="complementary_sum", num_samples=3 * N, sampler="uniform")
    assert loss(*batch(3)).isfinite()


def test_complementary_sum():
    """Draws from all classes but the target; the sum over those is estimated without bias (Botev et al., 2017)."""
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
    """The last class is drawn surely, so nothing is left to chance."""
    loss = sampled(head_classes=N - 1, num_samples=1, estimator=estimator, bias=True)
    input, target = batch(20)
    torch.testing.assert_close(loss(input, target), exact(loss, input, target))


def test_head_classes_as_ids():
    """Any ids, any order; the sampler, given as a module, leaves them out; the given module is not changed."""
    ids = torch.tensor([30, 2, 17])
    given = UnigramSampler(torch.arange(1, N + 1).float(), N - 3)
    loss = sampled(sampler=given, num_samples=None, head_classes=ids)
    assert torch.equal(loss.head, ids.sort().values)
    assert loss.sampler.log_count(torch.zeros(1, D), ids).isneginf().all() and given.log_count(torch.zeros(1, D), ids).isfinite().all()
    input, target = batch(20)
    torch.testing.assert_close(loss(input, target), exact(loss, input, target))  # head and all the others: every class
    by_number, by_ids = sampled(head_classes=3), sampled(head_classes=torch.arange(3))
    by_ids.load_state_dict(by_number.state_dict())
    draws = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(by_number(input, target, draws[0]), by_ids(input, target, draws[1]))


@pytest.mark.parametrize("name, kind", [("uniform", UniformSampler), ("log_uniform", LogUniformSampler), ("in_batch", InBatchSampler)])
def test_samplers_by_name(name, kind):
    loss = sampled(sampler=name, num_samples=None if name == "in_batch" else 8)
    assert type(loss.sampler) is kind and loss.sampler.num_classes == N
    input, target = batch(6)
    module = sampled(sampler=kind(N) if name == "in_batch" else kind(N, 8), num_samples=None)
    module.load_state_dict(loss.state_dict())
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(loss(input, target, seeds[0]), module(input, target, seeds[1]))


def test_a_sampler_belongs_to_one_loss():
    """A loss that was refused has not taken its sampler."""
    given = UniformSampler(N, 4)
    for wrong in (dict(estimator="nce", label_smoothing=0.1), dict(log_z=1.0), dict(weight=torch.ones(3)), dict(num_samples=4),
                  dict(estimator="complementary_sum")):
        with pytest.raises(ValueError):
            xs.SampledSoftmaxLoss(D, N, sampler=given, **wrong)
    xs.SampledSoftmaxLoss(D, N, sampler=given)
    with pytest.raises(ValueError, match="expected a sampler that no other module uses, got a UniformSampler that belongs to a SampledSoftmaxLoss"):
        xs.SampledSoftmaxLoss(D, N, sampler=given)


def test_numbers_of_numpy_are_counts():
    loss = xs.SampledSoftmaxLoss(np.int64(D), np.int32(N), sampler="uniform", num_samples=np.int64(4), head_classes=np.int64(2),
                                 ignore_index=np.int64(-1), estimator="nce", log_z=np.float32(1.5))
    assert loss(*batch(3)).isfinite() and type(loss.num_classes) is int


def test_in_batch():
    """The candidates are the targets that count, at their streamed frequencies; a repeated one stands repeatedly."""
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
        sum_others = sum(scores[q, c].exp() / share[c] for c in others) * (1 - share[y]) / len(others)
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


def test_generator_on_another_device():
    input, target = batch(6)
    with pytest.raises(ValueError, match="expected generator on the queries' device meta, got one on cpu"):
        sampled(device="meta")(input.to("meta"), target.to("meta"), torch.Generator())


def test_sparse_gradient():
    """Rows of the targets and the draws only, or dense: the same numbers."""
    grads = []
    input, target = batch(6)
    for sparse_grad in (True, False):
        torch.manual_seed(1)
        loss = sampled(sparse_grad=sparse_grad, bias=True)
        loss(input, target, torch.Generator().manual_seed(2)).backward()
        assert loss.linear.weight.grad.is_sparse == sparse_grad and loss.linear.bias.grad.is_sparse == sparse_grad
        grads.append([loss.linear.weight.grad.to_dense(), loss.linear.bias.grad.to_dense()])
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


OPTIMIZERS = {"RowAdam": lambda p: xs.optim.RowAdam(p, lr=0.05), "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
              "SGD": lambda p: torch.optim.SGD(p, lr=2.0), "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kwargs", [dict(), dict(shared=False), dict(sampler="in_batch", num_samples=None), dict(head_classes=4, sampler="log_uniform")],
                         ids=str)
def test_training_reduces_the_exact_loss(optimizer, kwargs):
    loss, centers = sampled(bias=True, sparse_grad=True if optimizer == "SparseAdam" else None, **kwargs), torch.randn(N, D)
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
    """The loss over the head; without one there is nothing to learn from."""
    input, target = batch(5)
    loss = sampled(num_samples=0, estimator=estimator, shared=shared, head_classes=4, reduction="none")
    torch.testing.assert_close(loss(input, target % 4), F.cross_entropy(loss.linear(input)[:, :4], target % 4, reduction="none"))
    with pytest.raises(ValueError, match="expected classes to score, got num_samples=0 and head_classes=0"):
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
    """As F.cross_entropy: the sum is 0, the mean NaN."""
    for input, target in (batch(0), batch(3, ignored=3)):
        for reduction in ("sum", "mean"):
            loss = sampled(reduction=reduction, shared=shared)
            value = loss(input, target)
            value.backward()
            torch.testing.assert_close(value, exact(loss, input, target, reduction=reduction), equal_nan=True)
        assert sampled(reduction="none", shared=shared)(input, target).eq(0).all()


def test_extra_repr():
    text = repr(sampled(head_classes=3, estimator="ranking", reduction="sum", ignore_index=0, label_smoothing=0.1))
    for part in ("num_classes=40", "num_samples=8", "head_classes=3", "estimator='ranking'", "reduction='sum'", "ignore_index=0",
                 "label_smoothing=0.1"):
        assert part in text


@pytest.mark.parametrize("kwargs, error, message", [
    (dict(num_samples=-1), ValueError, "expected num_samples of at least 0, got -1"),
    (dict(num_samples=N - 2, head_classes=3), ValueError, f"UniformSampler: expected num_samples of at most {N - 3}, .*got {N - 2}"),
    (dict(num_samples=None, sampler=UnionSampler(LogUniformSampler(N, N - 2), MidxSampler(N, D, 4, codewords=4)), head_classes=3),
     ValueError, f"LogUniformSampler: expected num_samples of at most {N - 3}, .*got {N - 2}"),
    (dict(sampler=None), TypeError, "expected sampler as a Sampler or one of .*\"uniform\", .* with num_samples=8, got None"),
    (dict(num_samples=None), ValueError, "make_sampler: expected num_samples for a UniformSampler, got None"),
    (dict(sampler=UniformSampler(N, 3)), ValueError, "expected no num_samples with a sampler object, got num_samples=8"),
    (dict(sampler=UniformSampler(N, 3), num_samples=None, shared=True), ValueError, "expected no shared with a sampler object, got shared=True"),
    (dict(estimator="nce2"), ValueError, r"expected estimator to be one of \['sampled_softmax', 'ranking', .*got 'nce2'"),
    (dict(log_z=1.0), ValueError, "expected log_z=0 with estimator='sampled_softmax', which does not use it, got 1.0"),
    (dict(log_z="free", estimator="nce"), ValueError, 'expected log_z as a finite number or "learned", got \'free\''),
    (dict(log_z=float("inf"), estimator="nce"), ValueError, "expected log_z as a finite number"),
    (dict(estimator="nce", label_smoothing=0.1), ValueError, "expected label_smoothing=0 with estimator='nce', got 0.1"),
    (dict(estimator="complementary_sum", shared=True), ValueError, "expected shared=False, head_classes=0 and label_smoothing=0"),
    (dict(estimator="complementary_sum", head_classes=3), ValueError, "expected shared=False, head_classes=0 and label_smoothing=0"),
    (dict(reduction="max"), ValueError, "expected reduction to be \"mean\", \"sum\" or \"none\", got 'max'"),
    (dict(label_smoothing=1.1), ValueError, r"expected label_smoothing in \[0, 1\], got 1.1"),
    (dict(weight=torch.ones(N), label_smoothing=0.1), ValueError, "expected label_smoothing=0 with class weights"),
    (dict(weight=torch.ones(N - 1)), ValueError, r"expected weight of shape \(40,\), got \(39,\)"),
    (dict(sampler="zipf"), ValueError, "make_sampler: expected"),
    (dict(sampler="unigram"), ValueError, "expected counts"),
    (dict(sampler=UniformSampler(N - 1, 3), num_samples=None), ValueError, "expected a sampler of 40 classes, got one of 39"),
    (dict(num_samples="3"), TypeError, "expected num_samples of type int, got str"),
    (dict(weight=torch.ones(N, dtype=torch.int64)), TypeError, "expected weight of a floating dtype, got torch.int64"),
    (dict(head_classes="some"), TypeError, "expected head_classes of type int, got str"),
    (dict(head_classes=None), TypeError, "got NoneType"),
    (dict(head_classes=-1), ValueError, "expected head_classes of at least 0, got -1"),
    (dict(head_classes=N + 1), ValueError, r"expected head_classes in \[0, 40\], got 41"),
    (dict(head_classes=torch.tensor([1.0])), TypeError, "expected head_classes as a number or 1-D int64 ids"),
    (dict(head_classes=torch.tensor([[1]])), TypeError, "expected head_classes as a number or 1-D int64 ids"),
    (dict(head_classes=torch.tensor([1, N])), IndexError, r"expected head_classes in \[0, 40\), got 1 .. 40"),
    (dict(head_classes=torch.tensor([-1, 3])), IndexError, r"expected head_classes in \[0, 40\), got -1 .. 3"),
    (dict(head_classes=torch.tensor([1, 3, 1])), ValueError, "expected head_classes without repeats"),
])
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        sampled(**kwargs)


def test_from_linear_takes_no_argument_that_the_layer_gives():
    with pytest.raises(TypeError, match="from_linear: expected arguments other than those of the linear layer, got device, dtype"):
        xs.LinearCrossEntropyLoss.from_linear(torch.nn.Linear(D, N), dtype=torch.float64, device="cpu")


def test_a_functional_table_that_is_no_tensor():
    x, ids, weight = torch.zeros(3, D), torch.zeros(3, dtype=torch.int64), torch.zeros(N, D)
    calls = {"linear_cross_entropy": dict(input=x, weight=weight, target=ids), "linear_entropy": dict(input=x, weight=weight),
             "linear_log_prob": dict(input=x, weight=weight), "sampled_softmax_loss": dict(input=x, weight=weight, target=ids, sets=[]),
             "tower_loss": dict(query=x, item=x, item_id=ids, candidates=[])}
    for name, arguments in calls.items():
        for argument in set(arguments) - {"sets", "candidates"}:
            for other, kind in (([1.0], "list"), (np.zeros(3), "ndarray"), (None, "NoneType")):
                with pytest.raises(TypeError, match=f"{name}: expected {argument} as a tensor, got {kind}"):
                    getattr(xs.functional, name)(**{**arguments, argument: other})
    for name, argument in (("linear_log_prob", "ids"), ("linear_log_prob", "bias"), ("linear_entropy", "bias")):
        with pytest.raises(TypeError, match=f"{name}: expected {argument} as a tensor, got list"):
            getattr(xs.functional, name)(x, weight, **{argument: [1]})


@pytest.mark.parametrize("loss", [sampled(), sampled().eval(), xs.LinearCrossEntropyLoss(D, N)], ids=["train", "eval", "exact"])
@pytest.mark.parametrize("input, target, error, message", [
    (torch.zeros(3, D), torch.zeros(4, dtype=torch.int64), ValueError, r"expected target of shape \[3\]"),
    (torch.zeros(3, D), torch.zeros(4, 1, dtype=torch.int64), ValueError, r"expected target of shape \[3\]"),
    (torch.zeros(3, D), torch.tensor([0, N, 1]), IndexError, r"expected target in \[0, 40\) or ignore_index, got 40 at \[1\]"),
    (torch.zeros(3, D), torch.tensor([0, 1, -1]), IndexError, r"expected target in \[0, 40\) or ignore_index, got -1 at \[2\]"),
    (torch.zeros(3, D), torch.zeros(3), TypeError, "expected target of dtype int64, got float32"),
    (torch.zeros(3, D).double(), torch.zeros(3, dtype=torch.int64), TypeError, "dtype"),
    (torch.zeros(3, D + 1), torch.zeros(3, dtype=torch.int64), ValueError, "7"),
    ([1.0], torch.zeros(3, dtype=torch.int64), TypeError, "expected input as a tensor, got list"),
    (torch.zeros(3, D), [1, 2, 3], TypeError, "expected target as a tensor, got list"),
    (torch.zeros(6, D // 2), torch.zeros(6, dtype=torch.int64), ValueError, "3"),
])
def test_bad_batches(loss, input, target, error, message):
    with pytest.raises(error, match=message):
        loss(input, target)


def test_no_classes():
    with pytest.raises(ValueError, match="expected num_classes of at least 1, got 0"):
        xs.LinearCrossEntropyLoss(D, 0)


def test_options_may_change_after_construction():
    input, target = batch(5, ignored=1)
    for loss in (sampled().eval(), xs.LinearCrossEntropyLoss(D, N)):
        for reduction in ("sum", "none", "mean"):
            loss.reduction, loss.ignore_index = reduction, 3
            torch.testing.assert_close(loss(input, target.clamp(min=0)), exact(loss, input, target.clamp(min=0), reduction=reduction, ignore_index=3))
        with pytest.raises(ValueError, match="expected reduction"):
            loss.reduction = "median"
        assert loss.reduction == "mean"
    loss = sampled(head_classes=N - 1, num_samples=1, label_smoothing=0.2)  # its sample is all classes
    loss.reduction, loss.ignore_index, loss.sparse_grad = "sum", 3, False
    value = loss(input, target.clamp(min=0))
    value.backward()
    torch.testing.assert_close(value, exact(loss, input, target.clamp(min=0), reduction="sum", ignore_index=3, label_smoothing=0.2))
    assert not loss.linear.weight.grad.is_sparse


OPTIONS = {
    "reduction": ("sum", [("max", ValueError), (None, ValueError)]),
    "ignore_index": (-1, [("1", TypeError), (1.0, TypeError), (True, TypeError)]),
    "label_smoothing": (0.1, [(1.5, ValueError), (-0.1, ValueError), (math.nan, ValueError),
                              ("1", TypeError), (True, TypeError), (None, TypeError)]),
    "positives": ("sum", [("max", ValueError), (1, ValueError)]),
    "logit_scale": (2.0, [(0.0, ValueError), ("1", TypeError)]),
    "softcap": (3.0, [(0.0, ValueError), ("1", TypeError)]),
    "z_loss": (0.1, [(-1.0, ValueError), ("1", TypeError)]),
    "estimator": ("ranking", [("soft", ValueError), (None, ValueError)]),
    "remove_accidental_hits": (False, [(1, TypeError), ("no", TypeError)]),
    "sparse_grad": (False, [(1, TypeError), ("none", TypeError)]),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["sampled", "exact"])
def test_options_are_checked_alike_at_construction_and_after_it(kind, option, monkeypatch):
    """With the same error, which leaves the loss as it was. Texts for operators are built once."""
    make = sampled if kind == "sampled" else lambda **options: xs.LinearCrossEntropyLoss(D, N, **options)
    if kind == "exact" and option in ("estimator", "remove_accidental_hits", "sparse_grad"):
        make = lambda **options: xs.CaneLoss(D, N, candidates=3, **options)  # noqa: E731
    value, others = OPTIONS[option]
    if kind == "exact" and option == "estimator":
        value = "cane_log_of_mean"
    loss, built = make(), []
    before = dict(vars(loss))
    for other, error in others:
        with pytest.raises(error, match=f"{type(loss).__name__}: expected {option}") as assigned:
            setattr(loss, option, other)
        if kind == "sampled" and option != "estimator":  # the constructor knows more of these
            with pytest.raises(error) as constructed:
                make(**{option: other})
            assert str(constructed.value) == str(assigned.value)
        assert vars(loss) == before

    def text(**values):
        built.append(tuple(sorted(values)))
        return option_text(**values)

    for module in (xs._table, xs.linear_losses):
        monkeypatch.setattr(module, "option_text", text)
    setattr(loss, option, value)
    assert getattr(loss, option) == value and len(set(built)) == len(built)


def test_cane_needs_candidates():
    with pytest.raises(ValueError, match="expected candidates .head classes, or draws without replacement. and noise .draws with replacement. with"):
        sampled(estimator="cane")
    loss = sampled(shared=False)
    loss.estimator = "cane"
    with pytest.raises(ValueError, match='expected candidates, sets of distinct classes such as a head, and noise, .* "cane", got 0 of 1 sets distinct'):
        loss(*batch(3))


def test_the_table_has_a_row_for_each_class():
    for loss in (sampled(), sampled().eval(), xs.LinearCrossEntropyLoss(D, N)):
        loss.linear.weight = torch.nn.Parameter(torch.randn(N + 1, D))
        for call in (lambda: loss(torch.randn(2, D), torch.tensor([1, 2])), lambda: loss.topk(torch.randn(2, D), 3)):
            with pytest.raises(ValueError, match=rf"{type(loss).__name__}: expected linear.weight with a row for each of {N} classes"):
                call()


def test_class_weights_of_any_floating_dtype():
    input, target = batch(6)
    loss = sampled(weight=torch.rand(N, dtype=torch.float64))
    want = loss.eval()(input, target)
    loss.weight = loss.weight.float()
    torch.testing.assert_close(loss(input, target), want)


def test_the_estimator_suits_the_sampler():
    """Private independent draws that follow the table: ranking, whose optimum is then the softmax; else an estimate of the normaliser. What is
    named stays."""
    counts = torch.arange(50, 0, -1)
    midx = lambda **options: MidxSampler(50, 8, 4, codewords=4, **options)  # noqa: E731
    for options, want in ((dict(sampler="midx", num_samples=4), "ranking"), (dict(sampler="lsh", num_samples=4), "ranking"),
                          (dict(sampler=midx(), head_classes=5), "ranking"), (dict(sampler="sphere"), "ranking"),
                          (dict(sampler=UnionSampler(UniformSampler(50, 4, shared=False), midx())), "ranking"),
                          (dict(sampler=UnionSampler(UnigramSampler(counts, 8), midx())), "sampled_softmax"),
                          (dict(sampler=midx(distinct=True)), "sampled_softmax"),
                          (dict(sampler="midx", num_samples=4, shared=True), "sampled_softmax"),
                          (dict(sampler="uniform", num_samples=4, shared=False), "sampled_softmax"),
                          (dict(sampler="midx", num_samples=4, estimator="sampled_softmax"), "sampled_softmax")):
        loss = xs.SampledSoftmaxLoss(8, 50, **options)
        assert loss.estimator == want
        assert loss(torch.randn(3, 8), torch.tensor([1, 2, 49])).isfinite()


@pytest.mark.parametrize("make, name, value", [
    (lambda: xs.BeamTreeLoss(4, xs.LabelTree.balanced(20), num_candidates=3, num_noises=1), "beam", 5),
    (lambda: xs.BeamTreeLoss(4, xs.LabelTree.balanced(20), num_candidates=3, num_noises=1), "num_candidates", 2),
    (lambda: xs.CaneLoss(4, 20, candidates=3), "noise_reduction", "log_of_mean"),
    (lambda: xs.TwoTowerLoss(20), "estimator", "ranking"), (lambda: xs.TwoTowerLoss(20), "similarity", "cosine")])
def test_what_other_parts_were_made_with_is_not_assigned(make, name, value):
    with pytest.raises(AttributeError, match=f"expected {name} as an argument of the constructor"):
        setattr(make(), name, value)


@pytest.mark.parametrize("make", [lambda: xs.CaneLoss(4, 20, candidates=3),
                                  lambda: xs.BeamTreeLoss(4, xs.LabelTree.balanced(20), num_candidates=3, num_noises=1)])
def test_an_estimator_without_noise_is_refused_by_cane(make):
    loss = make()
    with pytest.raises(ValueError, match=r"expected estimator to be one of \['cane', 'cane_log_of_mean'\], got 'ranking'"):
        loss.estimator = "ranking"
    loss.estimator = "cane_log_of_mean"


def test_two_tower_reduction_is_followed():
    loss, vectors = xs.TwoTowerLoss(20), torch.randn(3, 4)
    loss.reduction = "none"
    assert loss(vectors, vectors, torch.arange(3)).shape == (3,)
    for made in (lambda: setattr(loss, "reduction", None), lambda: xs.TwoTowerLoss(20, reduction=None)):
        with pytest.raises(ValueError, match="expected reduction to be"):
            made()


@pytest.mark.parametrize("call", [dict(weight=torch.ones(3)), dict(log_z=torch.zeros(2)), dict(z_loss=0.1, estimator="nce")])
@pytest.mark.parametrize("refreshed", [False, True])
def test_a_refused_step_leaves_the_sampler_as_it_was(call, refreshed):
    sampler = xs.samplers.MidxSampler(20, 4, 5, codewords=2)
    loss = xs.SampledSoftmaxLoss(4, 20, sampler=sampler, estimator=call.get("estimator", "sampled_softmax"))
    if refreshed:
        loss(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    if "weight" in call:
        loss.weight = call["weight"]
    elif "log_z" in call:
        loss.log_z = torch.nn.Parameter(call["log_z"])
    else:
        loss.__dict__["_options"] = loss._options + ",z_loss=0.1"
    generator = torch.Generator().manual_seed(0)
    before, state = {name: value.clone() for name, value in sampler.state_dict().items()}, generator.get_state()
    with pytest.raises((ValueError, RuntimeError)):
        loss(torch.randn(3, 4), torch.tensor([0, 1, 2]), generator)
    assert torch.equal(generator.get_state(), state)
    for name, value in sampler.state_dict().items():
        assert torch.equal(value, before[name]), name
