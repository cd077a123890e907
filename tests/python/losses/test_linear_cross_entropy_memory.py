"""linear_cross_entropy never holds [Q, N]: its peak memory, its workspace, and what it saves for
the backward pass."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from linear_cross_entropy_checks import assert_same, fused, ops, plain, problem, value_and_gradients


def test_part_of_the_logits_is_saved():
    """Blocks on both sides of the last saved class must agree."""
    args = problem(1000, 4, 12000)[:4]
    saved = ops.linear_cross_entropy_forward(*args, None, "", True)[2]
    assert 0 < saved.size(1) < 12000 and saved.nbytes <= 40 << 20
    torch.testing.assert_close(saved, F.linear(args[0], args[1][:saved.size(1)]), rtol=1e-4,
                               atol=1e-4)
    assert_same(value_and_gradients(fused, *args, reduction="none"),
                value_and_gradients(plain, *args, reduction="none"), scale=2)
    assert ops.linear_cross_entropy_forward(*args, None, "", False)[2].shape == (1000, 0)


def test_forward_alone_saves_nothing():
    args = problem(20, 7, 300)[:4]
    loss = fused(*args)
    assert not loss.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(fused(*args), loss)
    with torch.no_grad():
        torch.testing.assert_close(fused(args[0].clone().requires_grad_(), *args[1:]), loss)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_retain_graph(impl, reduction):
    """The backward pass does not modify what was saved, so a second one gives the same
    gradients."""
    input, weight, bias, target, _ = problem(4, 3, 7)
    leaves = [t.requires_grad_() for t in (input, weight, bias)]
    loss = fused(*leaves, target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(-3.0))
    assert_same(second, [-3 * t for t in first])


def test_sizes_past_32_bits():
    """Shapes on the meta device only: Q N and N D exceed 2^31."""
    shape = dict(device="meta", dtype=torch.float32)
    input, weight = torch.empty(70000, 64, **shape), torch.empty(1 << 27, 64, requires_grad=True,
                                                                 **shape)
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
    """[Q, N] in float32 would be 168 MB, and torch holds it two to three times. The gradient itself
    is another [N, D]."""
    extra = int(
        subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True,
                       text=True).stdout)
    assert extra - 60000 * 64 * 4 < 64 << 20


@pytest.mark.parametrize("transform", ["", ",logit_scale=0.5,softcap=3.0,z_loss=0.1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_the_loss_in_a_small_workspace(dtype, transform):
    """On CUDA there are several rounds of queries; elsewhere the option has no effect. The results
    equal those of separate passes in float64."""
    input, weight, bias, target, classes = problem(300, 8, 3000, dtype, class_weight=True,
                                                   ignored=5)
    options, grad = f"label_smoothing=0.1,workspace_mb=1{transform}", torch.linspace(0.5, 1.5, 300)
    got = ops.linear_cross_entropy_with_gradients(grad, input, weight, bias, target, classes,
                                                  options, [True] * 3)
    with xs.use_impl("reference"):
        doubles = [tensor.double() for tensor in (grad, input, weight, bias)]
        want = ops.linear_cross_entropy_with_gradients(*doubles, target, classes.double(), options,
                                                       [True] * 3)
    for one, other in zip(got, want):
        tolerance = (3e-5 if dtype == torch.float32 else 1e-2) * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_workspace_of_the_module():
    loss = xs.LinearCrossEntropyLoss(4, 20)
    input, target = torch.randn(3, 4), torch.tensor([0, 5, 19])
    before = loss(input, target)
    loss.workspace_mb = 1
    assert "workspace_mb=1" in loss._exact_options and torch.equal(loss(input, target), before)
    with pytest.raises(
            ValueError, match="LinearCrossEntropyLoss: expected workspace_mb of at "
            "least 1, got 0"):
        loss.workspace_mb = 0


def test_saved_tensor_hooks_keep_what_they_saw():
    input, weight, bias, target, _ = problem(4, 3, 7)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append((t, t.clone())), t)[1],
                                                  lambda t: t):
        loss = fused(input.requires_grad_(), weight.requires_grad_(), bias, target)
    (2 * loss).backward()
    input.grad.zero_()
    assert kept and all(torch.equal(tensor, copy) for tensor, copy in kept)
