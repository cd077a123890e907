"""The exact loss as it runs on a device, where the library reads no values: 16-bit gradients are
computed together with the loss."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from host_cost import count_launches

pytestmark = pytest.mark.usefixtures("on_a_device")


def problem(queries: int, features: int, classes: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    input, weight = (torch.randn(*size, generator=generator).to(dtype)
                     for size in ((queries, features), (classes, features)))
    target = torch.randint(classes, (queries,), generator=generator)
    target[1], input[1] = -100, float("nan")
    return input, weight, torch.randn(classes, generator=generator).to(dtype), target


@pytest.mark.parametrize("options",
                         [{}, {"logit_scale": 3.0, "softcap": 5.0},
                          {"label_smoothing": 0.1, "z_loss": 1e-3}, {"class_weight": True}],
                         ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_value_and_gradients(dtype, reduction, options):
    """Compares with F.cross_entropy in float64. 37 classes, so that rows of products need padding
    for 16-byte alignment; seven queries, processed in parts."""
    options = dict(options)
    input, weight, bias, target = problem(7, 8, 37, dtype)
    class_weight = torch.rand(37, generator=torch.Generator().manual_seed(1)) if options.pop(
        "class_weight", False) else None
    loss = xs.LinearCrossEntropyLoss(8, 37, bias=True, weight=class_weight, reduction=reduction,
                                     **options, dtype=dtype)
    loss.linear.weight.data, loss.linear.bias.data = weight.clone(), bias.clone()
    loss.workspace_mb = 1
    queries = input.clone().requires_grad_()
    value = loss(queries, target)
    factor = torch.linspace(0.5, 2, 7) if reduction == "none" else torch.tensor(3.0)
    (value * factor).sum().backward()

    wide = [tensor.double().nan_to_num(0).requires_grad_() for tensor in (input, weight, bias)]
    logits = F.linear(*wide) * options.get("logit_scale", 1.0)
    logits = options["softcap"] * torch.tanh(logits /
                                             options["softcap"]) if "softcap" in options else logits
    smoothing = options.get("label_smoothing", 0.0)
    expected = F.cross_entropy(logits, target,
                               class_weight.double() if class_weight is not None else None,
                               reduction="none", label_smoothing=smoothing)
    counted = target.ne(-100)
    expected = expected + options.get("z_loss", 0.0) * logits.logsumexp(1).square() * counted
    weights = counted.double(
    ) if class_weight is None else class_weight.double()[target.clamp_min(0)] * counted
    expected = {"mean": expected.sum() / weights.sum(), "sum": expected.sum(),
                "none": expected}[reduction]
    (expected * factor).sum().backward()
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    for got, want in zip((queries.grad, loss.linear.weight.grad, loss.linear.bias.grad), wide):
        torch.testing.assert_close(got.double(), want.grad, rtol=rounding,
                                   atol=rounding * want.grad.abs().max().item())


def test_float16_keeps_gradients_below_its_range():
    """The gradients of a mean over 20,000 queries are too small for float16; a gradient scaler's
    factor restores them."""
    queries, factor = 20_000, 65536.0
    input, weight, _, target = problem(queries, 4, 5, torch.float16)
    input[1] = 0
    loss = xs.LinearCrossEntropyLoss(4, 5, bias=False, dtype=torch.float16)
    loss.linear.weight.data = weight.clone()
    hidden = input.clone().requires_grad_()
    (factor * loss(hidden, target)).backward()
    wide = [tensor.double().requires_grad_() for tensor in (input, weight)]
    (factor * F.cross_entropy(F.linear(*wide), target)).backward()
    assert (wide[0].grad.abs().median() / factor).half() < 1e-4  # fewer than 10 bits would be left
    torch.testing.assert_close(hidden.grad.double(), wide[0].grad, rtol=4e-3,
                               atol=4e-3 * wide[0].grad.abs().max().item())
    torch.testing.assert_close(loss.linear.weight.grad.double(), wide[1].grad, rtol=4e-3,
                               atol=4e-3 * wide[1].grad.abs().max().item())


def peak_bytes(profiled: torch.profiler.profile) -> int:
    """Returns the largest sum of the memory that a profiled function allocated and did not free."""
    changes = [(event.start_ns(), event.nbytes())
               for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        total += change
        most = max(most, total)
    return most


def test_a_step_stays_within_the_workspace_with_its_gradients():
    """They take the same share of the workspace as for 8,192 queries, 131,072 classes, D 256 and
    512 MB."""
    input, weight, _, target = problem(1024, 22, 2048, torch.float32)
    input[1] = 0
    loss = xs.LinearCrossEntropyLoss(22, 2048, bias=False)
    loss.linear.weight.data = weight
    loss.workspace_mb = 1
    hidden = input.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as profiled:
        loss(hidden, target).backward()
    # A few vectors of a number per query come on top.
    assert 0.8 < peak_bytes(profiled) / (1 << 20) < 1.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_launches_little(dtype):
    """Eleven parts, as 8,192 queries, 131,072 classes and D 256 need within 512 MB: four launches
    per part and few others."""
    input, weight, _, target = problem(1024, 22, 2048, dtype)
    loss = xs.LinearCrossEntropyLoss(22, 2048, bias=False, dtype=dtype)
    loss.workspace_mb = 1
    hidden = input.clone().requires_grad_()
    torch.ops.cuda_emulator.let_host_read(True)

    def step() -> None:
        loss.linear.weight.grad = hidden.grad = None
        loss(hidden, target).backward()

    assert 44 < count_launches(step, "cpu") <= 55


def test_memory_stays_within_the_workspace():
    """Independent of the number of classes."""
    input, weight, _, target = problem(16, 2, 300_000, torch.float32)
    input[1] = 0
    loss = xs.LinearCrossEntropyLoss(2, 300_000, bias=False)
    loss.workspace_mb = 2  # the products of one query
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as profiled, torch.no_grad():
        loss(input, target)
    assert max(event.cpu_memory_usage for event in profiled.events()) <= 2 << 20


def test_the_mean_over_no_query_is_no_number():
    """As in F.cross_entropy: for no queries, and for ignored ones."""
    loss = xs.LinearCrossEntropyLoss(4, 7)
    for queries in (0, 3):
        assert loss(torch.randn(queries, 4, requires_grad=True), torch.full((queries,),
                                                                            -100)).isnan()
