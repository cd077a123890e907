"""Memory that is kept from step to step: never two tensors in one place, and none that a user holds."""

import threading

import pytest
import torch

import xsoftmax as xs

ops = torch.ops.xsoftmax


def gradient(seed, queries=64, candidates=20, width=64, classes=500):
    """A row-sparse gradient of queries x candidates rows (328 KB), and what it must be."""
    g = torch.Generator().manual_seed(seed)
    input, ids = torch.randn(queries, width, generator=g), torch.randint(classes, (queries, candidates), generator=g)
    weight = torch.randn(classes, width, generator=g).requires_grad_()
    ops.candidate_scores(input, weight, None, ids, None, True).square().sum().backward()
    plain = weight.detach().clone().requires_grad_()
    (input[:, None] * plain[ids]).sum(-1).square().sum().backward()
    return weight.grad, plain.grad


def assert_right(pairs):
    for grad, want in pairs:
        torch.testing.assert_close(grad.to_dense(), want, rtol=1e-4, atol=1e-3)


def test_gradients_that_are_held_stay_as_they_are():
    held = [gradient(seed) for seed in range(6)]
    assert len({grad._values().data_ptr() for grad, _ in held}) == 6
    assert_right(held)
    del held[1::2]
    more = [gradient(seed) for seed in range(10, 16)]
    assert_right(held + more)


def test_a_step_takes_the_memory_of_the_last():
    def address():
        return gradient(0)[0]._values().data_ptr()

    assert address() == address()


def test_views_keep_the_memory():
    values = gradient(0)[0]._values()[3:4]
    before = values.clone()
    others = [gradient(seed) for seed in range(1, 5)]
    assert torch.equal(values, before)
    assert_right(others)


def test_threads_may_share_it():
    failures = []

    def work(seed):
        try:
            assert_right([gradient(seed + i) for i in range(5)])
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(10, 10), torch.empty(10_000_000)[::2], torch.empty(5, device="meta")])
def test_advice_on_anything_changes_nothing(tensor):
    ops.advise_huge_pages(tensor)


def test_large_tables_are_whole():
    """Of the size from which huge pages are asked for: initialised as nn.Linear is, zero where zeros are due."""
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(64, 150_000, sampler="uniform", num_samples=4, bias=True)
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 150_000)
    assert torch.equal(loss.linear.weight, linear.weight) and torch.equal(loss.linear.bias, linear.bias)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(torch.randn(3, 64), torch.tensor([1, 2, 149_999])).backward()
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[loss.linear.weight][name]
        assert int(state.any(1).sum()) <= 7 and state[149_999].any()
