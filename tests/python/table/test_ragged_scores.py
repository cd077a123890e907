"""ragged_scores against plain indexing in float64, its row-sparse gradient, and calls under
autograd, compile, export and autocast."""

import itertools

import pytest
import torch

from score_checks import DTYPES, STRIDED, assert_same, opmath, scores_and_gradients

ops = torch.ops.xsoftmax

COUNTS = (3, 0, 7, 1, 0, 12)  # ids of each query: none for two in the middle, many for the last


def problem(N, D, counts=COUNTS, dtype=torch.float32, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    input, weight = (torch.randn(n, D, generator=g, dtype=torch.float64).to(dtype)
                     for n in (len(counts), N))
    row = torch.randn(N, generator=g, dtype=torch.float64).to(dtype) if bias else None
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    return input, weight, row, torch.randint(N, (sum(counts),), generator=g), offsets


def plain(input, weight, bias, ids, offsets, sparse_grad=False):
    """In float64 for any input dtype; differentiable by autograd."""
    query = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    scores = (input.double()[query] * weight.double()[ids]).sum(-1)
    return scores if bias is None else scores + bias.double()[ids]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("D", [0, 1, 3, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_indexing(impl, dtype, D, bias):
    """23 ids of 9 classes, so classes repeat within and between queries."""
    args = problem(9, D, dtype=dtype, bias=bias)
    want = scores_and_gradients(plain, *args)
    for sparse in (True, False):
        got = scores_and_gradients(ops.ragged_scores, *args, sparse_grad=sparse)
        assert got[2].is_sparse == sparse and (not bias or got[3].is_sparse == sparse)
        assert_same(got, want, dtype)


@pytest.mark.parametrize("N, D, counts", [(7, 5, ()), (7, 5, (0,)), (7, 5, (0, 0, 0)),
                                          (1, 5, (2, 3)), (1, 1, (1,)), (7, 0, (2, 3)),
                                          (300, 33, (0, 900) + 60 * (11, 0, 3)),
                                          (10, 129, 40 * (90,))])
def test_shapes(impl, N, D, counts):
    """No query, no ids, one class, and sizes shared by several threads."""
    args = problem(N, D, counts, torch.float64)
    assert_same(scores_and_gradients(ops.ragged_scores, *args), scores_and_gradients(plain, *args),
                torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_candidate_scores(dtype):
    """With equally many ids for every query the kernels, and so the bits, are the same."""
    args = problem(9, 19, (4, 4, 4), dtype)
    ragged = scores_and_gradients(ops.ragged_scores, *args)
    private = scores_and_gradients(ops.candidate_scores, *args[:3], args[3].view(3, 4), None)
    assert torch.equal(ragged[0], private[0].flatten()) and torch.equal(ragged[1], private[1])
    for a, b in zip(ragged[2:], private[2:]):
        assert torch.equal(a.to_dense(), b.to_dense())


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_subsets_of_gradients(impl, wanted):
    """Gradients are correct, and computed only for inputs that require them."""
    args = problem(9, 7)
    assert_same(scores_and_gradients(ops.ragged_scores, *args, wanted=wanted),
                scores_and_gradients(plain, *args, wanted=wanted), torch.float32)
    grad_input, rows, values, bias_values = ops.ragged_scores_backward(
        torch.ones(23), args[0], args[1], *args[3:], list(wanted))
    assert grad_input.shape == (6 if wanted[0] else 0, 7)
    assert rows.shape == (9 if wanted[1] or wanted[2] else 0,)  # 23 ids, 9 classes
    assert values.shape == (9 if wanted[1] else 0,
                            7) and bias_values.shape == (9 if wanted[2] else 0,)


def test_row_sparse_gradient(impl):
    """min(T, N) sorted rows for any ids; the gradient of a class is in the first of its rows, the
    others are zero."""
    # fewer classes than ids, or more; one class, or many
    for classes, spread in ((9, 1), (9, 9), (23, 5), (40, 40), (40, 1)):
        input, weight, bias, ids, offsets = problem(classes, 7, dtype=torch.float64)
        args = (input, weight, bias, ids % spread, offsets)
        _, _, grad, bias_grad = scores_and_gradients(ops.ragged_scores, *args)
        want = scores_and_gradients(plain, *args)
        for g, dense in ((grad, want[2]), (bias_grad, want[3])):
            assert g.sparse_dim() == 1 and not g.is_coalesced() and g._nnz() == min(
                len(ids), classes)
            rows, values = g._indices()[0], g._values()
            assert (rows.diff() >= 0).all() and set(args[3].tolist()) <= set(rows.tolist())
            first = torch.ones(len(rows), dtype=torch.bool)
            first[1:] = rows[1:] != rows[:-1]
            torch.testing.assert_close(values[first], dense[rows[first]])
            assert (values[~first] == 0).all()


def test_strided(impl):
    """Strided rows and columns, a transposed table and an expanded gradient must not be read as
    contiguous."""
    args = problem(12, 8, dtype=torch.float64)
    want = scores_and_gradients(plain, *args)
    for layout in STRIDED.values():
        moved = [layout(args[0]), layout(args[1])] + [t.repeat_interleave(2)[::2] for t in args[2:]]
        assert not any(t.is_contiguous() for t in moved)
        assert_same(scores_and_gradients(ops.ragged_scores, *moved), want, torch.float64)
    for grad in (torch.ones(1, dtype=torch.float64).expand(23),
                 torch.linspace(0, 1, 46, dtype=torch.float64)[::2]):
        got = ops.ragged_scores_backward(grad, args[0], args[1], *args[3:], [True] * 3)
        same = ops.ragged_scores_backward(grad.contiguous(), args[0], args[1], *args[3:],
                                          [True] * 3)
        for a, b in zip(got, same):
            torch.testing.assert_close(a, b)


def test_gradcheck(impl):
    *tensors, ids, offsets = problem(6, 4, (2, 0, 3), torch.float64)
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *a: ops.ragged_scores(*a, ids, offsets, False), leaves)


def test_no_second_derivative(impl):
    input, weight, _, ids, offsets = problem(6, 4)
    input.requires_grad_()
    scores = ops.ragged_scores(input, weight.requires_grad_(), None, ids, offsets)
    (grad,) = torch.autograd.grad(scores.square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    input, weight, bias, ids, offsets = problem(9, 4, dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
    torch.library.opcheck(ops.ragged_scores.default, (*leaves, ids, offsets, False))
    # aot_dispatch cannot compare sparse gradients, so test_compile does.
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.ragged_scores.default, (*leaves, ids, offsets), test_utils=some)
    for mask in ((True, True, True), (True, False, False), (False, False, True)):
        torch.library.opcheck(
            ops.ragged_scores_backward.default,
            (torch.ones(23, dtype=opmath(dtype)), input, weight, ids, offsets, list(mask)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    """One graph, dense and sparse gradients."""
    for sparse in (False, True):

        def step(input, weight, bias, ids, offsets):
            return ops.ragged_scores(input * 2, weight, bias, ids, offsets, sparse)

        args = problem(9, 7)
        torch._dynamo.reset()
        got = scores_and_gradients(
            torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager"), *args)
        assert_same(got, scores_and_gradients(step, *args), torch.float32)
        assert got[2].is_sparse == sparse


def test_export():
    class Head(torch.nn.Module):
        def forward(self, input, weight, bias, ids, offsets):
            return ops.ragged_scores(input, weight, bias, ids, offsets)

    dims = {"T": torch.export.Dim("T")}
    program = torch.export.export(Head(), problem(9, 7),
                                  dynamic_shapes=(None, None, None, {0: dims["T"]}, None))
    args = problem(9, 7, (1, 2, 3, 4, 5, 6))
    assert torch.equal(program.module()(*args), ops.ragged_scores(*args))


def test_torchscript():
    @torch.jit.script
    def step(input: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor):
        return torch.ops.xsoftmax.ragged_scores(input, weight, None, ids, offsets)

    input, weight, _, ids, offsets = problem(9, 7)
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(step(input, weight, ids, offsets).sum(), weight)
    (want,) = torch.autograd.grad(plain(input, weight, None, ids, offsets).sum(), weight)
    torch.testing.assert_close(grad.to_dense(), want)


def test_autocast():
    """The hidden state is cast to the dtype of the table; the table is never cast."""
    args = problem(9, 7)
    low = args[0].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = scores_and_gradients(ops.ragged_scores, low, *args[1:])
    assert got[0].dtype == torch.float32 and [g.dtype for g in got[1:]
                                              ] == [torch.bfloat16, torch.float32, torch.float32]
    want = scores_and_gradients(ops.ragged_scores, low.float(), *args[1:])
    assert torch.equal(got[0], want[0]) and torch.equal(got[2].to_dense(), want[2].to_dense())
    torch.testing.assert_close(got[1].float(), want[1], rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_give_the_same_bits(same_for_any_threads, dtype):
    args = problem(200, 65, (0, 3000) + 100 * (40, 0, 55), dtype)
    same_for_any_threads(lambda: scores_and_gradients(ops.ragged_scores, *args))


def test_sizes_past_32_bits():
    """Shapes on the meta device only: N D and T exceed 2^31."""
    input, weight = (torch.empty(n, 64, device="meta", requires_grad=True)
                     for n in (1 << 20, 1 << 27))
    ids, offsets = (torch.empty(n, device="meta", dtype=torch.int64)
                    for n in ((1 << 32) + 5, (1 << 20) + 1))
    scores = ops.ragged_scores(input, weight, None, ids, offsets)
    grads = torch.autograd.grad(scores, (input, weight), torch.empty_like(scores))
    assert scores.shape == ids.shape and scores.dtype == torch.float32
    assert grads[0].shape == input.shape and grads[1].shape == weight.shape and grads[1]._nnz(
    ) == 1 << 27


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["input", "weight", "bias"])
def test_not_finite(impl, place, value):
    """NaN and infinity reach only the scores that read them."""
    args = problem(9, 19, dtype=torch.float64)
    args[3][:2] = torch.tensor([0, 4])
    {"input": args[0], "weight": args[1], "bias": args[2]}[place].view(-1)[4] = value
    got, want = ops.ragged_scores(*args), plain(*args)
    assert not want.isfinite().all() and want.isfinite().any()
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("change, error, message", [
    (dict(ids=torch.tensor([0, 1, 9])), IndexError, r"expected ids in \[0, 9\), got 9 at \[2\]"),
    (dict(ids=torch.tensor([0, -1, 2])), IndexError, r"expected ids in \[0, 9\), got -1 at \[1\]"),
    (dict(ids=torch.zeros(3, dtype=torch.int32)), TypeError, "expected ids of dtype int64, got "
     "int32"),
    (dict(ids=torch.zeros(3)), TypeError, "expected ids of dtype int64, got float32"),
    (dict(ids=torch.zeros(3, 1, dtype=torch.int64)), ValueError, "expected ids with 1 dimension,"),
    (dict(ids=torch.zeros(3, dtype=torch.int64, device="meta")), TypeError, "expected ids on "
     "input's device cpu, "
     "got meta"),
    (dict(offsets=torch.tensor([0, 4, 3])), ValueError, r"expected offsets that never fall, got 3 "
     r"after 4 at \[2\]"),
    (dict(offsets=torch.tensor([1, 2, 3])), ValueError, r"expected offsets\[0\] to be 0, got 1"),
    (dict(offsets=torch.tensor([-1, 2, 3])), ValueError, r"expected offsets\[0\] to be 0, got -1"),
    (dict(offsets=torch.tensor([0, 1, 2])), ValueError, r"expected offsets that end at 3 \(the "
     r"number of ids\), got 2"),
    (dict(offsets=torch.tensor([0, 1, 4])), ValueError, r"expected offsets that end at 3 \(the "
     r"number of ids\), got 4"),
    (dict(offsets=torch.tensor([0, 3])), ValueError, r"expected offsets with size 3 \(one more "
     r"than the rows of input\)"),
    (dict(offsets=torch.zeros(0, dtype=torch.int64)), ValueError, "expected offsets with size 3"),
    (dict(offsets=torch.tensor([[0, 2, 3]])), ValueError, "expected offsets with 1 dimension,"),
    (dict(offsets=torch.tensor([0, 2, 3], dtype=torch.int32)), TypeError, "expected offsets of "
     "dtype int64, got int32"),
    (dict(offsets=torch.zeros(3, dtype=torch.int64, device="meta")), TypeError,
     "expected offsets on input's device cpu, got meta"),
    (dict(weight=torch.zeros(9, 5)), ValueError, "expected weight with size 3"),
    (dict(weight=torch.zeros(9, 3, device="meta")), TypeError, "expected weight on input's device "
     "cpu, got meta"),
    (dict(input=torch.zeros(2, 3, dtype=torch.complex64), weight=torch.zeros(
        9, 3, dtype=torch.complex64)), TypeError,
     "expected input of dtype float32, float64, bfloat16 or float16, got complex64"),
    (dict(bias=torch.zeros(8)), ValueError, "expected bias with size 9"),
])
def test_bad_inputs(impl, change, error, message):
    arguments = dict(input=torch.zeros(2, 3), weight=torch.zeros(9, 3), bias=None, ids=torch.zeros(
        3, dtype=torch.int64), offsets=torch.tensor([0, 2, 3])) | change
    with pytest.raises(error, match="ragged_scores: " + message):
        ops.ragged_scores(**arguments)


@pytest.mark.parametrize("change, error, message", [
    (dict(grad=torch.zeros(2)), ValueError, r"expected grad with size 3 \(the number of ids\)"),
    (dict(grad=torch.zeros(3, dtype=torch.float64)), TypeError, "expected grad of dtype float32, "
     "got float64"),
    (dict(ids=torch.tensor([0, 1, 9])), IndexError, r"expected ids in \[0, 9\), got 9 at \[2\]"),
    (dict(offsets=torch.tensor([0, 5, 3])), ValueError, "expected offsets that never fall"),
])
def test_bad_inputs_of_backward(impl, change, error, message):
    arguments = dict(grad=torch.zeros(3), input=torch.zeros(2, 3), weight=torch.zeros(
        9, 3), ids=torch.zeros(3, dtype=torch.int64), offsets=torch.tensor([0, 2, 3]),
                     output_mask=[True, True, True]) | change
    with pytest.raises(error, match=message):
        ops.ragged_scores_backward(**arguments)
