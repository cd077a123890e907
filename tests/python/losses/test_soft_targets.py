"""Soft targets, log-probabilities of given classes, and entropy, against dense logits."""

import copy

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs

N, D, Q, T = 50, 6, 7, 4
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def problem(dtype=torch.float32, bias=True, classes=N):
    torch.manual_seed(0)
    tensors = torch.randn(Q, D), torch.randn(classes, D), torch.randn(classes) if bias else None
    return [None if tensor is None else tensor.to(dtype).requires_grad_() for tensor in tensors]


def soft_target():
    """Includes repeats, both kinds of padding, entries of probability 0, and sums other than 1."""
    torch.manual_seed(1)
    target, prob = torch.randint(N, (Q, T)), torch.rand(Q, T)
    target[0, 1] = target[0, 0]
    target[1, 2], target[2, 0], prob[3, 1] = -100, -1, 0.0
    target[4, :3] = -100
    return target, prob


def dense(target, prob):
    """[Q, N]: probabilities of all classes."""
    known = target.ge(0)
    return torch.zeros(Q, N).scatter_add(1, target.clamp(min=0), prob * known)


def same(values, wants, dtype):
    rtol, atol = {torch.float32: (1e-5, 1e-5),
                  torch.float64: (1e-10, 1e-10)}.get(dtype, (2e-2, 2e-2))
    for value, want in zip(values, wants, strict=True):
        torch.testing.assert_close(value.double(), want.double(), rtol=rtol, atol=atol)


def gradients(value, tensors):
    weights = torch.linspace(.5, 2, value.numel(), dtype=value.dtype).view_as(value)
    return torch.autograd.grad((value * weights).sum(),
                               [tensor for tensor in tensors if tensor is not None],
                               retain_graph=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_prob_and_entropy(impl, dtype, bias):
    """Values are at least float32; gradients of input, table and bias sum over repeated ids."""
    input, weight, bias = tensors = problem(dtype, bias)
    ids = torch.randint(N, (Q, T))
    ids[:, 1] = ids[:, 0]
    wide = [
        None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors
    ]
    log_p = F.log_softmax(F.linear(*wide), -1)
    wants = log_p.gather(1, ids), log_p.gather(1, ids[:, :1])[:, 0], -(log_p.exp() * log_p).sum(1)
    values = (xs.functional.linear_log_prob(input, weight, ids, bias=bias),
              xs.functional.linear_log_prob(input, weight, ids[:, 0], bias=bias),
              xs.functional.linear_entropy(input, weight, bias=bias))
    for value, want in zip(values, wants, strict=True):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)
        found = gradients(value, tensors)
        assert all(gradient.dtype == dtype for gradient in found)
        same(found, gradients(want, wide), dtype)
    same([xs.functional.linear_log_prob(input, weight, bias=bias)], [log_p], torch.float32)


@pytest.mark.parametrize("shape", [(3, 2), (), (0,)])
def test_shapes(shape):
    """Any number of leading dimensions, also none, and no queries."""
    loss = xs.LinearCrossEntropyLoss(D, N, bias=True)
    input, ids = torch.randn(*shape, D), torch.randint(N, (*shape, 5))
    log_p = F.log_softmax(loss.linear(input), -1)
    torch.testing.assert_close(loss.log_prob(input, ids), log_p.gather(-1, ids))
    torch.testing.assert_close(loss.log_prob(input, ids[..., 0]),
                               log_p.gather(-1, ids[..., :1])[..., 0])
    torch.testing.assert_close(loss.entropy(input), -(log_p.exp() * log_p).sum(-1))
    torch.testing.assert_close(loss.log_prob(input), log_p)


def test_entropy_of_masked_classes(impl):
    """A class of score -inf adds nothing and has no gradient."""
    input, weight, bias = problem()
    masked = torch.where(torch.arange(N) % 3 == 0, -torch.inf, bias.detach()).requires_grad_()
    kept = torch.arange(N) % 3 != 0
    want = gradients(xs.functional.linear_entropy(input, weight[kept], bias=bias[kept]), (input,))
    value = xs.functional.linear_entropy(input, weight, bias=masked)
    torch.testing.assert_close(value,
                               xs.functional.linear_entropy(input, weight[kept], bias=bias[kept]))
    found = gradients(value, (input, weight, masked))
    torch.testing.assert_close(found[0], want[0])
    assert found[1].isfinite().all() and not found[1][~kept].any() and not found[2][~kept].any()


def test_large_logits(impl):
    """Scores of thousands, in many blocks of classes, neither lose digits nor overflow."""
    torch.manual_seed(0)
    input, weight = torch.randn(40, 32) * 30, torch.randn(20_000, 32) * 10
    log_p = F.log_softmax(input.double() @ weight.double().T, 1)
    want = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(1)
    torch.testing.assert_close(
        xs.functional.linear_entropy(input, weight).double(), want, rtol=1e-3, atol=1e-3)
    ids = log_p.topk(3).indices
    torch.testing.assert_close(
        xs.functional.linear_log_prob(input, weight, ids).double(), log_p.gather(1, ids), rtol=1e-5,
        atol=2e-3)


def test_threads_give_the_same_bits(same_for_any_threads):
    torch.manual_seed(0)
    input, weight, ids = torch.randn(90, 48), torch.randn(9000, 48), torch.randint(9000, (90, 3))

    def compute():
        x, table = input.clone().requires_grad_(), weight.clone().requires_grad_()
        values = xs.functional.linear_log_prob(x, table,
                                               ids), xs.functional.linear_entropy(x, table)
        return *values, *torch.autograd.grad(values[0].sum() + values[1].sum(), (x, table))

    same_for_any_threads(compute)


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "class_weight"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_soft_loss(impl, dtype, reduction, weights):
    """As F.cross_entropy with probabilities: repeats add up; padding and probability 0 add
    nothing."""
    tensors, (target, prob) = problem(dtype), soft_target()
    class_weight = torch.rand(N) + .5 if weights else None
    loss = xs.functional.linear_cross_entropy(tensors[0], tensors[1], target, bias=tensors[2],
                                              class_weight=class_weight, reduction=reduction,
                                              target_prob=prob)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    want = F.cross_entropy(F.linear(*wide),
                           dense(target, prob).double(),
                           class_weight if class_weight is None else class_weight.double(),
                           reduction=reduction)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    same(gradients(loss, tensors), gradients(want, wide), dtype)


def all_candidates():
    """Every class once, so that the sampled normaliser is exact."""
    return xs.samplers.FixedSampler(N, N)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sampled_soft_loss_of_all_classes(reduction):
    """With every class a candidate, the sampled loss and its gradients are exact."""
    target, prob = soft_target()
    loss = xs.SampledSoftmaxLoss(D, N, sampler=all_candidates(), bias=True, reduction=reduction,
                                 sparse_grad=False)
    x, tables = torch.randn(Q, D, requires_grad=True), tuple(loss.parameters())
    value, want = loss(x, target, target_prob=prob), loss.exact(x, target, prob)
    torch.testing.assert_close(value, want)
    same(gradients(value, (x, *tables)), gradients(want, (x, *tables)), torch.float32)
    torch.testing.assert_close(loss.eval()(x, target, target_prob=prob), want)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sampler", ["uniform", "midx"])
def test_sampled_soft_loss_of_one_class_equals_a_class_target(sampler, shared):
    """T = 1 with probability 1, for draws with and without replacement."""
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, num_samples=9, shared=shared, bias=True,
                                 estimator="sampled_softmax", sparse_grad=False)
    x, target = torch.randn(Q, D), torch.randint(N, (Q, 1))
    target[2] = -100
    results = []
    for soft in (None, torch.ones(Q, 1)):
        torch.manual_seed(3)
        fresh = copy.deepcopy(loss)  # each loss needs its own state of the index
        value = fresh(x, target, target_prob=soft)
        results.append((value.detach(), *torch.autograd.grad(value, tuple(fresh.parameters()))))
    same(results[1], results[0], torch.float32)


def test_sampled_normaliser_is_unbiased():
    """The mean estimate of e^loss is that of the exact normaliser: listed classes count once, and
    hits are removed."""
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=12, shared=False,
                                 estimator="sampled_softmax", reduction="none")
    x, target = torch.randn(1, D), torch.tensor([[3, 8, 20]])
    # the loss is log normaliser - score of class 3
    prob = torch.tensor([[1.0, 0.0, 0.0]]) + 1e-12
    with torch.no_grad():
        drawn = loss(x.expand(20_000, D),
                     target.expand(-1, 3).repeat(20_000, 1), target_prob=prob.repeat(20_000, 1))
        torch.testing.assert_close(drawn.exp().mean(),
                                   loss.exact(x, target, prob)[0].exp(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("change", ["padding", "zero", "split", "order"])
def test_equivalent_soft_targets_give_equal_losses(change):
    """Extra padding, entries of probability 0, a class split in two, and another order."""
    torch.manual_seed(2)
    x, target, prob = torch.randn(3, D), torch.tensor([[4, 9], [7, 3], [1, 30]]), torch.rand(3, 2)
    more, of_more = {
        "padding": (torch.cat([target, torch.tensor([[-1], [-100], [-1]])],
                              1), torch.cat([prob, torch.ones(3, 1)], 1)),
        "zero": (torch.cat([target, torch.tensor([[0], [5], [4]])],
                           1), torch.cat([prob, torch.zeros(3, 1)], 1)),
        "split": (torch.cat([target, target[:, :1]],
                            1), torch.cat([prob * torch.tensor([.25, 1.]), .75 * prob[:, :1]],
                                          1)), "order": (target.flip(1), prob.flip(1))
    }[change]
    for loss in (xs.LinearCrossEntropyLoss(D, N),
                 xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=9)):
        values = []
        for ids, p in ((target, prob), (more, of_more)):
            torch.manual_seed(5)
            value = loss(x, ids, target_prob=p)
            gradient, = torch.autograd.grad(value, loss.linear.weight)
            values.append((value, gradient.to_dense() if gradient.is_sparse else gradient))
        same(values[1], values[0], torch.float32)


def test_listing_all_classes():
    """T = N is a distribution over all classes, not a one-hot target."""
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=5)
    x, target, prob = torch.randn(2, D), torch.arange(N).repeat(2, 1), torch.rand(2, N).softmax(1)
    torch.testing.assert_close(loss(x, target, target_prob=prob),
                               F.cross_entropy(loss.linear(x), prob))
    torch.testing.assert_close(loss.exact(x, target, prob), F.cross_entropy(loss.linear(x), prob))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("training", [True, False], ids=["sampled", "exact"])
@pytest.mark.parametrize("sparse_grad", [True, False])
def test_queries_that_list_no_class(impl, sparse_grad, training, reduction):
    """T = 0: the loss is 0 (the mean NaN) and gradients are zeros, so training continues."""
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=5, bias=True,
                                 sparse_grad=sparse_grad, reduction=reduction).train(training)
    x = torch.randn(Q, D, requires_grad=True)
    value = loss(x, torch.empty(Q, 0, dtype=torch.int64), target_prob=torch.empty(Q, 0))
    assert value.isnan() if reduction == "mean" else not value.any()
    value.sum().backward()
    before = [parameter.detach().clone() for parameter in loss.parameters()]
    assert not x.grad.any() and all(not parameter.grad.to_dense().any()
                                    for parameter in loss.parameters())
    torch.optim.SGD(loss.parameters(), lr=0.1).step()
    assert all(map(torch.equal, before, loss.parameters()))


def test_soft_targets_are_prepared_once():
    """The exact loss checks and builds its targets in one operator call."""
    loss = xs.LinearCrossEntropyLoss(D, N)
    target, prob = soft_target()
    with torch.autograd.profiler.profile() as profile:
        loss(torch.randn(Q, D), target, target_prob=prob)
    names = [event.name for event in profile.function_events]
    assert "xsoftmax::linear_soft_loss" in names and "xsoftmax::soft_targets" not in names


def test_wrong_ids_in_a_backward_pass_are_skipped(impl):
    """They add nothing, and no memory outside the tensors is read or written."""
    input, weight, bias = (tensor.detach() for tensor in problem())
    ids = torch.tensor([[1, 5]]).repeat(Q, 1)
    *_, normalizer = torch.ops.xsoftmax.linear_softmax_forward(input, weight, bias, ids, False, "")
    grad = torch.zeros(Q, 2)

    def gradients_of(ids, grad):
        return torch.ops.xsoftmax.linear_softmax_backward(grad, torch.ones(Q), torch.empty(0),
                                                          input, weight, bias, ids, normalizer,
                                                          torch.empty(0), "", [True, True, True])

    want = gradients_of(ids, grad)
    for wrong in (-1, N, 2**40, -2**62):
        for value, expected in zip(gradients_of(torch.full_like(ids, wrong), grad), want,
                                   strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("name", ["exact", "sampled"])
def test_scripted(name):
    """TorchScript equals eager mode."""
    loss = xs.LinearCrossEntropyLoss(D, N) if name == "exact" else xs.SampledSoftmaxLoss(
        D, N, sampler=all_candidates())
    scripted, (target, prob) = torch.jit.script(loss), soft_target()
    x = torch.randn(Q, D)
    torch.testing.assert_close(scripted(x, target, target_prob=prob),
                               loss(x, target, target_prob=prob))
    torch.testing.assert_close(scripted.entropy(x), loss.entropy(x))
    torch.testing.assert_close(scripted.log_prob(x, target.clamp(min=0)),
                               loss.log_prob(x, target.clamp(min=0)))


def test_compiled():
    """One graph, forward and backward."""
    input, weight, bias = problem()
    ids = torch.randint(N, (Q, T))

    def both(input, weight, bias):
        return xs.functional.linear_log_prob(input, weight, ids,
                                             bias=bias).sum() + xs.functional.linear_entropy(
                                                 input, weight, bias=bias).sum()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(both(input, weight, bias), (input, weight, bias))
    same(torch.autograd.grad(compiled(input, weight, bias), (input, weight, bias)), want,
         torch.float32)


@pytest.mark.parametrize("call, error, message", [
    (lambda loss, x, t, p: loss(x, t, target_prob=p[:, :2]), ValueError, "expected target_prob of "
     "the shape of target"),
    (lambda loss, x, t, p: loss(x, t[:, 0], target_prob=p[:, 0]), ValueError,
     r"expected target of shape \[\*, T\] with target_prob"),
    (lambda loss, x, t, p: loss(x, t, target_prob=p.long()), TypeError, "expected target_prob of "
     "dtype float32"),
    (lambda loss, x, t, p: loss(x, t + N, target_prob=p), IndexError, "target"),
    (lambda loss, x, t, p: loss.log_prob(x, t + N), IndexError, "linear_log_prob: .* ids"),
    (lambda loss, x, t, p: loss.log_prob(x, t.double()), TypeError,
     "linear_log_prob: expected ids"),
    (lambda loss, x, t, p: loss.log_prob(x, t[:3]), ValueError, "linear_log_prob: expected ids of "
     "shape"),
])
@pytest.mark.parametrize("sampled", [False, True])
def test_errors(sampled, call, error, message):
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform",
                                 num_samples=5) if sampled else xs.LinearCrossEntropyLoss(D, N)
    target, prob = torch.randint(N, (Q, T)), torch.rand(Q, T)
    with pytest.raises(error, match=message):
        call(loss, torch.randn(Q, D), target, prob)


def test_options_refused_with_soft_targets():
    target, prob = torch.randint(N, (Q, T)), torch.rand(Q, T)
    for options, message in ((dict(estimator="ranking"), "expected estimator \"sampled_softmax\" "
                              "with target_prob, got \"ranking\""),
                             (dict(label_smoothing=.1), "label_smoothing=0 with target_prob")):
        with pytest.raises(ValueError, match=message):
            xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=5,
                                  **options)(torch.randn(Q, D), target, target_prob=prob)


@pytest.mark.parametrize(
    "transform",
    [dict(logit_scale=2.5),
     dict(softcap=1.5), dict(logit_scale=.3, softcap=2.0)], ids=["scale", "cap", "both"])
def test_transformed_logits(impl, transform):
    """Log-probabilities, entropy, the exact soft loss and gradients use logit_scale and softcap;
    each entry adds its z_loss."""
    input, weight, bias = tensors = problem(torch.float64)
    target, prob = soft_target()
    ids, cap = target.clamp(min=0), transform.get("softcap")
    logits = F.linear(*tensors) * transform.get("logit_scale", 1.0)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    log_p, squares = F.log_softmax(logits, 1), logits.logsumexp(1).square()
    share = dense(target, prob).double()
    wants = log_p.gather(
        1,
        ids), -(log_p.exp() * log_p).sum(1), -(share * log_p).sum(1) + .3 * squares * share.sum(1)
    values = (xs.functional.linear_log_prob(input, weight, ids, bias=bias, **transform),
              xs.functional.linear_entropy(input, weight, bias=bias, **transform),
              xs.functional.linear_cross_entropy(input, weight, target, bias=bias, target_prob=prob,
                                                 reduction="none", z_loss=.3, **transform))
    for value, want in zip(values, wants, strict=True):
        torch.testing.assert_close(value, want)
        same(gradients(value, tensors), gradients(want, tensors), torch.float64)
    torch.testing.assert_close(xs.functional.linear_log_prob(input, weight, bias=bias, **transform),
                               log_p)


def test_modules_with_transformed_logits():
    """Methods of a loss use its options, and the sampled loss of all classes is exact."""
    options = dict(logit_scale=1.7, softcap=3.0, z_loss=.1)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=all_candidates(), sparse_grad=False, **options)
    x, (target, prob) = torch.randn(Q, D), soft_target()
    torch.testing.assert_close(loss(x, target, target_prob=prob), loss.exact(x, target, prob))
    log_p = loss.log_prob(x)
    torch.testing.assert_close(loss.log_prob(x, target.clamp(min=0)),
                               log_p.gather(1, target.clamp(min=0)))
    torch.testing.assert_close(loss.entropy(x), -(log_p.exp() * log_p).sum(1))
    torch.testing.assert_close(loss.exact(x, target[:, 3:], torch.ones(Q, 1)),
                               loss.exact(x, target[:, 3]))
