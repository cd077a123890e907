"""linear_cross_entropy against F.linear + F.cross_entropy, whose value and gradients it must give without ever holding [Q, N]."""

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from xsoftmax._options import option_text

ops = torch.ops.xsoftmax
REDUCTIONS = ("none", "mean", "sum")
SMOOTHED = "label_smoothing=0.1"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def fused(input, weight, bias, target, class_weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    options = option_text(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return ops.linear_cross_entropy(input, weight, bias, target, class_weight, options)


def plain(input, weight, bias, target, class_weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    return F.cross_entropy(F.linear(input, weight, bias), target, class_weight, reduction=reduction, ignore_index=ignore_index,
                           label_smoothing=label_smoothing)


def problem(Q, D, N, dtype=torch.float32, bias=True, class_weight=False, ignored=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    input = torch.randn(Q, D, generator=g, dtype=torch.float64).to(dtype)
    weight = (torch.randn(N, D, generator=g, dtype=torch.float64) * 0.5).to(dtype)
    row = torch.randn(N, generator=g, dtype=torch.float64).to(dtype) if bias else None
    target = torch.randint(N, (Q,), generator=g)
    target[:ignored] = -100
    classes = (torch.rand(N, generator=g, dtype=torch.float64) + 0.1).to(dtype) if class_weight else None
    return input, weight, row, target, classes


def value_and_gradients(function, input, weight, bias, target, *args, wanted=(True, True, True), **kwargs):
    leaves = [t if t is None else t.detach().requires_grad_(w) for t, w in zip((input, weight, bias), wanted)]
    loss = function(*leaves, target, *args, **kwargs)
    loss.backward(torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape))
    return [loss.detach()] + [None if leaf is None else leaf.grad for leaf in leaves]


def assert_same(got, want, dtype=torch.float32, scale=1.0):
    rtol = {torch.float64: 1e-10, torch.float32: 3e-5}[dtype] * scale
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            # With one class a gradient is the difference of two equal terms of about 1: zero, but for the rounding of one of them.
            limit = torch.finfo(b.dtype).eps + rtol * (b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0)
            torch.testing.assert_close(a, b, rtol=rtol, atol=limit, equal_nan=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_the_functional_form_takes_any_shape_and_vectors_with_gradients(reduction, shape):
    input, weight, bias, target, classes = problem(6, 5, 9, torch.float64, class_weight=True, ignored=1)
    input, target = (input.view(*shape, 5), target.view(shape)) if shape else (input[3], target[3])

    def functional(input, weight, bias, target):
        return xs.functional.linear_cross_entropy(input, weight, target, bias=bias, class_weight=classes, reduction=reduction, label_smoothing=0.1)

    def torch_form(input, weight, bias, target):
        logits = F.linear(input, weight, bias).view(-1, 9)
        return F.cross_entropy(logits, target.view(-1), classes, reduction=reduction, label_smoothing=0.1).view(shape if reduction == "none" else ())

    assert_same(value_and_gradients(functional, input, weight, bias, target), value_and_gradients(torch_form, input, weight, bias, target), torch.float64)
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
        assert_same(value_and_gradients(fused, *args, **kwargs), value_and_gradients(plain, *args, **kwargs), dtype)


# Around the step of block widths, many blocks of one group or several; Q (Q 3000: a shared block); a part of the logits saved;
# several chunks of queries, the last one smaller, and too many classes for that.
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 2), (2, 5, 63), (2, 5, 64), (5, 3, 65), (700, 8, 8193), (700, 300, 1000),
                                   (3000, 700, 500), (6000, 4, 3000), (17, 3, 20000), (290, 3, 100000), (120, 2, 160000)])
def test_shapes(shape):
    *args, classes = problem(*shape, class_weight=True)
    kwargs = dict(class_weight=classes, label_smoothing=0.1)
    for reduction in ("mean", "none"):
        assert_same(value_and_gradients(fused, *args, reduction=reduction, **kwargs),
                    value_and_gradients(plain, *args, reduction=reduction, **kwargs), scale=2)


def test_part_of_the_logits_is_saved():
    """Blocks on both sides of the last saved class must agree."""
    args = problem(1000, 4, 12000)[:4]
    saved = ops.linear_cross_entropy_forward(*args, None, "", True)[2]
    assert 0 < saved.size(1) < 12000 and saved.nbytes <= 40 << 20
    torch.testing.assert_close(saved, F.linear(args[0], args[1][:saved.size(1)]), rtol=1e-4, atol=1e-4)
    assert_same(value_and_gradients(fused, *args, reduction="none"), value_and_gradients(plain, *args, reduction="none"), scale=2)
    assert ops.linear_cross_entropy_forward(*args, None, "", False)[2].shape == (1000, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(impl, dtype):
    """No further from the float64 result of the same inputs than torch's own low-precision result."""
    *args, classes = problem(64, 48, 3000, dtype, class_weight=True)
    exact = value_and_gradients(plain, *(t if t is None or t.dtype == torch.int64 else t.double() for t in args),
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
    assert_same(value_and_gradients(fused, *args, wanted=wanted), value_and_gradients(plain, *args, wanted=wanted))


def test_forward_alone_saves_nothing():
    args = problem(20, 7, 300)[:4]
    loss = fused(*args)
    assert not loss.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(fused(*args), loss)
    with torch.no_grad():
        torch.testing.assert_close(fused(args[0].clone().requires_grad_(), *args[1:]), loss)


def test_strided_inputs(impl):
    input, weight, bias, target, _ = problem(20, 7, 300)
    layouts = [lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
               lambda t: torch.stack([t, t], 2).flatten(1)[:, ::2], lambda t: torch.cat([t, t], 1)[:, :t.size(1)]]
    want = value_and_gradients(plain, input, weight, bias, target)
    for layout in layouts:
        got = value_and_gradients(fused, layout(input), layout(weight), bias.repeat_interleave(2)[::2],
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
    assert_same(value_and_gradients(fused, *args, **kwargs), value_and_gradients(plain, *args, **kwargs))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["input", "weight", "bias"])
def test_not_finite(impl, value, place):
    """The same losses and gradients are NaN or infinite; a class masked by a bias of -inf just gets no probability."""
    for label_smoothing in (0.0, 0.1):
        args = problem(6, 7, 300)[:4]
        args[3][:] = torch.tensor([0, 1, 2, 3, 150, 299])
        {"input": args[0], "weight": args[1], "bias": args[2]}[place].view(-1)[5] = value
        kwargs = dict(reduction="none", label_smoothing=label_smoothing)
        got, want = value_and_gradients(fused, *args, **kwargs), value_and_gradients(plain, *args, **kwargs)
        torch.testing.assert_close(got[0], want[0], equal_nan=True, rtol=1e-5, atol=1e-5)
        for a, b in zip(got[1:], want[1:]):
            assert torch.equal(a.isfinite(), b.isfinite())


def test_all_logits_masked(impl):
    args = problem(3, 2, 70)[:4]
    args[2].fill_(float("-inf"))
    assert fused(*args, reduction="none").isnan().all()
    args[2][40] = 0.0 # all of the first block is masked, not the second
    args[3].fill_(40)
    assert_same([fused(*args)], [plain(*args)])


def test_extreme_logits(impl):
    """Logits in the tens of thousands: no overflow, and p is still relative to the largest."""
    input, weight, bias, target, _ = problem(10, 4, 500)
    for shift in (3e4, -3e4):
        args = input * 100, weight * 100, bias + shift, target
        for label_smoothing in (0.0, 0.1):
            kwargs = dict(reduction="none", label_smoothing=label_smoothing)
            want = value_and_gradients(plain, *(t.double() if t.is_floating_point() else t for t in args), **kwargs)
            got = value_and_gradients(fused, *args, **kwargs)
            torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=0.1)
            assert all(t.isfinite().all() for t in got)


def test_a_common_offset_changes_nothing(impl):
    """Logits are whole quarters, exact at any of these offsets: so must be what depends on their differences alone."""
    bias = torch.randint(-40, 1, (5000,), generator=torch.Generator().manual_seed(0)) / 4
    zeros, target = torch.zeros(3, 1), torch.tensor([0, 1, 2])
    for label_smoothing in (0.0, 0.1):
        results = [value_and_gradients(fused, zeros, torch.zeros(5000, 1), bias + offset, target, label_smoothing=label_smoothing)
                   for offset in (0.0, 2.0**20, -(2.0**20))]
        for loss, *_, grad_bias in results[1:]:
            torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(grad_bias, results[0][3], rtol=1e-5, atol=1e-9)


def test_gradcheck(impl):
    input, weight, bias, target, classes = problem(4, 3, 70, torch.float64, class_weight=True, ignored=1)
    leaves = [t.requires_grad_() for t in (input, weight, bias)]
    for reduction in REDUCTIONS:
        assert torch.autograd.gradcheck(lambda *a: fused(*a, target, classes, reduction, -100, 0.1), leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_second_derivative(reduction):
    input, weight, bias, target, _ = problem(4, 3, 7)
    input.requires_grad_()
    loss = fused(input, weight.requires_grad_(), bias, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, input, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_retain_graph(impl, reduction):
    """What is saved is read, not used up."""
    input, weight, bias, target, _ = problem(4, 3, 7)
    leaves = [t.requires_grad_() for t in (input, weight, bias)]
    loss = fused(*leaves, target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(-3.0))
    assert_same(second, [-3 * t for t in first])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(200, 32, 9000), (290, 3, 100000)])
def test_threads_give_the_same_bits(same_for_any_threads, shape, reduction):
    *args, classes = problem(*shape, class_weight=True)
    same_for_any_threads(lambda: value_and_gradients(fused, *args, class_weight=classes, reduction=reduction, label_smoothing=0.1))


def test_kernel_equals_reference():
    """Their states are interchangeable: the impl may change between forward and backward."""
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
    input, weight, row, target, classes = problem(6, 5, 40, dtype, bias, class_weight=True, ignored=1)
    leaves = [t if t is None else t.requires_grad_() for t in (input, weight, row)]
    torch.library.opcheck(ops.linear_cross_entropy.default, (*leaves, target, classes, SMOOTHED))
    torch.library.opcheck(ops.linear_cross_entropy.default, (*leaves, target))
    plain_leaves = [t if t is None else t.detach() for t in leaves]
    forward = (*plain_leaves, target, classes, SMOOTHED, True)
    torch.library.opcheck(ops.linear_cross_entropy_forward.default, forward)
    loss, normalizer, saved = ops.linear_cross_entropy_forward(*forward)
    for mask in ([True, True, bias], [False, True, False]):
        torch.library.opcheck(ops.linear_cross_entropy_backward.default,
                              (torch.ones_like(loss), *plain_leaves, target, classes, normalizer, saved, SMOOTHED, mask))
        torch.library.opcheck(ops.linear_cross_entropy_with_gradients.default,
                              (torch.ones_like(loss), *plain_leaves, target, classes, SMOOTHED, mask))


def test_compile_and_export():
    args = problem(6, 5, 40)[:4]

    def step(input, weight, bias, target):
        return fused(input * 2, weight, bias, target, label_smoothing=0.1)

    want = value_and_gradients(step, *args)
    assert_same(value_and_gradients(torch.compile(step, fullgraph=True), *args), want)
    assert_same(value_and_gradients(torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager"), *args), want)

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
    """Products of the autocast dtype, a float32 loss, gradients of the parameters' dtype."""
    *args, classes = problem(30, 16, 200, class_weight=True)
    low = [t.bfloat16() for t in args[:3]]

    def cast(*a, **k):
        with torch.autocast("cpu", torch.bfloat16):
            return fused(*a, **k)

    got = value_and_gradients(cast, *args, class_weight=classes)
    assert all(t.dtype == torch.float32 for t in got)
    want = value_and_gradients(fused, *low, args[3], class_weight=classes)
    assert_same(got, [want[0]] + [t.float() for t in want[1:]])


def test_sizes_past_32_bits():
    """Shapes only: Q N and N D pass 2^31."""
    shape = dict(device="meta", dtype=torch.float32)
    input, weight = torch.empty(70000, 64, **shape), torch.empty(1 << 27, 64, requires_grad=True, **shape)
    loss = fused(input, weight, None, torch.empty(70000, device="meta", dtype=torch.int64))
    (grad,) = torch.autograd.grad(loss, weight)
    assert loss.shape == () and grad.shape == weight.shape


PEAK = """
import resource, torch, xsoftmax
torch.manual_seed(0)
Q, D, N = 700, 64, 60000
input, weight = torch.randn(Q, D).requires_grad_(), torch.randn(N, D).requires_grad_()
target = torch.randint(N, (Q,))
op = torch.ops.xsoftmax.linear_cross_entropy
op(input[:4], weight[:64], None, target[:4] % 64).backward() # libraries and gradient buffers
input.grad.zero_(), weight.grad.fill_(0.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
op(input, weight, None, target).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_peak_memory():
    """[Q, N] in float32 would be 168 MB, and torch holds it two to three times. The gradient itself is another [N, D]."""
    extra = int(subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True).stdout)
    assert extra - 60000 * 64 * 4 < 64 << 20


@pytest.mark.parametrize("change, error, message", [
    (dict(target=torch.tensor([0, 9])), IndexError, r"linear_cross_entropy: expected target in \[0, 9\) or ignore_index, got 9 at \[1\]"),
    (dict(target=torch.tensor([-1, 0])), IndexError, r"got -1 at \[0\]"),
    (dict(target=torch.tensor([0, 1], dtype=torch.int32)), TypeError, "expected target of dtype int64, got int32"),
    (dict(target=torch.tensor([0, 1, 2])), ValueError, "expected target with size 2"),
    (dict(target=torch.tensor([[0, 1]])), ValueError, "expected target with 1 dimension"),
    (dict(weight=torch.zeros(9, 5)), ValueError, "expected weight with size 3"),
    (dict(weight=torch.zeros(9, 3, dtype=torch.float64)), TypeError, "expected input of the table's dtype float64, got float32: cast the input"),
    (dict(bias=torch.zeros(8)), ValueError, "expected bias with size 9"),
    (dict(class_weight=torch.zeros(8)), ValueError, "expected class_weight with size 9"),
    (dict(options="label_smoothing=1.5"), ValueError, r"expected label_smoothing in \[0, 1\], got 1.5"),
    (dict(options="reduction=3"), ValueError, "expected reduction to be"),
])
def test_bad_inputs(impl, change, error, message):
    arguments = dict(input=torch.zeros(2, 3), weight=torch.zeros(9, 3), bias=None, target=torch.tensor([0, 1])) | change
    for train in (False, True):
        with pytest.raises(error, match=message):
            ops.linear_cross_entropy(**arguments | {"input": arguments["input"].clone().requires_grad_(train)})


@pytest.mark.parametrize("transform", ["", ",logit_scale=0.5,softcap=3.0,z_loss=0.1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_the_loss_in_a_small_workspace(dtype, transform):
    """Several rounds of queries on CUDA; elsewhere the option changes nothing. They equal the loss and then its gradients, in float64."""
    input, weight, bias, target, classes = problem(300, 8, 3000, dtype, class_weight=True, ignored=5)
    options, grad = f"label_smoothing=0.1,workspace_mb=1{transform}", torch.linspace(0.5, 1.5, 300)
    got = ops.linear_cross_entropy_with_gradients(grad, input, weight, bias, target, classes, options, [True] * 3)
    with xs.use_impl("reference"):
        doubles = [tensor.double() for tensor in (grad, input, weight, bias)]
        want = ops.linear_cross_entropy_with_gradients(*doubles, target, classes.double(), options, [True] * 3)
    for one, other in zip(got, want):
        tolerance = (3e-5 if dtype == torch.float32 else 1e-2) * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_workspace_of_the_module():
    loss = xs.LinearCrossEntropyLoss(4, 20)
    input, target = torch.randn(3, 4), torch.tensor([0, 5, 19])
    before = loss(input, target)
    loss.workspace_mb = 1
    assert "workspace_mb=1" in loss._exact_options and torch.equal(loss(input, target), before)
    with pytest.raises(ValueError, match="LinearCrossEntropyLoss: expected workspace_mb of at least 1, got 0"):
        loss.workspace_mb = 0


def test_bad_target_beside_class_weights(impl):
    input = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(IndexError, match=r"linear_cross_entropy: expected target in \[0, 9\) or ignore_index, got 9 at \[1\]"):
        ops.linear_cross_entropy(input, torch.zeros(9, 3), None, torch.tensor([0, 9]), torch.ones(9))


@pytest.mark.parametrize("grad, error, message", [
    (torch.ones(1), ValueError, "expected grad with size 700"), (torch.ones(700, dtype=torch.float64), TypeError, "grad of dtype float32"),
    (torch.ones(700, 1), ValueError, "expected grad with 1 dimension")])
def test_bad_gradients(impl, grad, error, message):
    arguments = torch.zeros(700, 8), torch.zeros(9, 8), None, torch.zeros(700, dtype=torch.int64), None, "", [True] * 3
    with pytest.raises(error, match=message):
        ops.linear_cross_entropy_with_gradients(grad, *arguments)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_no_classes(impl, reduction):
    input, weight = torch.randn(2, 3, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    loss = ops.linear_cross_entropy(input, weight, None, torch.full((2,), -100), None, "reduction=" + reduction)
    loss.sum().backward()
    assert loss.eq(0).all() and input.grad.eq(0).all() and weight.grad.shape == (0, 3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_forward_mode(reduction):
    input, weight, bias, target, _ = problem(4, 3, 7)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        fused(torch.autograd.forward_ad.make_dual(input, torch.ones_like(input)), weight, bias, target, reduction=reduction)


def test_saved_tensor_hooks_keep_what_they_saw():
    input, weight, bias, target, _ = problem(4, 3, 7)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append((t, t.clone())), t)[1], lambda t: t):
        loss = fused(input.requires_grad_(), weight.requires_grad_(), bias, target)
    (2 * loss).backward()
    input.grad.zero_()
    assert kept and all(torch.equal(tensor, copy) for tensor, copy in kept)
