"""linear_cross_entropy against F.linear + F.cross_entropy: the same value and gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from linear_cross_entropy_checks import assert_same, fused, ops, plain, problem, value_and_gradients

REDUCTIONS = ("none", "mean", "sum")
SMOOTHED = "label_smoothing=0.1"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_the_functional_form_takes_any_batch_shape(reduction, shape):
    input, weight, bias, target, classes = problem(6, 5, 9, torch.float64, class_weight=True,
                                                   ignored=1)
    input, target = (input.view(*shape, 5), target.view(shape)) if shape else (input[3], target[3])

    def functional(input, weight, bias, target):
        return xs.functional.linear_cross_entropy(input, weight, target, bias=bias,
                                                  class_weight=classes, reduction=reduction,
                                                  label_smoothing=0.1)

    def torch_form(input, weight, bias, target):
        logits = F.linear(input, weight, bias).view(-1, 9)
        return F.cross_entropy(logits, target.view(-1), classes, reduction=reduction,
                               label_smoothing=0.1).view(shape if reduction == "none" else ())

    assert_same(value_and_gradients(functional, input, weight, bias, target),
                value_and_gradients(torch_form, input, weight, bias, target), torch.float64)
    with pytest.raises(ValueError, match="expected target of shape"):
        functional(input, weight, bias, target[None])
    with pytest.raises(ValueError, match="expected weight of shape"):
        functional(input, weight[0], bias, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("class_weight", [False, True])
def test_equals_torch(impl, dtype, label_smoothing, class_weight):
    """Every reduction, with and without bias and ignored queries."""
    for reduction, bias, ignored in itertools.product(REDUCTIONS, (False, True), (0, 5)):
        *args, classes = problem(33, 12, 1000, dtype, bias, class_weight, ignored)
        kwargs = dict(class_weight=classes, reduction=reduction, label_smoothing=label_smoothing)
        assert_same(value_and_gradients(fused, *args, **kwargs),
                    value_and_gradients(plain, *args, **kwargs), dtype)


# Sizes around the block width; many blocks in one group or several; Q = 3000 shares a block; some
# of the logits saved; several chunks of queries with a smaller last one, and too many classes for
# chunks.
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 2), (2, 5, 63), (2, 5, 64), (5, 3, 65),
                                   (700, 8, 8193), (700, 300, 1000), (3000, 700, 500),
                                   (6000, 4, 3000), (17, 3, 20000), (290, 3, 100000),
                                   (120, 2, 160000)])
def test_shapes(shape):
    *args, classes = problem(*shape, class_weight=True)
    kwargs = dict(class_weight=classes, label_smoothing=0.1)
    for reduction in ("mean", "none"):
        assert_same(value_and_gradients(fused, *args, reduction=reduction, **kwargs),
                    value_and_gradients(plain, *args, reduction=reduction, **kwargs), scale=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(impl, dtype):
    """The error against float64 is no larger than that of torch in the same dtype."""
    *args, classes = problem(64, 48, 3000, dtype, class_weight=True)
    exact = value_and_gradients(
        plain, *(t if t is None or t.dtype == torch.int64 else t.double() for t in args),
        class_weight=classes.double())
    theirs = value_and_gradients(plain, *args, class_weight=classes)
    ours = value_and_gradients(fused, *args, class_weight=classes)
    assert ours[0].dtype == torch.float32 and all(t.dtype == dtype for t in ours[1:])
    for own, other, truth in zip(ours, theirs, exact):
        error = (own.double() - truth).abs().max()
        assert error <= 1.2 * (other.double() - truth).abs().max() + 1e-6
    assert_same([fused(*args, class_weight=classes.float())], [ours[0]])


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:])
def test_subsets_of_gradients(impl, wanted):
    args = problem(20, 7, 300)[:4]
    assert_same(value_and_gradients(fused, *args, wanted=wanted),
                value_and_gradients(plain, *args, wanted=wanted))


def test_strided_inputs(impl):
    input, weight, bias, target, _ = problem(20, 7, 300)
    layouts = [
        lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
        lambda t: torch.stack([t, t], 2).flatten(1)[:, ::2],
        lambda t: torch.cat([t, t], 1)[:, :t.size(1)]
    ]
    want = value_and_gradients(plain, input, weight, bias, target)
    for layout in layouts:
        got = value_and_gradients(fused, layout(input), layout(weight),
                                  bias.repeat_interleave(2)[::2],
                                  target.repeat_interleave(2)[::2])
        assert_same(got, want)


def test_empty_and_all_ignored(impl):
    for reduction in REDUCTIONS:
        for shape, ignored in (((0, 5, 9), 0), ((4, 5, 9), 4), ((4, 0, 9), 0)):
            *args, classes = problem(*shape, class_weight=True, ignored=ignored)
            for kwargs in ({}, dict(class_weight=classes, label_smoothing=0.1)):
                assert_same(value_and_gradients(fused, *args, reduction=reduction, **kwargs),
                            value_and_gradients(plain, *args, reduction=reduction, **kwargs))


def test_ignore_index_may_be_a_class(impl):
    args = problem(20, 7, 5)[:4]
    kwargs = dict(ignore_index=3, label_smoothing=0.2)
    assert_same(value_and_gradients(fused, *args, **kwargs),
                value_and_gradients(plain, *args, **kwargs))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["input", "weight", "bias"])
def test_not_finite(impl, value, place):
    """Losses and gradients are NaN or infinite where torch's are; a class masked by a bias of -inf
    has probability 0."""
    for label_smoothing in (0.0, 0.1):
        args = problem(6, 7, 300)[:4]
        args[3][:] = torch.tensor([0, 1, 2, 3, 150, 299])
        {"input": args[0], "weight": args[1], "bias": args[2]}[place].view(-1)[5] = value
        kwargs = dict(reduction="none", label_smoothing=label_smoothing)
        got, want = value_and_gradients(fused, *args,
                                        **kwargs), value_and_gradients(plain, *args, **kwargs)
        torch.testing.assert_close(got[0], want[0], equal_nan=True, rtol=1e-5, atol=1e-5)
        for a, b in zip(got[1:], want[1:]):
            assert torch.equal(a.isfinite(), b.isfinite())


def test_all_logits_masked(impl):
    args = problem(3, 2, 70)[:4]
    args[2].fill_(float("-inf"))
    assert fused(*args, reduction="none").isnan().all()
    args[2][40] = 0.0  # the first block is masked, but not the second
    args[3].fill_(40)
    assert_same([fused(*args)], [plain(*args)])


def test_extreme_logits(impl):
    """Logits in the tens of thousands do not overflow, and small probabilities stay accurate."""
    input, weight, bias, target, _ = problem(10, 4, 500)
    for shift in (3e4, -3e4):
        args = input * 100, weight * 100, bias + shift, target
        for label_smoothing in (0.0, 0.1):
            kwargs = dict(reduction="none", label_smoothing=label_smoothing)
            want = value_and_gradients(plain,
                                       *(t.double() if t.is_floating_point() else t for t in args),
                                       **kwargs)
            got = value_and_gradients(fused, *args, **kwargs)
            torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=0.1)
            assert all(t.isfinite().all() for t in got)


def test_a_common_offset_changes_nothing(impl):
    """Logits are multiples of 1/4, exact at any of these offsets, so the results must be equal."""
    bias = torch.randint(-40, 1, (5000,), generator=torch.Generator().manual_seed(0)) / 4
    zeros, target = torch.zeros(3, 1), torch.tensor([0, 1, 2])
    for label_smoothing in (0.0, 0.1):
        results = [
            value_and_gradients(fused, zeros, torch.zeros(5000, 1), bias + offset, target,
                                label_smoothing=label_smoothing)
            for offset in (0.0, 2.0**20, -(2.0**20))
        ]
        for loss, *_, grad_bias in results[1:]:
            torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(grad_bias, results[0][3], rtol=1e-5, atol=1e-9)


def test_gradcheck(impl):
    input, weight, bias, target, classes = problem(4, 3, 70, torch.float64, class_weight=True,
                                                   ignored=1)
    leaves = [t.requires_grad_() for t in (input, weight, bias)]
    for reduction in REDUCTIONS:
        assert torch.autograd.gradcheck(lambda *a: fused(*a, target, classes, reduction, -100, 0.1),
                                        leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_second_derivative(reduction):
    input, weight, bias, target, _ = problem(4, 3, 7)
    input.requires_grad_()
    loss = fused(input, weight.requires_grad_(), bias, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, input, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(200, 32, 9000), (290, 3, 100000)])
def test_threads_give_the_same_bits(same_for_any_threads, shape, reduction):
    *args, classes = problem(*shape, class_weight=True)
    same_for_any_threads(lambda: value_and_gradients(fused, *args, class_weight=classes, reduction=
                                                     reduction, label_smoothing=0.1))


def test_kernel_equals_reference():
    """Their saved states are interchangeable: the impl may change between forward and backward."""
    args = problem(50, 6, 9000)[:4]
    state = ops.linear_cross_entropy_forward(*args, None, SMOOTHED, True)
    ops.set_impl("reference")
    try:
        assert_same(ops.linear_cross_entropy_forward(*args, None, SMOOTHED, True), state)
    finally:
        ops.set_impl("kernel")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(dtype, bias):
    input, weight, row, target, classes = problem(6, 5, 40, dtype, bias, class_weight=True,
                                                  ignored=1)
    leaves = [t if t is None else t.requires_grad_() for t in (input, weight, row)]
    torch.library.opcheck(ops.linear_cross_entropy.default, (*leaves, target, classes, SMOOTHED))
    torch.library.opcheck(ops.linear_cross_entropy.default, (*leaves, target))
    plain_leaves = [t if t is None else t.detach() for t in leaves]
    forward = (*plain_leaves, target, classes, SMOOTHED, True)
    torch.library.opcheck(ops.linear_cross_entropy_forward.default, forward)
    loss, normalizer, saved = ops.linear_cross_entropy_forward(*forward)
    for mask in ([True, True, bias], [False, True, False]):
        torch.library.opcheck(ops.linear_cross_entropy_backward.default,
                              (torch.ones_like(loss), *plain_leaves, target, classes, normalizer,
                               saved, SMOOTHED, mask))
        torch.library.opcheck(
            ops.linear_cross_entropy_with_gradients.default,
            (torch.ones_like(loss), *plain_leaves, target, classes, SMOOTHED, mask))


@pytest.mark.slow
def test_compile_and_export():
    args = problem(6, 5, 40)[:4]

    def step(input, weight, bias, target):
        return fused(input * 2, weight, bias, target, label_smoothing=0.1)

    want = value_and_gradients(step, *args)
    assert_same(value_and_gradients(torch.compile(step, fullgraph=True), *args), want)
    assert_same(
        value_and_gradients(torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager"),
                            *args), want)

    class Head(torch.nn.Module):
        def forward(self, input, weight, bias, target):
            return step(input, weight, bias, target)

    assert_same([torch.export.export(Head(), args).module()(*args)], want[:1])


def test_torchscript():
    @torch.jit.script
    def step(input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor):
        return torch.ops.xsoftmax.linear_cross_entropy(input, weight, None, target)

    input, weight, _, target, _ = problem(6, 5, 40)
    weight.requires_grad_()
    assert_same(torch.autograd.grad(step(input, weight, target), weight),
                torch.autograd.grad(plain(input, weight, None, target), weight))


def test_autocast():
    """Products have the autocast dtype, the loss is float32, and gradients have the dtype of the
    parameters."""
    *args, classes = problem(30, 16, 200, class_weight=True)
    low = [t.bfloat16() for t in args[:3]]

    def cast(*a, **k):
        with torch.autocast("cpu", torch.bfloat16):
            return fused(*a, **k)

    got = value_and_gradients(cast, *args, class_weight=classes)
    assert all(t.dtype == torch.float32 for t in got)
    want = value_and_gradients(fused, *low, args[3], class_weight=classes)
    assert_same(got, [want[0]] + [t.float() for t in want[1:]])


@pytest.mark.parametrize("change, error, message", [
    (dict(target=torch.tensor([0, 9])), IndexError, r"linear_cross_entropy: expected target in "
     r"\[0, 9\) or ignore_index, got 9 at \[1\]"),
    (dict(target=torch.tensor([-1, 0])), IndexError, r"got -1 at \[0\]"),
    (dict(target=torch.tensor([0, 1], dtype=torch.int32)), TypeError, "expected target of dtype "
     "int64, got int32"),
    (dict(target=torch.tensor([0, 1, 2])), ValueError, "expected target with size 2"),
    (dict(target=torch.tensor([[0, 1]])), ValueError, "expected target with 1 dimension"),
    (dict(weight=torch.zeros(9, 5)), ValueError, "expected weight with size 3"),
    (dict(weight=torch.zeros(9, 3, dtype=torch.float64)), TypeError, "expected input of the "
     "table's dtype float64, got "
     "float32: cast the input"),
    (dict(bias=torch.zeros(8)), ValueError, "expected bias with size 9"),
    (dict(class_weight=torch.zeros(8)), ValueError, "expected class_weight with size 9"),
    (dict(options="label_smoothing=1.5"), ValueError, r"expected label_smoothing in \[0, 1\], got "
     r"1.5"),
    (dict(options="reduction=3"), ValueError, "expected reduction to be"),
])
def test_bad_inputs(impl, change, error, message):
    arguments = dict(input=torch.zeros(2, 3), weight=torch.zeros(9, 3), bias=None,
                     target=torch.tensor([0, 1])) | change
    for train in (False, True):
        with pytest.raises(error, match=message):
            ops.linear_cross_entropy(**arguments
                                     | {"input": arguments["input"].clone().requires_grad_(train)})


def test_bad_target_with_class_weights(impl):
    input = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(
            IndexError, match=r"linear_cross_entropy: expected target in \[0, 9\) or "
            r"ignore_index, got 9 at \[1\]"):
        ops.linear_cross_entropy(input, torch.zeros(9, 3), None, torch.tensor([0, 9]),
                                 torch.ones(9))


@pytest.mark.parametrize(
    "grad, error, message",
    [(torch.ones(1), ValueError, "expected grad with size 700"),
     (torch.ones(700, dtype=torch.float64), TypeError, "grad of dtype float32"),
     (torch.ones(700, 1), ValueError, "expected grad with 1 dimension")])
def test_bad_gradients(impl, grad, error, message):
    arguments = torch.zeros(700, 8), torch.zeros(9, 8), None, torch.zeros(
        700, dtype=torch.int64), None, "", [True] * 3
    with pytest.raises(error, match=message):
        ops.linear_cross_entropy_with_gradients(grad, *arguments)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_no_classes(impl, reduction):
    input, weight = torch.randn(2, 3, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    loss = ops.linear_cross_entropy(input, weight, None, torch.full((2,), -100), None,
                                    "reduction=" + reduction)
    loss.sum().backward()
    assert loss.eq(0).all() and input.grad.eq(0).all() and weight.grad.shape == (0, 3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_forward_mode(reduction):
    input, weight, bias, target, _ = problem(4, 3, 7)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        fused(torch.autograd.forward_ad.make_dual(input, torch.ones_like(input)), weight, bias,
              target, reduction=reduction)
