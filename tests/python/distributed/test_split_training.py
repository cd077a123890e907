"""Training with split tables on two ranks equals one process.

With accumulated gradients, several dtypes, autocast and optimizers of torch.
"""

import contextlib

import pytest
import torch

import xsoftmax as xs
from ranks import needs_gloo, ranks
from shard_checks import D, N, SAMPLERS, Model, batches, loss_of, whole

pytestmark = needs_gloo


def accumulated(rank, size, options):
    """Trains with two backward passes before each step; returns the state."""
    run = Model(loss_of("uniform", options))
    if size > 1:
        xs.distributed.shard_classes(run)
    called = torch.nn.parallel.DistributedDataParallel(run) if size > 1 else run
    optimizer = xs.optim.RowAdam(run.parameters(), lr=0.05)
    torch.manual_seed(5 + rank)
    for step in range(4):
        optimizer.zero_grad()
        for part in (0, 1):
            batch = batches(2, 2 * step + part)
            input, target = batch[rank] if size > 1 else map(torch.cat, zip(*batch))
            with called.no_sync() if size > 1 and part == 0 else contextlib.nullcontext():
                called(input, target).backward()
        optimizer.step()
    return whole(run.eval())


@pytest.mark.parametrize("options", ["bias, head", "dense"])
def test_accumulated_gradients_equal_those_of_one_process(options):
    torch.manual_seed(0)
    body = Model(loss_of("uniform", options)).body.state_dict()
    want = accumulated(0, 1, options)
    for got in ranks(2).run(accumulated, 2, options):
        for name, table in want.items():
            torch.testing.assert_close(got[name], table, rtol=1e-3, atol=1e-3)
    assert not torch.equal(body["weight"], want["body.weight"])


def trained(rank, size, dtype, autocast, optimizer, sparse_grad):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=SAMPLERS["uniform"](), bias=optimizer != "Adagrad",
                                 sparse_grad=sparse_grad, dtype=dtype)
    if size > 1:
        xs.distributed.shard_classes(loss)
    optimizer = {
        "RowAdam": xs.optim.RowAdam, "RowAdagrad": xs.optim.RowAdagrad, "SGD": torch.optim.SGD,
        "Adagrad": torch.optim.Adagrad
    }[optimizer](loss.parameters(), lr=0.05)
    torch.manual_seed(5 + rank)
    grads, values = [], []
    for step in range(4):
        parts = batches(2, step)
        input, target = parts[rank] if size > 1 else map(torch.cat, zip(*parts))
        input = input.to(dtype).requires_grad_()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(input, target)
        value.backward()
        optimizer.step()
        values.append(value.item())
        grads.append(input.grad.float())
    loss.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values.append(loss(input, target).item())
    return values, grads, {name: table.float() for name, table in whole(loss).items()}


@pytest.mark.parametrize("dtype, autocast, optimizer, sparse_grad, tolerance",
                         [(torch.float32, False, "SGD", True, 1e-5),
                          (torch.float32, False, "SGD", False, 1e-5),
                          (torch.float32, False, "Adagrad", True, 1e-5),
                          (torch.float32, True, "RowAdagrad", True, 1e-2),
                          (torch.bfloat16, False, "RowAdam", True, 2e-2),
                          (torch.float64, False, "RowAdam", True, 1e-9)])
def test_dtypes_autocast_and_optimizers_equal_one_process(dtype, autocast, optimizer, sparse_grad,
                                                          tolerance):
    values, grads, state = trained(0, 1, dtype, autocast, optimizer, sparse_grad)
    results = ranks(2).run(trained, 2, dtype, autocast, optimizer, sparse_grad)
    for got, _, tables in results:
        assert got == pytest.approx(values, rel=tolerance)
        for name, table in state.items():
            torch.testing.assert_close(tables[name], table, rtol=tolerance, atol=tolerance)
    for step, grad in enumerate(grads):
        torch.testing.assert_close(
            torch.cat([result[1][step] for result in results]) / 2, grad, rtol=tolerance,
            atol=tolerance)
