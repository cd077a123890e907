"""Gradients of candidate_scores: row-sparse or dense, for some inputs only, under autocast."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xsoftmax as xs
from candidate_scores_checks import LAYOUTS, assert_same, ops, plain, problem
from score_checks import ROUNDING, scores_and_gradients


@pytest.mark.parametrize("D", [40, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_classes_of_many_queries(dtype, D):
    """Runs of one class that span many rows of the gradient, start and end anywhere, or are all of
    it; with a scale that drops queries."""
    for num_classes, P, S in ((2, 3, 5), (1, 4, 31), (3, 1, 33), (1000, 2, 0)):
        input, weight, _, own, shared = problem(150, num_classes, D, P, S, dtype)
        g = torch.Generator().manual_seed(3)
        grad, scale = torch.randn(150, P + S, generator=g), torch.randn(150, generator=g)
        scale[::5], input[::5] = 0, float("nan")
        run = lambda: ops.candidate_scores_backward(grad, input, weight, own, shared,
                                                    [False, True, True], scale)
        rows, values, bias = run()[1:]
        with xs.use_impl("reference"):
            want_rows, want_values, want_bias = run()[1:]
        assert torch.equal(rows, want_rows)
        tolerance = dict(
            rtol=ROUNDING[dtype],
            atol=2e-5 if dtype == torch.float32 else 2**-8 * want_values.abs().max().item())
        torch.testing.assert_close(values, want_values, **tolerance)
        torch.testing.assert_close(bias, want_bias, **tolerance)


@pytest.mark.parametrize("D", [64, 67])  # aligned and unaligned rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_too_large_for_the_caches(dtype, D):
    """Rows are then written past the caches: rows of one pair, between rows of several
    pairs and of shared candidates."""
    args = problem(70, 40_000, D, 300, 50, dtype)
    assert 70 * 300 * D * args[0].element_size() > 4 << 20
    got = scores_and_gradients(ops.candidate_scores, *args)
    with xs.use_impl("reference"):
        want = scores_and_gradients(ops.candidate_scores, *args)
    assert_same(got, want, dtype, args)
    counts = torch.cat([args[3].flatten(), args[4]]).bincount()
    assert (counts == 1).sum() > 1000 and (counts > 1).sum() > 1000


class Calls(TorchDispatchMode):
    """Output masks that the backward operator was called with."""
    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops.candidate_scores_backward.default:
            self.masks.append(list(args[5]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_subsets_of_gradients(impl, wanted):
    """Gradients are correct, and computed only for inputs that require them."""
    args = problem(5, 9, 7, 3, 4)
    with Calls() as calls:
        got = scores_and_gradients(ops.candidate_scores, *args, wanted=wanted)
    assert calls.masks == ([list(wanted)] if any(wanted) else [])
    assert_same(got, scores_and_gradients(plain, *args, wanted=wanted), torch.float32, args)
    grad_input, rows, values, bias_values = ops.candidate_scores_backward(
        torch.ones(5, 7), args[0], args[1], *args[3:], list(wanted))
    assert grad_input.shape == (5 if wanted[0] else 0, 7)
    assert rows.shape == (19 if wanted[1] or wanted[2] else 0,)
    assert values.shape == (19 if wanted[1] else 0,
                            7) and bias_values.shape == (19 if wanted[2] else 0,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_sparse_gradient(impl, layout):
    """R sorted rows for any ids; the gradient of a class is in the first of its rows, the others
    are zero."""
    for spread in (1, 9):  # one class, or many
        input, weight, bias, own, shared = problem(5, 9, 7, *LAYOUTS[layout], torch.float64)
        own, shared = (t if t is None else t % spread for t in (own, shared))
        ids = torch.cat([t.flatten() for t in (own, shared) if t is not None])
        _, _, grad, bias_grad = scores_and_gradients(ops.candidate_scores, input, weight, bias, own,
                                                     shared, sparse_grad=True)
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
    """Bit for bit the row-sparse one, with zeros before, between and after the scored classes."""
    args = problem(5, 60, 7, *LAYOUTS[layout], dtype)
    ids = [None if t is None else 3 + t % 50 for t in args[3:]]
    rows, dense = (scores_and_gradients(ops.candidate_scores, *args[:3], *ids, sparse_grad=sparse)
                   for sparse in (True, False))
    for row_sparse, whole in zip(rows[2:], dense[2:]):
        assert whole.layout == torch.strided and torch.equal(whole, row_sparse.to_dense())


def test_sparse_grad_none_chooses_the_smaller_gradient():
    """Row-sparse if it has at most as many rows as the table."""
    for num_classes, sparse in ((19, True), (18, False)):
        args = problem(5, num_classes, 7, 3, 4)
        _, _, weight_grad, bias_grad = scores_and_gradients(ops.candidate_scores, *args)
        assert weight_grad.is_sparse == bias_grad.is_sparse == sparse


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


def test_backward_under_autocast(impl):
    """The backward pass gives the same gradients under autocast: its products are not cast."""
    args = problem(5, 9, 7, 3, 4)

    def under_autocast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return scores_and_gradients(ops.candidate_scores, *args, **kwargs)

    # A product of the wrong dtype would give wrong numbers in the first case, and a write out of
    # bounds in the second.
    shared_only = (*args[:3], None, args[4])
    for case, wanted in ((shared_only, (True, False, False)), (args, (True, True, True))):
        assert_same(under_autocast(*case, wanted=wanted),
                    scores_and_gradients(ops.candidate_scores, *case, wanted=wanted), torch.float32,
                    args)


@pytest.mark.parametrize("change, error, message", [
    (dict(grad=torch.zeros(2, 2)), ValueError, r"expected grad with size 1 \(the candidates of a "
     r"query\)"),
    (dict(grad=torch.zeros(3, 1)), ValueError, r"expected grad with size 2 \(the rows of input\)"),
    (dict(grad=torch.zeros(2, 1, dtype=torch.float64)), TypeError, "expected grad of dtype "
     "float32, got float64"),
    (dict(private_ids=torch.tensor([[0], [9]])), IndexError, r"expected private_ids in \[0, 9\), "
     r"got 9 at \[1, 0\]"),
])
def test_bad_inputs_of_backward(impl, change, error, message):
    arguments = dict(grad=torch.zeros(
        2, 1), input=torch.zeros(2, 3), weight=torch.zeros(9, 3), private_ids=torch.zeros(
            2, 1, dtype=torch.int64), shared_ids=None, output_mask=[True, True, True]) | change
    with pytest.raises(error, match=message):
        ops.candidate_scores_backward(**arguments)
