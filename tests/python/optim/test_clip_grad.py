"""clip_grad_norm_ and row_norm equal torch on the dense equivalents."""

import pytest
import torch

import xsoftmax
from gradient_checks import DTYPES, TOLERANCE, opmath, random_grad, sparse
from gradient_checks import seeded  # noqa: F401 (an autouse fixture)

ops = torch.ops.xsoftmax


@pytest.mark.parametrize("kind", ["duplicates", "padded", "unique"])
@pytest.mark.parametrize("width", [0, 1, 17])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_norm_equals_the_norm_of_the_dense_tensor(dtype, norm_type, width, kind):
    rows, values = random_grad(40, width, dtype=dtype, kind=kind)
    expected = torch.linalg.vector_norm(
        sparse(rows, values.to(opmath(dtype)), 40).to_dense(), norm_type)
    for impl in ("kernel", "reference"):
        ops.set_impl(impl)
        got = ops.row_norm(rows, values, norm_type)
        assert got.dtype == opmath(dtype) and got.dim() == 0
        torch.testing.assert_close(got, expected, **TOLERANCE[opmath(dtype)])


@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_row_norm_of_many_rows(impl):
    ops.set_impl(impl)
    rows, values = torch.randint(9000, (20_011,)), torch.randn(20_011, 2)
    values[-1] += 100  # no row may be missing
    expected = torch.zeros(9000, 2, dtype=torch.float64).index_add(0, rows, values.double()).norm()
    torch.testing.assert_close(ops.row_norm(rows, values, 2.0).double(), expected)


@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_row_norm_of_empty_infinite_and_nan_gradients(impl):
    ops.set_impl(impl)
    rows = torch.tensor([3, 1, 2])
    for norm_type in (1.0, 2.0, float("inf")):
        assert ops.row_norm(rows[:0], torch.empty(0, 4), norm_type) == 0
        values = torch.ones(3, 4)
        values[1, 2] = float("inf")
        assert ops.row_norm(rows, values, norm_type) == float("inf")
        values[0, 1] = float("nan")
        assert ops.row_norm(rows, values, norm_type).isnan()


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_a_row_norm_beyond_float32_is_infinite(impl, norm_type):
    ops.set_impl(impl)
    values = torch.full((3, 4), -3e38)
    assert ops.row_norm(torch.tensor([3, 1, 2]), values, norm_type) == float("inf")


def mixed_gradients():
    """Returns two tables, a bias and two dense parameters, and their twins with dense gradients."""
    params = [
        torch.nn.Parameter(torch.zeros(*shape)) for shape in ((20, 4), (9, 3), (20,), (3, 5), (7,))
    ]
    for p in params[:3]:
        p.grad = sparse(*random_grad(p.shape[0], p.shape[1] if p.dim() == 2 else 0, 15), p.shape[0])
    for p in params[3:]:
        p.grad = torch.randn_like(p)
    params.append(torch.nn.Parameter(torch.zeros(2)))  # no gradient
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, twin in zip(params, twins):
        twin.grad = None if p.grad is None else p.grad.to_dense().clone()
    return params, twins


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf"), "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
@pytest.mark.parametrize(
    "which",
    [slice(None), slice(3), slice(0, 1), slice(3, None)],
    ids=["mixed", "sparse", "one table", "dense"])
def test_clipping_equals_torch_on_dense_gradients(which, max_norm, norm_type):
    params, twins = (list(p)[which] for p in mixed_gradients())
    memory = [
        p.grad._values().data_ptr() for p in params if p.grad is not None and p.grad.is_sparse
    ]
    got = xsoftmax.clip_grad_norm_(params, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type)
    torch.testing.assert_close(got, expected)
    for p, twin in zip(params, twins):
        if twin.grad is not None:
            torch.testing.assert_close(p.grad.to_dense(), twin.grad)
    assert memory == [
        p.grad._values().data_ptr() for p in params if p.grad is not None and p.grad.is_sparse
    ]


def test_clipping_nothing_nan_gradients_and_wrong_arguments():
    assert xsoftmax.clip_grad_norm_([], 1.0) == 0
    assert xsoftmax.clip_grad_norm_(torch.nn.Parameter(torch.ones(2)), 1.0) == 0
    table = torch.nn.Parameter(torch.zeros(5, 2))
    table.grad = sparse(torch.tensor([1, 4]), torch.tensor([[1.0, float("nan")], [2.0, 3.0]]), 5)
    with pytest.raises(
            RuntimeError, match="clip_grad_norm_: expected gradients with a finite "
            "norm, got a norm of nan"):
        xsoftmax.clip_grad_norm_(table, 1.0, error_if_nonfinite=True)
    # an error changes nothing
    assert torch.equal(table.grad._values()[1], torch.tensor([2.0, 3.0]))
    assert xsoftmax.clip_grad_norm_(table, 1.0).isnan() and table.grad._values().isnan().all()
    for bad in (0, -1.0):
        with pytest.raises(ValueError, match="norm_type above 0"):
            xsoftmax.clip_grad_norm_(table, 1.0, norm_type=bad)


def test_clipping_expanded_gradients():
    """The sparse gradient of a sum of embeddings is expanded: all elements share their memory."""
    for clip in (torch.nn.utils.clip_grad_norm_, xsoftmax.clip_grad_norm_):
        embedding = torch.nn.Embedding(6, 3, sparse=clip is xsoftmax.clip_grad_norm_)
        embedding(torch.tensor([1, 4, 4])).sum().backward()
        norm = clip(embedding.parameters(), 0.5)
        if clip is torch.nn.utils.clip_grad_norm_:
            expected = norm, embedding.weight.grad
    assert any(stride == 0 for stride in embedding.weight.grad._values().stride()) is False
    torch.testing.assert_close(norm, expected[0])
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected[1])
