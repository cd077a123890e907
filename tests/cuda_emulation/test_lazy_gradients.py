"""Tables whose gradient is kept as terms for their optimizer (lazy_gradient), as on a device,
compared with gradients that are written out."""

import copy

import pytest
import torch

import xsoftmax as xs

N, D, Q = 60, 8, 12
OPTIMIZERS = {
    "adam": (xs.optim.RowAdam, dict(weight_decay=0.01)),
    "row-wise adam": (xs.optim.RowAdam, dict(row_wise=True)),
    "maximize": (xs.optim.RowAdam, dict(maximize=True)), "adagrad": (xs.optim.RowAdagrad,
                                                                     dict(lr=0.1)),
    "sgd": (xs.optim.RowSGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01))
}

pytestmark = pytest.mark.usefixtures("on_a_device")


def make(optimizer: str = "adam", lazy: bool = True, bias: bool = True,
         dtype: torch.dtype = torch.float32, num_samples: int = 5):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(
        D, N, sampler=xs.samplers.LogUniformSampler(N, num_samples, shared=False), bias=bias,
        dtype=dtype, sparse_grad=True)
    kind, options = OPTIMIZERS[optimizer]
    return loss, kind(loss.parameters(), lazy_gradient=lazy, **options)


def batch(step: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(step)
    input, target = torch.randn(Q, D, generator=generator).to(dtype), torch.randint(
        N, (Q,), generator=generator)
    target[1], input[1] = -100, float("nan")
    return input.requires_grad_(), target


def pending(loss) -> bool:
    return bool(torch.ops.xsoftmax.pending_row_terms(loss.linear.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_with_written_gradients(optimizer, dtype):
    tables, gradients = [], []
    for lazy in (False, True):
        loss, row_optimizer = make(optimizer, lazy, dtype=dtype)
        for step in range(4):
            torch.manual_seed(step)
            input, target = batch(step, dtype)
            row_optimizer.zero_grad()
            loss(input, target).backward()
            assert pending(loss) == lazy
            row_optimizer.step()
        gradients.append(
            [input.grad,
             loss.linear.weight.grad.to_dense(),
             loss.linear.bias.grad.to_dense()])
        row_optimizer.flush()
        tables.append([loss.linear.weight.detach(), loss.linear.bias.detach()])
    rounding = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], **rounding)
    torch.testing.assert_close(tables[1], tables[0], **rounding)


def test_many_terms_of_one_row():
    """More than 32 terms, which are summed in chunks: all draws are from three classes."""
    tables = []
    for lazy in (False, True):
        torch.manual_seed(0)
        weights = torch.zeros(N)
        weights[:3] = 1
        loss = xs.SampledSoftmaxLoss(
            D, N, sampler=xs.samplers.UnigramSampler(weights, 40, shared=False, distinct=False),
            bias=False, sparse_grad=True)
        optimizer = xs.optim.RowAdam(loss.parameters(), lazy_gradient=lazy)
        torch.manual_seed(1)
        loss(*batch()).backward()
        optimizer.step()
        tables.append(loss.linear.weight.detach())
    torch.testing.assert_close(tables[1], tables[0])


def test_reading_writes_the_gradient_out():
    loss, optimizer = make()
    loss(*batch()).backward()
    assert pending(loss)
    gradient = loss.linear.weight.grad
    assert gradient.is_sparse and not pending(loss) and gradient is loss.linear.weight.grad
    loss.linear.weight.grad = None
    assert loss.linear.weight.grad is None


def test_clipping_and_the_next_step():
    """The step uses the gradient that clipping has read."""
    tables = []
    for lazy in (False, True):
        loss, optimizer = make(lazy=lazy)
        torch.manual_seed(1)
        loss(*batch()).backward()
        norm = xs.clip_grad_norm_(loss.parameters(), 1e-3)
        assert norm > 1e-3
        optimizer.step()
        tables.append(loss.linear.weight.detach())
    torch.testing.assert_close(tables[1], tables[0])


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_accumulate(zero):
    """Two backward passes before a step; or a step and another pass without zeroing."""
    found = []
    for lazy in (False, True):
        loss, optimizer = make(lazy=lazy)
        for step in range(2):
            torch.manual_seed(step)
            loss(*batch(step)).backward()
            if zero and step == 0:
                optimizer.step()
        found.append(loss.linear.weight.grad.to_dense())
        optimizer.step()
        optimizer.flush()
        found.append(loss.linear.weight.detach())
    torch.testing.assert_close(found[2:], found[:2])


def test_a_table_that_something_else_uses():
    """A tied embedding: its gradient and the loss's gradient are summed."""
    found = []
    for lazy in (False, True):
        loss, optimizer = make(lazy=lazy, bias=False)
        torch.manual_seed(1)
        input, target = batch()
        embedded = torch.nn.functional.embedding(target.clamp_min(0), loss.linear.weight,
                                                 sparse=True)
        (loss(input, target) + embedded.square().sum()).backward()
        found.append(loss.linear.weight.grad.to_dense())
    torch.testing.assert_close(found[1], found[0])


def test_gradients_that_someone_waits_for_are_made():
    loss, optimizer = make()
    input, target = batch()
    [gradient] = torch.autograd.grad(loss(input, target), loss.linear.weight)
    assert gradient.is_sparse and not pending(loss)
    loss(input, target).backward(inputs=[loss.linear.weight])
    assert not pending(loss)
    optimizer.zero_grad()
    seen = []
    handle = loss.linear.weight.register_hook(lambda gradient: seen.append(gradient))
    loss(input, target).backward()
    handle.remove()
    assert seen and not pending(loss)
    optimizer.zero_grad()
    handle = loss.linear.weight.register_post_accumulate_grad_hook(seen.append)
    loss(input, target).backward()
    handle.remove()
    assert len(seen) == 2 and not pending(loss)


def test_queries_that_changed_are_refused():
    loss, optimizer = make(bias=False)
    input, target = batch()
    before = loss.linear.weight.detach().clone()
    hidden = input * 1
    loss(hidden, target).backward()
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="expected the queries of a loss to stay as they are"):
        optimizer.step()
    torch.testing.assert_close(loss.linear.weight.detach(), before, rtol=0, atol=0)
    optimizer.zero_grad()
    assert loss.linear.weight.grad is None


def test_copies_and_checkpoints():
    """A copy of a module and an optimizer starts without a pending gradient; state dicts are those
    of any other table."""
    loss, optimizer = make()
    loss(*batch()).backward()
    twin, _ = copy.deepcopy((loss, optimizer))
    assert loss.linear.weight.grad is not None and type(twin.linear.weight) is type(
        loss.linear.weight)
    optimizer.step()
    other, fresh = make(lazy=False)
    other.load_state_dict(loss.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(other.linear.weight.detach(), loss.linear.weight.detach())


def test_shared_candidates_and_lazy_gradients():
    """Shared candidates have few rows: their gradient is computed as usual."""
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=16)
    optimizer = xs.optim.RowAdam(loss.parameters(), lazy_gradient=True)
    loss(*batch()).backward()
    assert not pending(loss) and loss.linear.weight.grad.is_sparse
    optimizer.step()


def test_a_wrong_option():
    with pytest.raises(TypeError, match="RowAdam: expected lazy_gradient as a bool, got int"):
        xs.optim.RowAdam([torch.nn.Parameter(torch.zeros(2, 2))], lazy_gradient=1)


def test_less_is_written():
    """The launches of a step write no gradient rows: R terms instead of R rows of D numbers."""
    written = []
    for lazy in (False, True):
        loss, optimizer = make(lazy=lazy, bias=False, num_samples=20)
        loss(*batch()).backward()
        emulator = torch.ops.cuda_emulator
        emulator.forget()
        optimizer.zero_grad()
        loss(*batch()).backward()
        optimizer.step()
        written.append(emulator.launched())
    assert any(name.startswith("row_gradient_kernel") for name in written[0])
    assert not any(
        name.startswith(("row_gradient_kernel", "join_chunks_kernel")) for name in written[1])
    assert any(name.startswith("row_terms_kernel") for name in written[1])


@pytest.mark.parametrize("classes", [N + 3, N - 9])
def test_tables_are_resized(classes):
    """Resizing a table drops its pending gradient, like one that was written out."""
    loss, optimizer = make()
    loss(*batch()).backward()
    optimizer.step()
    torch.ops.cuda_emulator.let_host_read(True)
    loss.resize_classes(classes)
    torch.ops.cuda_emulator.let_host_read(False)
    assert loss.linear.weight.grad is None
    input, target = batch()
    loss(input, target.clamp_max(classes - 1)).backward()
    assert pending(loss)
    optimizer.step()
    assert loss.linear.weight.shape == (classes, D) and loss.linear.weight.isfinite().all()


def test_a_refused_step_changes_no_other_parameter():
    """A table that refuses its options is checked before other parameters step."""
    loss, _ = make(lazy=False, bias=False)
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = xs.optim.RowAdam(
        [dict(params=[other]), dict(params=loss.parameters())], lazy_gradient=True)
    loss(*batch()).backward()
    optimizer.step()  # the first step of an optimizer reads all gradients
    optimizer.zero_grad()
    loss(*batch(1)).backward()
    other.grad = torch.ones(3)
    optimizer.param_groups[1].update(lr=5.0, weight_decay=1.0)
    table = loss.linear.weight.detach().clone()
    assert pending(loss)
    with pytest.raises(ValueError, match="lr \\* weight_decay below 1"):
        optimizer.step()
    assert pending(loss) and other not in optimizer.state
    assert torch.equal(other, torch.ones(3)) and torch.equal(loss.linear.weight, table)
