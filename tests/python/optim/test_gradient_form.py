"""The form of gradients with sparse_grad=None.

A loss chooses dense or row-sparse gradients by the size of the batch, until the first step of an
optimizer that supports only one form, or whose state needs one, fixes the choice.
"""

import subprocess
import sys

import pytest
import torch

import xsoftmax as xs

D = 6


@pytest.mark.parametrize("make, dense_first, fixed",
                         [(lambda p: torch.optim.AdamW(p), True, False),
                          (lambda p: torch.optim.SparseAdam(p), False, True),
                          (lambda p: xs.optim.RowAdam(p), True, None),
                          (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), True, False),
                          (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False, True),
                          (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), True, False),
                          (lambda p: torch.optim.SGD(p, lr=0.1), True, None),
                          (lambda p: torch.optim.Adagrad(p), False, None),
                          (lambda p: xs.optim.RowSGD(p, lr=0.1, momentum=0.9), False, None)])
def test_later_batches_of_any_size_keep_the_form_that_the_optimizer_needs(make, dense_first, fixed):
    """An optimizer that needs one form of gradient gets the form of its first step from then on."""
    loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False)
    optimizer = make(list(loss.parameters()))
    for queries in (20, 3, 20) if dense_first else (3, 20, 3):
        optimizer.zero_grad()
        loss(torch.randn(queries, D), torch.randint(60, (queries,))).backward()
        assert loss.linear.weight.grad.is_sparse == ((queries == 3) if loss.sparse_grad is None else
                                                     loss.sparse_grad)
        optimizer.step()
        assert loss.sparse_grad is fixed


def momentum(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def few_and_many(loss):
    """Runs batches whose gradients would differ in form if the first step did not fix it."""
    for queries in (3, 20, 3):
        loss(torch.randn(queries, D, dtype=next(loss.parameters()).dtype),
             torch.randint(60, (queries,))).backward()
        yield


def test_the_form_is_fixed_for_all_losses_of_the_optimizer():
    """The form is also fixed by a step with learning rate 0, for a loss that is first used later,
    for another loss over the same table, and for a bias next to a tied table."""
    made = [
        xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False, bias=True)
        for _ in range(4)
    ]
    first, later, same, tied = made
    same.linear = first.linear
    embedding = torch.nn.Embedding(60, D)
    tied.linear.weight = embedding.weight
    optimizer = momentum([*first.parameters(), *later.parameters()], lr=0.0)
    for loss in (first, later, same):
        for _ in few_and_many(loss):
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1
    other = momentum(tied.parameters())
    for queries in (3, 20, 3):
        tied(embedding(torch.randint(60, (queries,))), torch.randint(60, (queries,))).backward()
        other.step()
        other.zero_grad()
    assert all(loss.sparse_grad for loss in made)


def test_a_scripted_loss_and_a_function_keep_the_form_of_the_first_step():
    loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False)
    scripted = torch.jit.script(loss)
    optimizer = momentum(loss.parameters())
    for _ in few_and_many(scripted):
        assert loss.linear.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    table = torch.nn.Parameter(torch.randn(60, D))
    optimizer = momentum([table])
    for queries in (20, 3):
        counts = torch.zeros(queries, 5), torch.zeros(queries)
        drawn = xs.samplers.CandidateSet(torch.randint(60, (queries, 5)), *counts, False)
        xs.functional.sampled_softmax_loss(torch.randn(queries, D), table,
                                           torch.randint(60, (queries,)), [drawn]).backward()
        assert not table.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()


def test_loaded_momentum_decides_the_form():
    """A run resumed with a batch of another size steps like one that was not interrupted."""
    states = []
    for resume in (False, True):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False)
        optimizer = momentum(loss.parameters())
        for queries in (3, 20, 3):
            if resume and queries == 20:
                again = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False)
                again.load_state_dict(loss.state_dict())
                fresh = momentum(again.parameters())
                fresh.load_state_dict(optimizer.state_dict())
                loss, optimizer = again, fresh
                torch.manual_seed(1)
            elif queries == 20:
                torch.manual_seed(1)
            loss(torch.randn(queries, D), torch.randint(60, (queries,))).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(loss.linear.weight.detach())
        assert loss.sparse_grad is True
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.parametrize("make", [
    lambda p: xs.optim.RowAdam(p, lr=0.1, weight_decay=0.1),
    lambda p: xs.optim.RowAdagrad(p, lr=0.1),
    lambda p: xs.optim.RowSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)
])
def test_gradients_of_both_forms_train_like_those_of_one(make):
    """Mixed forms train like row-sparse gradients only.

    sparse_grad=False is not compared: without pending updates, candidates are scored with newer
    rows.
    """
    tables = []
    for sparse_grad in (None, True):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False,
                                     bias=True, sparse_grad=sparse_grad, dtype=torch.float64)
        optimizer = make(list(loss.parameters()))
        for _ in few_and_many(loss):
            optimizer.step()
            optimizer.zero_grad()
        loss.catch_up()
        tables.append(loss.linear.weight.detach())
    torch.testing.assert_close(*tables)


@pytest.mark.parametrize("make", [momentum, lambda p: xs.optim.RowAdam(p, lr=0.1)])
def test_a_compiled_loss_changes_its_form_with_the_batch(make):
    tables = []
    for compiled in (False, True):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False)
        optimizer = make(loss.parameters())
        for _ in few_and_many(torch.compile(loss, backend="aot_eager") if compiled else loss):
            optimizer.step()
            optimizer.zero_grad()
        loss.catch_up()
        tables.append(loss.linear.weight.detach())
    torch.testing.assert_close(*tables)


def a_step(loss, optimizer, queries):
    optimizer.zero_grad()
    loss(torch.randn(queries, D), torch.randint(60, (queries,))).backward()
    optimizer.step()


def made_loss():
    return xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False, bias=True)


def test_a_table_added_to_an_optimizer_later_has_its_form_fixed():
    loss, encoder = made_loss(), torch.nn.Linear(D, D)
    optimizer = momentum(encoder.parameters())
    encoder(torch.randn(2, D)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(loss.parameters())})
    for queries in (3, 20):
        a_step(loss, optimizer, queries)
    assert loss.sparse_grad is True


@pytest.mark.parametrize("release", ["optimizer", "assignment"])
def test_a_fixed_form_is_released_by_a_row_optimizer_or_by_assignment(release):
    loss = made_loss()
    a_step(loss, torch.optim.Adam(loss.parameters()), 20)
    assert loss.sparse_grad is False
    optimizer = xs.optim.RowAdam(loss.parameters())
    if release == "assignment":
        loss.sparse_grad = None
    else:
        a_step(loss, optimizer, 3)
    a_step(loss, optimizer, 3)
    assert loss.sparse_grad is None
    assert loss.linear.weight.grad.is_sparse and loss.linear.bias.grad.is_sparse


def test_an_optimizer_of_the_bias_fixes_the_form_for_the_table_too():
    """Adam updates the bias and RowAdam the table; both gradients have the dense form of Adam."""
    loss = made_loss()
    scripted = torch.jit.script(loss)
    rows, dense = xs.optim.RowAdam([loss.linear.weight]), torch.optim.Adam([loss.linear.bias])
    for queries in (20, 3, 20, 3):
        scripted(torch.randn(queries, D), torch.randint(60, (queries,))).backward()
        for optimizer in (dense, rows):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("make, sizes", [(torch.optim.Adam, (20, 3)),
                                         (torch.optim.SparseAdam, (3, 20))])
def test_loaded_state_decides_the_form_of_the_first_gradient(make, sizes):
    loss = made_loss()
    optimizer = make(list(loss.parameters()))
    a_step(loss, optimizer, sizes[0])
    again = made_loss()
    again.load_state_dict(loss.state_dict())
    fresh = make(list(again.parameters()))
    fresh.load_state_dict(optimizer.state_dict())
    a_step(again, fresh, sizes[1])
    assert again.sparse_grad is loss.sparse_grad is (make is torch.optim.SparseAdam)


def test_a_learning_rate_of_zero_does_not_bypass_the_check():
    loss = made_loss()
    with pytest.raises(
            RuntimeError, match="Adam: expected dense gradients, got a row-sparse one "
            ".*xs.optim.RowAdam"):
        a_step(loss, torch.optim.Adam(loss.parameters(), lr=0.0), 3)


@pytest.mark.slow
def test_the_form_of_functional_calls_is_fixed():
    """In a separate process, where no loss or row optimizer has installed the hook."""
    program = """
import torch, xsoftmax as xs
table, zero = torch.nn.Parameter(torch.randn(60, 8)), torch.zeros(12)
optimizer = torch.optim.SGD([table], lr=0.1, momentum=0.9)
for queries in (5, 100, 5):
    drawn = xs.samplers.CandidateSet(torch.randint(60, (12,)), zero, torch.zeros(queries), False)
    input, target = torch.randn(queries, 8), torch.randint(60, (queries,))
    xs.functional.sampled_softmax_loss(input, table, target, [drawn]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_refused_step_fixes_no_form():
    loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False)
    optimizer = torch.optim.Adam(loss.parameters())
    loss(torch.randn(3, D), torch.randint(60, (3,))).backward()
    with pytest.raises(RuntimeError, match="Adam: expected dense gradients, got a row-sparse one"):
        optimizer.step()
    assert loss.sparse_grad is None
