"""linear_topk against log_softmax + topk, with ties broken by the lower class."""

import pytest
import torch
import torch.nn.functional as F

import xsoftmax  # noqa: F401

ops = torch.ops.xsoftmax


def problem(Q, D, N, dtype=torch.float32, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(Q, D, generator=g).to(dtype), torch.randn(N, D, generator=g).to(dtype),
            torch.randn(N, generator=g).to(dtype) if bias else None)


def expected(input, weight, bias, k):
    """A stable sort leaves the lower of equal classes first."""
    values, indices = F.log_softmax(F.linear(input, weight, bias),
                                    -1).sort(dim=1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape, k", [((1, 1, 1), 1), ((5, 3, 63), 63), ((5, 3, 65), 7),
                                      ((3, 8, 20000), 100), ((700, 16, 9000), 5),
                                      ((2000, 4, 1000), 150), ((2, 3, 9), 0), ((0, 3, 9), 2),
                                      ((4, 0, 9), 3)])
def test_equals_torch(impl, shape, k, bias):
    args = problem(*shape, torch.float64, bias)
    values, indices = ops.linear_topk(*args, k)
    want_values, want_indices = expected(*args, k)
    torch.testing.assert_close(values, want_values, rtol=1e-10, atol=1e-10)
    assert torch.equal(indices, want_indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(impl, dtype):
    """Values belong to the classes that are named, and are the largest, up to the rounding of a
    product."""
    args = problem(50, 24, 9000, dtype)
    values, indices = ops.linear_topk(*args, 10)
    assert values.dtype == torch.float32 and indices.dtype == torch.int64
    exact = F.log_softmax(F.linear(*(t.double() for t in args)), -1)
    # AMX rounds logits to bfloat16
    error = 1e-4 if ops.cpu_capability() != "avx512" or dtype != torch.bfloat16 else 0.2
    torch.testing.assert_close(values.double(), exact.gather(1, indices), rtol=0, atol=error)
    torch.testing.assert_close(values.double(), exact.topk(10).values, rtol=0, atol=error)
    assert (values.diff(dim=1) <= 0).all()


def test_ties(impl):
    """Whole-number logits tie often, also across blocks and groups of blocks."""
    g = torch.Generator().manual_seed(1)
    input, weight = torch.randint(-2, 3, (20, 3),
                                  generator=g).float(), torch.randint(-2, 3, (9000, 3),
                                                                      generator=g).float()
    _, indices = ops.linear_topk(input, weight, None, 50)
    logits = F.linear(input, weight)
    assert torch.equal(indices, logits.sort(dim=1, descending=True, stable=True).indices[:, :50])
    assert torch.equal(
        ops.linear_topk(torch.zeros(2, 3), weight, None, 4)[1],
        torch.arange(4).expand(2, 4))


def test_masked_and_not_finite(impl):
    input, weight, bias = problem(4, 3, 300)
    bias[:] = float("-inf")
    bias[[7, 250]] = 0.0
    values, indices = ops.linear_topk(input, weight, bias, 4)
    assert values[:, :2].isfinite().all() and (values[:, 2:] == float("-inf")).all()
    assert torch.equal(indices[:, :2].sort().values, torch.tensor([7, 250]).expand(4, 2))
    assert torch.equal(indices[:, 2:], torch.tensor([0, 1]).expand(4, 2))
    input[1, 0] = float("nan")
    input[2] *= float("inf")
    values, indices = ops.linear_topk(input, weight, None, 4)
    assert values[1:3].isnan().all() and values[[0, 3]].isfinite().all()
    assert torch.equal(indices[1:3], torch.arange(4).expand(2, 4))


def test_strided_inputs(impl):
    input, weight, bias = problem(6, 5, 300, torch.float64)
    want = expected(input, weight, bias, 3)
    for layout in (lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 0)[::2]):
        values, indices = ops.linear_topk(layout(input), layout(weight), layout(bias[None])[0], 3)
        torch.testing.assert_close(values, want[0])
        assert torch.equal(indices, want[1])


def test_threads_give_the_same_bits(same_for_any_threads):
    for args in (problem(100, 16, 9000), [t.round() for t in problem(100, 2, 9000)]):  # with ties
        same_for_any_threads(lambda args=args: ops.linear_topk(*args, 20))


def test_outputs_take_no_part_in_autograd():
    input, weight, bias = problem(4, 3, 20)
    values, _ = ops.linear_topk(input.requires_grad_(), weight.requires_grad_(), bias, 2)
    assert not values.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    torch.library.opcheck(ops.linear_topk.default, (*problem(4, 3, 20, dtype), 5))


def test_compile_export_script_autocast():
    args = problem(4, 3, 20)

    class Best(torch.nn.Module):
        def forward(self, input, weight, bias):
            return torch.ops.xsoftmax.linear_topk(input, weight, bias, 5)

    want = ops.linear_topk(*args, 5)
    compiled = torch.compile(Best(), fullgraph=True, backend="aot_eager")
    for module in (compiled, torch.export.export(Best(), args).module(), torch.jit.script(Best())):
        assert all(torch.equal(a, b) for a, b in zip(module(*args), want))
    with torch.autocast("cpu", torch.bfloat16):
        low = ops.linear_topk(*args, 5)
    want = ops.linear_topk(*(t.bfloat16() for t in args), 5)
    assert low[0].dtype == torch.float32 and all(torch.equal(a, b) for a, b in zip(low, want))


def test_meta_sizes_past_32_bits():
    values, indices = ops.linear_topk(torch.empty(70000, 64, device="meta"),
                                      torch.empty(1 << 27, 64, device="meta"), None, 100)
    assert values.shape == indices.shape == (70000, 100)


@pytest.mark.parametrize("k, message", [(10, r"linear_topk: expected k of at most 9 \(the rows of "
                                         r"weight\), got 10"),
                                        (-1, "linear_topk: expected k >= 0, got -1")])
def test_bad_k(impl, k, message):
    with pytest.raises(ValueError, match=message):
        ops.linear_topk(*problem(2, 3, 9), k)
