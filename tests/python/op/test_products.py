"""Matrix products on the CPU.

bfloat16 products with float32 sums, for bfloat16 tables and for float32 tables under
torch.set_float32_matmul_precision("medium"); float32 products in blocks.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs

ops = torch.ops.xsoftmax
needs_bfloat16 = pytest.mark.skipif(xs.cpu_products() != "bfloat16",
                                    reason="this CPU has no fast bfloat16 products")


@pytest.fixture
def medium():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def rounded(x):
    return x.bfloat16().double()


def operands(queries, width, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(queries, width,
                       generator=generator), torch.randn(classes, width, generator=generator)


# Around blocks of 128 rows and 64 columns, tiles of 16, pairs, and 2,048 terms at once.
SHAPES = [(1, 1, 1), (3, 2, 5), (16, 16, 16), (130, 33, 65), (128, 64, 64), (257, 130, 190),
          (5, 4099, 7)]


@needs_bfloat16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("queries, width, classes", SHAPES)
def test_scores_and_gradients_equal_those_of_rounded_operands(medium, queries, width, classes,
                                                              bias):
    """Each of the three products equals that of the rounded operands in float64: only the operands
    are rounded."""
    input, weight = operands(queries, width, classes)
    row = torch.randn(classes) if bias else None
    ids = torch.randperm(classes)
    scores = ops.candidate_scores(input, weight, row, None, ids)
    want = rounded(input) @ rounded(weight)[ids].T + (row[ids] if bias else 0)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-5 * width**.5)
    grad = torch.randn(queries, classes)
    scale = torch.rand(queries)
    of_input, rows, values, _ = ops.candidate_scores_backward(grad, input, weight, None, ids,
                                                              [True, True, False], scale)
    torch.testing.assert_close(of_input.double(),
                               rounded(grad) @ rounded(weight)[ids] * scale[:, None].double(),
                               rtol=1e-5, atol=1e-5 * classes**.5)
    torch.testing.assert_close(values.double(),
                               (rounded(grad).T @ rounded(input * scale[:, None]))[ids.argsort()],
                               rtol=1e-5, atol=1e-5 * queries**.5)
    assert rows.tolist() == list(range(classes)) and values.dtype == torch.float32


@needs_bfloat16
@pytest.mark.parametrize("transposed", [False, True])
def test_scores_of_bfloat16_tables_are_not_rounded(transposed):
    """Products of bfloat16 numbers are exact in float32, and scores are float32."""
    input, weight = (x.bfloat16() for x in operands(70, 40, 90))
    if transposed:  # rows with a larger stride
        weight = torch.cat([weight, weight], 1)[:, :40]
    scores = ops.candidate_scores(input, weight, None, None, torch.arange(90))
    torch.testing.assert_close(scores.double(),
                               input.double() @ weight.double().T, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("queries, width, classes", [(40, 24, 300), (700, 64, 3000)])
def test_the_exact_loss_uses_bfloat16_products_under_medium(medium, queries, width, classes):
    """Loss and gradients differ from float32 by at most two roundings per operand."""
    input, weight = (x.requires_grad_() for x in operands(queries, width, classes))
    with torch.no_grad():
        weight.mul_(.3)
    target = torch.randint(classes, (queries,))
    results = {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        loss = ops.linear_cross_entropy(input, weight, None, target)
        results[precision] = loss, *torch.autograd.grad(loss.mean(), (input, weight))
    for value, want in zip(results["medium"], results["highest"], strict=True):
        assert value.dtype == torch.float32
        assert (value - want).norm() <= 2**-7 * want.norm()
    if xs.cpu_products() == "bfloat16":
        assert not torch.equal(results["medium"][0], results["highest"][0]), "medium has no effect"


@needs_bfloat16
def test_losses_and_topk_use_bfloat16_products_under_medium(medium):
    """Sampled and two-tower losses differ from float32, by no more than the rounding."""
    torch.manual_seed(0)
    input, weight = operands(90, 48, 400)
    target = torch.randint(400, (90,))
    sampled = xs.SampledSoftmaxLoss(48, 400, sampler="uniform", num_samples=64)
    towers = xs.TwoTowerLoss()
    found = {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        torch.manual_seed(3)
        losses = sampled(input, target), towers(input, weight[target],
                                                target), F.cross_entropy(input, target % 48)
        found[precision] = torch.stack([loss.detach() for loss in losses
                                        ]), ops.linear_topk(input, weight, None, 5)[0]
    (exact, best), (low, best_low) = found["highest"], found["medium"]
    torch.testing.assert_close(low, exact, rtol=2**-6, atol=2**-6)
    assert (low[:2] != exact[:2]).all() and low[2] == exact[2]
    torch.testing.assert_close(best_low, best, rtol=2**-6, atol=.1)


@needs_bfloat16
def test_threads_give_the_same_bits(medium, same_for_any_threads):
    input, weight = operands(700, 1024, 600)
    target, ids = torch.randint(600, (700,)), torch.randint(600, (500,))

    def compute():
        x, table = input.clone().requires_grad_(), weight.clone().requires_grad_()
        scores = ops.candidate_scores(x, table, None, None, ids)
        loss = ops.linear_cross_entropy(x, table, None, target)
        return scores, loss, *torch.autograd.grad(
            scores.logsumexp(1).sum() + loss.sum(), (x, table))

    same_for_any_threads(compute)


@needs_bfloat16
def test_products_without_queries_or_candidates(medium):
    input, weight = operands(4, 6, 5)
    none = torch.empty(0, dtype=torch.int64)
    assert ops.candidate_scores(input, weight, None, None, none).shape == (4, 0)
    assert ops.candidate_scores(input[:0], weight, None, None, torch.arange(5)).shape == (0, 5)
    of_input, _, values, _ = ops.candidate_scores_backward(torch.empty(4, 0), input, weight, None,
                                                           none, [True, True, False], None)
    assert torch.equal(of_input, torch.zeros(4, 6)) and values.shape == (0, 6)


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment},
                          capture_output=True, text=True)


@pytest.mark.slow
def test_xsoftmax_products_selects_the_products():
    """An unknown value is an error when the package is imported."""
    got = run("import xsoftmax as xs; print(xs.cpu_products())", XSOFTMAX_PRODUCTS="float32")
    assert got.stdout.strip() == "float32", got.stderr
    got = run("import xsoftmax", XSOFTMAX_PRODUCTS="float16")
    assert got.returncode != 0
    assert "XSOFTMAX_PRODUCTS: expected float32 or bfloat16, got float16" in got.stderr
    got = run("import xsoftmax as xs; print(xs.cpu_products())", XSOFTMAX_PRODUCTS="bfloat16",
              ONEDNN_MAX_CPU_ISA="AVX2")
    assert got.returncode != 0 and "this CPU has no bfloat16 dot products" in got.stderr


FLOAT32 = """
import torch
import xsoftmax as xs

ops = torch.ops.xsoftmax
for queries, width, classes in {shapes}:
    torch.manual_seed(0)
    input, weight, grad = (torch.randn(*shape) for shape in (
        (queries, width), (classes, width), (queries, classes)))
    ids = torch.randperm(classes)
    found = {{}}
    for threads in (1, 3):
        torch.set_num_threads(threads)
        scores = ops.candidate_scores(input, weight, None, None, ids)
        of_input, _, values, _ = ops.candidate_scores_backward(
            grad, input, weight, None, ids, [True, True, False], None)
        found[threads] = scores, of_input, values
    rows, wide = weight.double()[ids], grad.double()
    wanted = (input.double() @ rows.T, wide @ rows, (wide.T @ input.double())[ids.argsort()])
    for got, want, terms in zip(found[1], wanted, (width, classes, queries)):
        # A sum of k terms of size 1 is rounded by about 2^-24 sqrt(k), once per term, which adds up
        # to a small multiple of 2^-24 k.
        torch.testing.assert_close(got.double(), want, rtol=0, atol=4 * 2.0**-24 * (terms + 8))
    assert not {blocks} or all(map(torch.equal, found[1], found[3])), (queries, width, classes)
print("passed")
"""


@pytest.mark.parametrize("products", ["aten", "blocks"])
def test_float32_products_equal_those_in_float64(products):
    """By ATen and in blocks; blocks give the same bits for any number of threads."""
    shapes = [*SHAPES, (16, 1100, 20), (700, 256, 512)]
    got = run(FLOAT32.format(shapes=shapes, blocks=products == "blocks"),
              XSOFTMAX_FLOAT32_PRODUCTS=products)
    if "this CPU has no kernel for blocks" in got.stderr:
        pytest.skip("this CPU has no kernel for blocks")
    assert got.stdout.strip() == "passed", got.stderr


def test_an_unknown_xsoftmax_float32_products_is_refused():
    got = run("import xsoftmax", XSOFTMAX_FLOAT32_PRODUCTS="mkl")
    assert got.returncode != 0
    assert "XSOFTMAX_FLOAT32_PRODUCTS: expected aten or blocks, got mkl" in got.stderr
