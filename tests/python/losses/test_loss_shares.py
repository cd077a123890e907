"""The operators that handle ignored targets on a device: weights in a mean, and gradients scaled by
that of the loss."""

import pytest
import torch

import xsoftmax as xs

ops = torch.ops.xsoftmax
TARGET = torch.tensor([3, -100, 0, 5, -100])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_queries_in_a_mean(dtype):
    torch.testing.assert_close(ops.mean_shares(TARGET, -100, dtype),
                               torch.full((5,), 1 / 3, dtype=dtype))
    assert ops.mean_shares(torch.full((4,), 7), 7, dtype).isinf().all()
    assert ops.mean_shares(TARGET[:0], -100, dtype).shape == (0,)
    many = torch.arange(70_000) % 7
    torch.testing.assert_close(ops.mean_shares(many, 0, dtype),
                               torch.full((70_000,), 1 / 60_000, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "grad",
    [torch.tensor(3.0),
     torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0]),
     torch.tensor(2.0).expand(5)])
def test_gradients_are_scaled_by_that_of_the_loss(grad, dtype):
    grad_input, grad_scores, input = torch.randn(5, 6), torch.randn(5, 40), torch.randn(5,
                                                                                        6).to(dtype)
    for tensor in (grad_input, grad_scores, input):
        tensor[1] = float("nan")  # an ignored query may hold anything
    factor = torch.where(TARGET == -100, 0, grad)[:, None]
    expected = [
        torch.where(factor == 0, 0, factor * tensor) for tensor in (grad_input, grad_scores)
    ] + [torch.where(factor == 0, 0, input)]
    for result, of in zip(
            ops.scale_loss_gradients(grad, TARGET, -100, grad_input, grad_scores, input), expected):
        torch.testing.assert_close(result, of.to(result.dtype))
    no_rows = ops.scale_loss_gradients(grad, TARGET, -100, grad_input[:0], grad_scores, input[:0])
    assert [tuple(tensor.shape) for tensor in no_rows] == [(0, 6), (5, 40), (0, 6)]


@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_a_mean_over_no_query_is_nan(impl):
    loss = xs.SampledSoftmaxLoss(4, 30, sampler="uniform", num_samples=5)
    with xs.use_impl(impl):
        value = loss(torch.randn(3, 4), torch.full((3,), -100))
        value.backward()
    assert value.isnan()
    gradient = loss.linear.weight.grad.to_dense()
    assert (gradient == 0).all()
