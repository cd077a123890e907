"""Memory that is reused from step to step: never for two living tensors at once."""

import threading

import pytest
import torch

import xsoftmax as xs

ops = torch.ops.xsoftmax


def gradient(seed, queries=64, candidates=20, width=64, classes=500):
    """Returns a row-sparse gradient of 1,280 rows (328 KB) and the dense gradient."""
    g = torch.Generator().manual_seed(seed)
    input, ids = torch.randn(queries, width,
                             generator=g), torch.randint(classes, (queries, candidates),
                                                         generator=g)
    weight = torch.randn(classes, width, generator=g).requires_grad_()
    ops.candidate_scores(input, weight, None, ids, None, True).square().sum().backward()
    plain = weight.detach().clone().requires_grad_()
    (input[:, None] * plain[ids]).sum(-1).square().sum().backward()
    return weight.grad, plain.grad


def assert_equal_to_dense(pairs):
    for grad, want in pairs:
        torch.testing.assert_close(grad.to_dense(), want, rtol=1e-4, atol=1e-3)


def test_gradients_that_are_still_referenced_are_not_overwritten():
    held = [gradient(seed) for seed in range(6)]
    assert len({grad._values().data_ptr() for grad, _ in held}) == 6
    assert_equal_to_dense(held)
    del held[1::2]
    more = [gradient(seed) for seed in range(10, 16)]
    assert_equal_to_dense(held + more)


def test_a_step_reuses_the_memory_of_the_last():
    def address():
        return gradient(0)[0]._values().data_ptr()

    assert address() == address()


def test_memory_of_a_living_view_is_not_reused():
    values = gradient(0)[0]._values()[3:4]
    before = values.clone()
    others = [gradient(seed) for seed in range(1, 5)]
    assert torch.equal(values, before)
    assert_equal_to_dense(others)


def test_threads_do_not_share_memory():
    failures = []

    def work(seed):
        try:
            assert_equal_to_dense([gradient(seed + i) for i in range(5)])
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("tensor", [
    torch.empty(0),
    torch.empty(10, 10),
    torch.empty(10_000_000)[::2],
    torch.empty(5, device="meta")
])
def test_advise_huge_pages_accepts_any_tensor(tensor):
    ops.advise_huge_pages(tensor)


def test_large_tables_are_initialised_correctly():
    """A table large enough for huge pages is initialised like nn.Linear, its state with zeros."""
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(64, 150_000, sampler="uniform", num_samples=4, bias=True)
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 150_000)
    assert torch.equal(loss.linear.weight, linear.weight) and torch.equal(
        loss.linear.bias, linear.bias)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(torch.randn(3, 64), torch.tensor([1, 2, 149_999])).backward()
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[loss.linear.weight][name]
        assert int(state.any(1).sum()) <= 7 and state[149_999].any()
