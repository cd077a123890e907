"""candidate_scores against plain indexing in float64, and under autograd, compile, export and
autocast."""

import os
import subprocess
import sys

import pytest
import torch

import xsoftmax as xs
from candidate_scores_checks import LAYOUTS, assert_same, coefficient_rounding, ops, plain, problem
from score_checks import DTYPES, STRIDED, opmath, scores_and_gradients


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [0, 1, 3, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_indexing(impl, dtype, D, layout, bias):
    """At least 19 ids of 9 classes, so classes repeat within and between queries, and between
    private and shared."""
    args = problem(5, 9, D, *LAYOUTS[layout], dtype, bias)
    want = scores_and_gradients(plain, *args)
    for sparse in (True, False):
        got = scores_and_gradients(ops.candidate_scores, *args, sparse_grad=sparse)
        assert got[2].is_sparse == sparse and (not bias or got[3].is_sparse == sparse)
        assert_same(got, want, dtype, args, coefficient_rounding(*args))


@pytest.mark.parametrize("shape", [(0, 7, 5, 3, 4), (3, 7, 5, 0, 4), (3, 7, 5, 3, 0),
                                   (3, 7, 5, 0, 0), (0, 7, 5, 0, None), (2, 1, 5, 3, 3),
                                   (1, 1, 1, 1, None), (0, 7, 0, 3, 3), (700, 300, 33, 20, 50),
                                   (40, 10, 129, 90, None)])
def test_shapes(impl, shape):
    """Empty batches and candidate sets, one class, one query, and sizes shared by several
    threads."""
    args = problem(*shape, torch.float64)
    assert_same(scores_and_gradients(ops.candidate_scores, *args),
                scores_and_gradients(plain, *args), torch.float64, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_equals_reference(dtype):
    """For 16-bit tables the composite, which runs on other devices, is a second oracle."""
    args = problem(31, 20, 19, 7, 11, dtype)
    got = scores_and_gradients(ops.candidate_scores, *args, sparse_grad=True)
    with xs.use_impl("reference"):
        want = scores_and_gradients(ops.candidate_scores, *args, sparse_grad=True)
    assert_same(got, want, dtype, args, coefficient_rounding(*args))
    assert torch.equal(got[2]._indices(), want[2]._indices())


def test_strided(impl):
    """Strided rows and columns, a transposed table and an expanded gradient must not be read as
    contiguous."""
    args = problem(6, 12, 8, 3, 4, torch.float64)
    want = scores_and_gradients(plain, *args)
    for layout in STRIDED.values():
        moved = [
            layout(args[0]),
            layout(args[1]), args[2].repeat_interleave(2)[::2],
            layout(args[3]), args[4].repeat_interleave(2)[::2]
        ]
        assert not any(t.is_contiguous() for t in moved)
        assert_same(scores_and_gradients(ops.candidate_scores, *moved), want, torch.float64, args)
    for grad in (torch.ones(1, 1, dtype=torch.float64).expand(6, 7),
                 torch.randn(7, 6, dtype=torch.float64).t()):
        got = ops.candidate_scores_backward(grad, args[0], args[1], *args[3:], [True] * 3)
        same = ops.candidate_scores_backward(grad.contiguous(), args[0], args[1], *args[3:],
                                             [True] * 3)
        for a, b in zip(got, same):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16],
                         ids=str)
def test_rows_that_end_inside_a_load(impl, dtype):
    """Rows are 16 bytes apart but shorter: bytes behind a row must not be used."""
    torch.manual_seed(0)
    wide = torch.full((20, 24), float("nan")).to(dtype)
    wide[:, :21] = torch.randn(20, 21)
    input, ids = torch.randn(6, 21).to(dtype), torch.randint(20, (6, 4))
    grad = torch.randn(6, 4).to(torch.float64 if dtype == torch.float64 else torch.float32)
    results = [(ops.candidate_scores(input, table, None, ids, None),
                ops.candidate_scores_backward(grad, input, table, ids, None,
                                              [True, True, False])[0])
               for table in (wide[:, :21], wide[:, :21].contiguous())]
    for one, other in zip(*results):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype, layout", [(torch.float32, "private"), (torch.float64, "shared"),
                                           (torch.bfloat16, "both"), (torch.float16, "both")])
def test_opcheck(dtype, layout):
    input, weight, bias, own, shared = problem(3, 6, 4, *LAYOUTS[layout], dtype)
    leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
    torch.library.opcheck(ops.candidate_scores.default, (*leaves, own, shared, False))
    # aot_dispatch cannot compare sparse gradients, so test_compile does.
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.candidate_scores.default, (*leaves, own, shared), test_utils=some)
    torch.library.opcheck(ops.candidate_scores.default, (*leaves[:2], None, own, shared, False))
    grad = torch.ones(3,
                      ops.candidate_scores(input, weight, None, own, shared).size(1),
                      dtype=opmath(dtype))
    for mask in ((True, True, True), (True, False, False), (False, False, True)):
        torch.library.opcheck(ops.candidate_scores_backward.default,
                              (grad, input, weight, own, shared, list(mask)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    """One graph, dense and sparse gradients."""
    for sparse in (False, True):

        def step(input, weight, bias, own, shared):
            return ops.candidate_scores(input * 2, weight, bias, own, shared, sparse)

        args = problem(5, 9, 7, 3, 4)
        torch._dynamo.reset()
        got = scores_and_gradients(
            torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager"), *args)
        assert_same(got, scores_and_gradients(step, *args), torch.float32, args)
        assert got[2].is_sparse == sparse


def test_compile_inductor():
    args = problem(5, 9, 7, 3, 4)
    got = scores_and_gradients(torch.compile(ops.candidate_scores.default, fullgraph=True), *args)
    assert_same(got, scores_and_gradients(ops.candidate_scores, *args), torch.float32, args)


def test_export():
    class Head(torch.nn.Module):
        def forward(self, input, weight, bias, own, shared):
            return ops.candidate_scores(input, weight, bias, own, shared)

    dims = {"Q": torch.export.Dim("Q"), "S": torch.export.Dim("S")}
    shapes = ({0: dims["Q"]}, None, None, {0: dims["Q"]}, {0: dims["S"]})
    program = torch.export.export(Head(), problem(5, 9, 7, 3, 4), dynamic_shapes=shapes)
    args = problem(11, 9, 7, 3, 6)
    assert torch.equal(program.module()(*args), ops.candidate_scores(*args))


def test_torchscript():
    @torch.jit.script
    def step(input: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor):
        return torch.ops.xsoftmax.candidate_scores(input, weight, None, None, ids)

    input, weight, _, _, shared = problem(5, 9, 7, None, 4)
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(step(input, weight, shared).sum(), weight)
    (want,) = torch.autograd.grad(plain(input, weight, None, None, shared).sum(), weight)
    torch.testing.assert_close(grad.to_dense(), want)


def test_autocast():
    """The hidden state is cast to the dtype of the table; the table is never cast."""
    args = problem(5, 9, 7, 3, 4)
    low = args[0].bfloat16()

    def cast(*a):
        with torch.autocast("cpu", torch.bfloat16):
            return ops.candidate_scores(*a)

    got = scores_and_gradients(cast, low, *args[1:])
    assert got[0].dtype == torch.float32 and [g.dtype for g in got[1:]
                                              ] == [torch.bfloat16, torch.float32, torch.float32]
    want = scores_and_gradients(ops.candidate_scores, low.float(), *args[1:])
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1].float(), want[1], rtol=2**-8, atol=0)
    torch.testing.assert_close(got[2].to_dense(), want[2].to_dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_give_the_same_bits(same_for_any_threads, dtype):
    """For private candidates; shared ones use a matrix product of torch."""
    args = problem(300, 200, 65, 40, None, dtype)
    same_for_any_threads(lambda: scores_and_gradients(ops.candidate_scores, *args))


def test_sizes_past_32_bits():
    """Shapes on the meta device only: N D, Q P and R exceed 2^31."""
    input, weight = (torch.empty(n, 64, device="meta", requires_grad=True)
                     for n in (1 << 20, 1 << 27))
    own = torch.empty(1 << 20, 1 << 12, device="meta", dtype=torch.int64)
    shared = torch.empty(5, device="meta", dtype=torch.int64)
    scores = ops.candidate_scores(input, weight, None, own, shared, True)
    assert scores.shape == (1 << 20, (1 << 12) + 5) and scores.dtype == torch.float32
    grads = torch.autograd.grad(scores, (input, weight), torch.empty_like(scores))
    assert grads[0].shape == input.shape and grads[1].shape == weight.shape and grads[1]._nnz() == (
        1 << 32) + 5


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["default", "avx2", "avx512"])
def test_instruction_sets(isa):
    """Kernels of each instruction set: vector loops, tails, and both."""
    levels = ["default", "avx2", "avx512"]
    if levels.index(isa) >= levels.index(xs.cpu_capability()):
        pytest.skip("is what this process runs, or more than the CPU has")
    result = subprocess.run([
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__,
        __file__.replace("candidate", "ragged"), "-k",
        "test_equals_indexing and kernel and True and not shared or "
        "test_gradients_too_large"
    ], env={**os.environ, "XSOFTMAX_CPU": isa}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["input", "weight", "bias"])
def test_not_finite(impl, place, value):
    """NaN and infinity reach only the scores that read them."""
    args = problem(4, 9, 19, 3, 5, torch.float64)
    {"input": args[0], "weight": args[1], "bias": args[2]}[place].view(-1)[4] = value
    got, want = ops.candidate_scores(*args), plain(*args)
    assert not want.isfinite().all() and want.isfinite().any()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_rows_of_other_classes_are_not_read(impl):
    input, weight, bias, own, shared = problem(4, 9, 19, 3, 5)
    ids = torch.cat([own.flatten(), shared]) % 4
    weight[4:], bias[4:] = float("nan"), float("nan")
    got = scores_and_gradients(ops.candidate_scores, input, weight, bias, own % 4, shared % 4)
    assert ids.max() < 4 and got[0].isfinite().all() and got[1].isfinite().all(
    ) and got[2].to_dense()[4:].eq(0).all()


@pytest.mark.parametrize("change, error, message", [
    (dict(private_ids=torch.tensor([[0, 1], [2, 9]])), IndexError, r"expected private_ids in \[0, "
     r"9\), got 9 at \[1, 1\]"),
    (dict(private_ids=torch.tensor([[0, 1], [-1, 2]])), IndexError, r"expected private_ids in \[0, "
     r"9\), got -1 at \[1, 0\]"),
    (dict(shared_ids=torch.tensor([0, 1, 1 << 40])), IndexError, r"expected shared_ids in \[0, "
     r"9\), got 1099511627776 at \[2\]"),
    (dict(shared_ids=torch.tensor([-(1 << 40)])), IndexError, r"expected shared_ids in \[0, 9\), "
     r"got -1099511627776 at \[0\]"),
    (dict(private_ids=torch.zeros(2, 1, dtype=torch.int32)), TypeError, "expected private_ids of "
     "dtype int64, got int32"),
    (dict(shared_ids=torch.zeros(2)), TypeError, "expected shared_ids of dtype int64, got float32"),
    (dict(private_ids=torch.zeros(3, 1, dtype=torch.int64)), ValueError, "expected private_ids "
     "with size 2"),
    (dict(private_ids=torch.zeros(2, dtype=torch.int64)), ValueError, "expected private_ids with 2 "
     "dimensions"),
    (dict(shared_ids=torch.zeros(1, 1, dtype=torch.int64)), ValueError, "expected shared_ids with "
     "1 dimension,"),
    (dict(private_ids=None, shared_ids=None), ValueError, "expected private_ids, shared_ids or "
     "both, got neither"),
    (dict(input=torch.zeros(3)), ValueError, "expected input with 2 dimensions"),
    (dict(weight=torch.zeros(9, 5)), ValueError, "expected weight with size 3"),
    (dict(weight=torch.zeros(9)), ValueError, "expected weight with 2 dimensions"),
    (dict(weight=torch.zeros(9, 3, dtype=torch.float64)), TypeError, "expected input of the "
     "table's dtype float64, got "
     "float32: cast the input"),
    (dict(weight=torch.zeros(9, 3, device="meta")), TypeError, "expected weight on input's device "
     "cpu, got meta"),
    (dict(shared_ids=torch.zeros(2, dtype=torch.int64, device="meta")), TypeError,
     "expected shared_ids on input's device cpu, got meta"),
    (dict(input=torch.zeros(2, 3, dtype=torch.complex64), weight=torch.zeros(
        9, 3, dtype=torch.complex64)), TypeError,
     "expected input of dtype float32, float64, bfloat16 or float16, got complex64"),
    (dict(bias=torch.zeros(8)), ValueError, "expected bias with size 9"),
    (dict(bias=torch.zeros(9, dtype=torch.float64)), TypeError, "expected bias of input's dtype "
     "float32"),
    (dict(bias=torch.zeros(9, device="meta")), TypeError, "expected bias on input's device cpu"),
])
def test_bad_inputs(impl, change, error, message):
    arguments = dict(input=torch.zeros(2, 3), weight=torch.zeros(9, 3), bias=None,
                     private_ids=torch.zeros(2, 1, dtype=torch.int64), shared_ids=None) | change
    with pytest.raises(error, match="candidate_scores: " + message):
        ops.candidate_scores(**arguments)
