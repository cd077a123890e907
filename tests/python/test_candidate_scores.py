"""candidate_scores against plain indexing in float64, its row-sparse gradient, and the ways torch calls an op."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xsoftmax as xs
from score_checks import DTYPES, ROUNDING, opmath, scores_and_gradients

ops = torch.ops.xsoftmax


def problem(Q, N, D, P, S, dtype=torch.float32, bias=True, seed=0):
    """P, S None: no such ids."""
    g = torch.Generator().manual_seed(seed)
    input, weight = (torch.randn(n, D, generator=g, dtype=torch.float64).to(dtype) for n in (Q, N))
    row = torch.randn(N, generator=g, dtype=torch.float64).to(dtype) if bias else None
    own = None if P is None else torch.randint(N, (Q, P), generator=g)
    shared = None if S is None else torch.randint(N, (S,), generator=g)
    return input, weight, row, own, shared


def plain(input, weight, bias, own, shared, sparse_grad=False):
    """In double, whatever the inputs are: differentiable by autograd."""
    input, weight, bias = (t if t is None else t.double() for t in (input, weight, bias))
    parts = []
    if own is not None:
        scores = (input[:, None, :] * weight[own]).sum(-1)
        parts.append(scores if bias is None else scores + bias[own])
    if shared is not None:
        scores = input @ weight[shared].T
        parts.append(scores if bias is None else scores + bias[shared])
    return torch.cat(parts, 1)


def coefficient_rounding(input, weight, bias, own, shared):
    """How far gradients may be off where those of shared candidates' scores meet a bfloat16 table in bfloat16, so that tensor cores multiply them: half
    a unit in the last place of each, 2^-8 of a term of the sums. torch's own bfloat16 linear layer has the same: its backward takes no other."""
    if input.dtype != torch.bfloat16 or shared is None:
        return None
    grad = torch.randn(input.shape[0], (0 if own is None else own.shape[1]) + shared.shape[0], generator=torch.Generator().manual_seed(9),
                       dtype=torch.float64)  # as scores_and_gradients has it
    terms = grad[:, grad.shape[1] - shared.shape[0]:].abs() * 2**-8
    return [0.0, terms @ weight[shared].double().abs(),
            torch.zeros(weight.shape, dtype=torch.float64).index_add_(0, shared, terms.T @ input.double().abs()), 0.0]


def assert_same(got, want, dtype, inputs, slack=None):
    """Within the rounding of `dtype`, relative to the largest value, of which every result is a sum; and `slack`, of each result."""
    assert got[0].dtype == opmath(dtype)
    for i, (a, b) in enumerate(zip(got, want)):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.shape == b.shape
        a, b = ((t.to_dense() if t.layout == torch.sparse_coo else t).double() for t in (a, b))
        rounding = ROUNDING[opmath(dtype) if i == 0 else dtype]
        largest = b.abs().max().item() if b.numel() else 0.0
        if slack is not None:
            b = torch.where((a - b).abs() <= slack[i], a, b + (a - b).sign() * slack[i])
        torch.testing.assert_close(a, b, rtol=rounding, atol=4 * max(1.0, largest) * min(rounding, 2e-6))
    for leaf, grad in zip(inputs, got[1:]):
        assert grad is None or grad.dtype == leaf.dtype


LAYOUTS = {"private": (4, None), "shared": (None, 6), "both": (4, 6)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [0, 1, 3, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_indexing(impl, dtype, D, layout, bias):
    """19 or more ids of 9 classes: classes repeat within and between queries, and between private and shared."""
    args = problem(5, 9, D, *LAYOUTS[layout], dtype, bias)
    want = scores_and_gradients(plain, *args)
    for sparse in (True, False):
        got = scores_and_gradients(ops.candidate_scores, *args, sparse_grad=sparse)
        assert got[2].is_sparse == sparse and (not bias or got[3].is_sparse == sparse)
        assert_same(got, want, dtype, args, coefficient_rounding(*args))


@pytest.mark.parametrize("shape", [(0, 7, 5, 3, 4), (3, 7, 5, 0, 4), (3, 7, 5, 3, 0), (3, 7, 5, 0, 0), (0, 7, 5, 0, None), (2, 1, 5, 3, 3),
                                   (1, 1, 1, 1, None), (0, 7, 0, 3, 3), (700, 300, 33, 20, 50), (40, 10, 129, 90, None)])
def test_shapes(impl, shape):
    """Empty batches and candidate sets, one class, one query, and sizes that several threads share."""
    args = problem(*shape, torch.float64)
    assert_same(scores_and_gradients(ops.candidate_scores, *args), scores_and_gradients(plain, *args), torch.float64, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_equals_reference(dtype):
    """Another oracle for 16-bit tables: the same composite that runs on other devices."""
    args = problem(31, 20, 19, 7, 11, dtype)
    got = scores_and_gradients(ops.candidate_scores, *args, sparse_grad=True)
    with xs.use_impl("reference"):
        want = scores_and_gradients(ops.candidate_scores, *args, sparse_grad=True)
    assert_same(got, want, dtype, args, coefficient_rounding(*args))
    assert torch.equal(got[2]._indices(), want[2]._indices())


@pytest.mark.parametrize("D", [40, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_classes_of_many_queries(dtype, D):
    """Runs of one class that go over many rows of the gradient, begin and end anywhere, and are all of it; with a scale that leaves out queries."""
    for num_classes, P, S in ((2, 3, 5), (1, 4, 31), (3, 1, 33), (1000, 2, 0)):
        input, weight, _, own, shared = problem(150, num_classes, D, P, S, dtype)
        g = torch.Generator().manual_seed(3)
        grad, scale = torch.randn(150, P + S, generator=g), torch.randn(150, generator=g)
        scale[::5], input[::5] = 0, float("nan")
        run = lambda: ops.candidate_scores_backward(grad, input, weight, own, shared, [False, True, True], scale)  # noqa: E731
        rows, values, bias = run()[1:]
        with xs.use_impl("reference"):
            want_rows, want_values, want_bias = run()[1:]
        assert torch.equal(rows, want_rows)
        tolerance = dict(rtol=ROUNDING[dtype], atol=2e-5 if dtype == torch.float32 else 2**-8 * want_values.abs().max().item())
        torch.testing.assert_close(values, want_values, **tolerance)
        torch.testing.assert_close(bias, want_bias, **tolerance)


@pytest.mark.parametrize("D", [64, 67])  # rows that are aligned, and rows that are not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_too_large_for_the_caches(dtype, D):
    """Their rows are written past them: lone ones, between those that several pairs and shared candidates make."""
    args = problem(70, 40_000, D, 300, 50, dtype)
    assert 70 * 300 * D * args[0].element_size() > 4 << 20
    got = scores_and_gradients(ops.candidate_scores, *args)
    with xs.use_impl("reference"):
        want = scores_and_gradients(ops.candidate_scores, *args)
    assert_same(got, want, dtype, args)
    counts = torch.cat([args[3].flatten(), args[4]]).bincount()
    assert (counts == 1).sum() > 1000 and (counts > 1).sum() > 1000


class Calls(TorchDispatchMode):
    """Output masks that backward was called with."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops.candidate_scores_backward.default:
            self.masks.append(list(args[5]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_subsets_of_gradients(impl, wanted):
    """Right ones for those that want one, and nothing computed for the others."""
    args = problem(5, 9, 7, 3, 4)
    with Calls() as calls:
        got = scores_and_gradients(ops.candidate_scores, *args, wanted=wanted)
    assert calls.masks == ([list(wanted)] if any(wanted) else [])
    assert_same(got, scores_and_gradients(plain, *args, wanted=wanted), torch.float32, args)
    grad_input, rows, values, bias_values = ops.candidate_scores_backward(torch.ones(5, 7), args[0], args[1], *args[3:], list(wanted))
    assert grad_input.shape == (5 if wanted[0] else 0, 7)
    assert rows.shape == (19 if wanted[1] or wanted[2] else 0,)
    assert values.shape == (19 if wanted[1] else 0, 7) and bias_values.shape == (19 if wanted[2] else 0,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_sparse_gradient(impl, layout):
    """R rows whatever the ids are; sorted; a class's gradient in the first of its rows, zeros in the others."""
    for spread in (1, 9):  # one class only, many
        input, weight, bias, own, shared = problem(5, 9, 7, *LAYOUTS[layout], torch.float64)
        own, shared = (t if t is None else t % spread for t in (own, shared))
        ids = torch.cat([t.flatten() for t in (own, shared) if t is not None])
        _, _, grad, bias_grad = scores_and_gradients(ops.candidate_scores, input, weight, bias, own, shared, sparse_grad=True)
        want = scores_and_gradients(plain, input, weight, bias, own, shared)
        for g, dense in ((grad, want[2]), (bias_grad, want[3])):
            assert g.sparse_dim() == 1 and not g.is_coalesced() and g._nnz() == ids.numel()
            rows, values = g._indices()[0], g._values()
            assert torch.equal(rows, ids.sort().values)
            first = torch.ones(len(rows), dtype=torch.bool)
            first[1:] = rows[1:] != rows[:-1]
            torch.testing.assert_close(values[first], dense[rows[first]])
            assert (values[~first] == 0).all() and (~first).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_gradient(impl, layout, dtype):
    """Bit for bit that of the rows; zeros before, between and behind the classes that were scored."""
    args = problem(5, 60, 7, *LAYOUTS[layout], dtype)
    ids = [None if t is None else 3 + t % 50 for t in args[3:]]
    rows, dense = (scores_and_gradients(ops.candidate_scores, *args[:3], *ids, sparse_grad=sparse) for sparse in (True, False))
    for row_sparse, whole in zip(rows[2:], dense[2:]):
        assert whole.layout == torch.strided and torch.equal(whole, row_sparse.to_dense())


def test_the_form_of_a_gradient_that_costs_less():
    """sparse_grad=None: row-sparse up to as many rows as the table has."""
    for num_classes, sparse in ((19, True), (18, False)):
        args = problem(5, num_classes, 7, 3, 4)
        _, _, weight_grad, bias_grad = scores_and_gradients(ops.candidate_scores, *args)
        assert weight_grad.is_sparse == bias_grad.is_sparse == sparse


def test_strided(impl):
    """Layouts that kernels must not take for contiguous: strided rows, columns, a transposed table, an expanded gradient."""
    args = problem(6, 12, 8, 3, 4, torch.float64)
    want = scores_and_gradients(plain, *args)
    layouts = {"transposed": lambda t: t.t().contiguous().t(), "strided rows": lambda t: t.repeat_interleave(2, 0)[::2],
               "strided columns": lambda t: t.repeat_interleave(2, 1)[:, ::2], "slice": lambda t: torch.cat([t, t], 1)[:, :t.size(1)]}
    for layout in layouts.values():
        moved = [layout(args[0]), layout(args[1]), args[2].repeat_interleave(2)[::2], layout(args[3]),
                 args[4].repeat_interleave(2)[::2]]
        assert not any(t.is_contiguous() for t in moved)
        assert_same(scores_and_gradients(ops.candidate_scores, *moved), want, torch.float64, args)
    for grad in (torch.ones(1, 1, dtype=torch.float64).expand(6, 7), torch.randn(7, 6, dtype=torch.float64).t()):
        got = ops.candidate_scores_backward(grad, args[0], args[1], *args[3:], [True] * 3)
        same = ops.candidate_scores_backward(grad.contiguous(), args[0], args[1], *args[3:], [True] * 3)
        for a, b in zip(got, same):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_end_inside_a_load(impl, dtype):
    """A table whose rows lie 16 bytes apart and do not fill them: what lies behind a row is none of it."""
    torch.manual_seed(0)
    wide = torch.full((20, 24), float("nan")).to(dtype)
    wide[:, :21] = torch.randn(20, 21)
    input, ids = torch.randn(6, 21).to(dtype), torch.randint(20, (6, 4))
    grad = torch.randn(6, 4).to(torch.float64 if dtype == torch.float64 else torch.float32)
    results = [(ops.candidate_scores(input, table, None, ids, None), ops.candidate_scores_backward(grad, input, table, ids, None, [True, True, False])[0])
               for table in (wide[:, :21], wide[:, :21].contiguous())]
    for one, other in zip(*results):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(impl, layout):
    *tensors, own, shared = problem(3, 6, 4, *LAYOUTS[layout], torch.float64)
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *a: ops.candidate_scores(*a, own, shared, False), leaves)


def test_no_second_derivative(impl):
    input, weight, _, own, shared = problem(3, 6, 4, 2, 3)
    input.requires_grad_()
    scores = ops.candidate_scores(input, weight.requires_grad_(), None, own, shared)
    (grad,) = torch.autograd.grad(scores.square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


def test_forward_without_gradients():
    args = problem(3, 6, 4, 2, 3)
    scores = ops.candidate_scores(*args)
    assert not scores.requires_grad
    with torch.inference_mode():
        assert torch.equal(ops.candidate_scores(*args), scores)
    with torch.no_grad():
        assert not ops.candidate_scores(args[0].clone().requires_grad_(), *args[1:]).requires_grad


@pytest.mark.parametrize("dtype, layout", [(torch.float32, "private"), (torch.float64, "shared"), (torch.bfloat16, "both"),
                                           (torch.float16, "both")])
def test_opcheck(dtype, layout):
    input, weight, bias, own, shared = problem(3, 6, 4, *LAYOUTS[layout], dtype)
    leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
    torch.library.opcheck(ops.candidate_scores.default, (*leaves, own, shared, False))
    # aot_dispatch compares gradients, which torch cannot do for sparse ones: test_compile does.
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.candidate_scores.default, (*leaves, own, shared), test_utils=some)
    torch.library.opcheck(ops.candidate_scores.default, (*leaves[:2], None, own, shared, False))
    grad = torch.ones(3, ops.candidate_scores(input, weight, None, own, shared).size(1), dtype=opmath(dtype))
    for mask in ((True, True, True), (True, False, False), (False, False, True)):
        torch.library.opcheck(ops.candidate_scores_backward.default, (grad, input, weight, own, shared, list(mask)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    """In one graph, dense and sparse gradients."""
    for sparse in (False, True):
        def step(input, weight, bias, own, shared):
            return ops.candidate_scores(input * 2, weight, bias, own, shared, sparse)

        args = problem(5, 9, 7, 3, 4)
        torch._dynamo.reset()
        got = scores_and_gradients(torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager"), *args)
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
    """The hidden state meets the table in the table's dtype, which is never cast as a whole."""
    args = problem(5, 9, 7, 3, 4)
    low = args[0].bfloat16()

    def cast(*a):
        with torch.autocast("cpu", torch.bfloat16):
            return ops.candidate_scores(*a)

    got = scores_and_gradients(cast, low, *args[1:])
    assert got[0].dtype == torch.float32 and [g.dtype for g in got[1:]] == [torch.bfloat16, torch.float32, torch.float32]
    want = scores_and_gradients(ops.candidate_scores, low.float(), *args[1:])
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1].float(), want[1], rtol=2**-8, atol=0)
    torch.testing.assert_close(got[2].to_dense(), want[2].to_dense())


def test_backward_under_autocast(impl):
    """Called where autocast is on, backward computes what it computes elsewhere: its own products are not cast."""
    args = problem(5, 9, 7, 3, 4)

    def under_autocast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return scores_and_gradients(ops.candidate_scores, *args, **kwargs)

    # First a case in which a product of the wrong dtype is a wrong number; in the second it would be a write out of bounds.
    shared_only = (*args[:3], None, args[4])
    for case, wanted in ((shared_only, (True, False, False)), (args, (True, True, True))):
        assert_same(under_autocast(*case, wanted=wanted), scores_and_gradients(ops.candidate_scores, *case, wanted=wanted), torch.float32,
                    args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_give_the_same_bits(same_for_any_threads, dtype):
    """For private candidates; shared ones are one product of torch's."""
    args = problem(300, 200, 65, 40, None, dtype)
    same_for_any_threads(lambda: scores_and_gradients(ops.candidate_scores, *args))


def test_sizes_past_32_bits():
    """Shapes only: N D, Q P and R pass 2^31."""
    input, weight = (torch.empty(n, 64, device="meta", requires_grad=True) for n in (1 << 20, 1 << 27))
    own = torch.empty(1 << 20, 1 << 12, device="meta", dtype=torch.int64)
    shared = torch.empty(5, device="meta", dtype=torch.int64)
    scores = ops.candidate_scores(input, weight, None, own, shared, True)
    assert scores.shape == (1 << 20, (1 << 12) + 5) and scores.dtype == torch.float32
    grads = torch.autograd.grad(scores, (input, weight), torch.empty_like(scores))
    assert grads[0].shape == input.shape and grads[1].shape == weight.shape and grads[1]._nnz() == (1 << 32) + 5


@pytest.mark.parametrize("isa", ["default", "avx2", "avx512"])
def test_instruction_sets(isa):
    """Each one's kernels by themselves: vector loops, their tails, and both."""
    levels = ["default", "avx2", "avx512"]
    if levels.index(isa) >= levels.index(xs.cpu_capability()):
        pytest.skip("is what this process runs, or more than the CPU has")
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__,
                             __file__.replace("candidate", "ragged"), "-k",
                             "test_equals_indexing and kernel and True and not shared or test_gradients_too_large"],
                            env={**os.environ, "XSOFTMAX_CPU": isa}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["input", "weight", "bias"])
def test_not_finite(impl, place, value):
    """What is not finite shows in the scores that read it, and in no other."""
    args = problem(4, 9, 19, 3, 5, torch.float64)
    {"input": args[0], "weight": args[1], "bias": args[2]}[place].view(-1)[4] = value
    got, want = ops.candidate_scores(*args), plain(*args)
    assert not want.isfinite().all() and want.isfinite().any()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_rows_of_weight_that_no_id_names_are_not_read(impl):
    input, weight, bias, own, shared = problem(4, 9, 19, 3, 5)
    ids = torch.cat([own.flatten(), shared]) % 4
    weight[4:], bias[4:] = float("nan"), float("nan")
    got = scores_and_gradients(ops.candidate_scores, input, weight, bias, own % 4, shared % 4)
    assert ids.max() < 4 and got[0].isfinite().all() and got[1].isfinite().all() and got[2].to_dense()[4:].eq(0).all()


@pytest.mark.parametrize("change, error, message", [
    (dict(private_ids=torch.tensor([[0, 1], [2, 9]])), IndexError, r"expected private_ids in \[0, 9\), got 9 at \[1, 1\]"),
    (dict(private_ids=torch.tensor([[0, 1], [-1, 2]])), IndexError, r"expected private_ids in \[0, 9\), got -1 at \[1, 0\]"),
    (dict(shared_ids=torch.tensor([0, 1, 1 << 40])), IndexError, r"expected shared_ids in \[0, 9\), got 1099511627776 at \[2\]"),
    (dict(shared_ids=torch.tensor([-(1 << 40)])), IndexError, r"expected shared_ids in \[0, 9\), got -1099511627776 at \[0\]"),
    (dict(private_ids=torch.zeros(2, 1, dtype=torch.int32)), TypeError, "expected private_ids of dtype int64, got int32"),
    (dict(shared_ids=torch.zeros(2)), TypeError, "expected shared_ids of dtype int64, got float32"),
    (dict(private_ids=torch.zeros(3, 1, dtype=torch.int64)), ValueError, "expected private_ids with size 2"),
    (dict(private_ids=torch.zeros(2, dtype=torch.int64)), ValueError, "expected private_ids with 2 dimensions"),
    (dict(shared_ids=torch.zeros(1, 1, dtype=torch.int64)), ValueError, "expected shared_ids with 1 dimension,"),
    (dict(private_ids=None, shared_ids=None), ValueError, "expected private_ids, shared_ids or both, got neither"),
    (dict(input=torch.zeros(3)), ValueError, "expected input with 2 dimensions"),
    (dict(weight=torch.zeros(9, 5)), ValueError, "expected weight with size 3"),
    (dict(weight=torch.zeros(9)), ValueError, "expected weight with 2 dimensions"),
    (dict(weight=torch.zeros(9, 3, dtype=torch.float64)), TypeError, "expected input of the table's dtype float64, got float32: cast the input"),
    (dict(weight=torch.zeros(9, 3, device="meta")), TypeError, "expected weight on input's device cpu, got meta"),
    (dict(shared_ids=torch.zeros(2, dtype=torch.int64, device="meta")), TypeError, "expected shared_ids on input's device cpu, got meta"),
    (dict(input=torch.zeros(2, 3, dtype=torch.complex64), weight=torch.zeros(9, 3, dtype=torch.complex64)), TypeError,
     "expected input of dtype float32, float64, bfloat16 or float16, got complex64"),
    (dict(bias=torch.zeros(8)), ValueError, "expected bias with size 9"),
    (dict(bias=torch.zeros(9, dtype=torch.float64)), TypeError, "expected bias of input's dtype float32"),
    (dict(bias=torch.zeros(9, device="meta")), TypeError, "expected bias on input's device cpu"),
])
def test_bad_inputs(impl, change, error, message):
    arguments = dict(input=torch.zeros(2, 3), weight=torch.zeros(9, 3), bias=None, private_ids=torch.zeros(2, 1, dtype=torch.int64),
                     shared_ids=None) | change
    with pytest.raises(error, match="candidate_scores: " + message):
        ops.candidate_scores(**arguments)


@pytest.mark.parametrize("change, error, message", [
    (dict(grad=torch.zeros(2, 2)), ValueError, r"expected grad with size 1 \(the candidates of a query\)"),
    (dict(grad=torch.zeros(3, 1)), ValueError, r"expected grad with size 2 \(the rows of input\)"),
    (dict(grad=torch.zeros(2, 1, dtype=torch.float64)), TypeError, "expected grad of dtype float32, got float64"),
    (dict(private_ids=torch.tensor([[0], [9]])), IndexError, r"expected private_ids in \[0, 9\), got 9 at \[1, 0\]"),
])
def test_bad_inputs_of_backward(impl, change, error, message):
    arguments = dict(grad=torch.zeros(2, 1), input=torch.zeros(2, 3), weight=torch.zeros(9, 3),
                     private_ids=torch.zeros(2, 1, dtype=torch.int64), shared_ids=None, output_mask=[True, True, True]) | change
    with pytest.raises(error, match=message):
        ops.candidate_scores_backward(**arguments)
