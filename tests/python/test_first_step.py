"""What an optimizer is told in its first step: an error where it cannot take row-sparse gradients, a warning where they turned dense."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch

import xsoftmax as xs

N, D = 40, 6


def step(loss, optimizer, encoder=None, **kwargs):
    optimizer.zero_grad()
    hidden = torch.randn(4, D) if encoder is None else encoder(torch.randint(N, (4,)))
    value = loss(hidden, torch.randint(N, (4,)))
    value.backward()
    optimizer.step(**kwargs)


def sampled(**kwargs):
    return xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=8, **kwargs)


@pytest.mark.parametrize("kind, options, ours", [
    ("AdamW", {}, "RowAdam"), ("AdamW", dict(foreach=True), "RowAdam"), ("AdamW", dict(fused=True), "RowAdam"), ("Adam", {}, "RowAdam"),
    ("NAdam", {}, "RowAdam"), ("RAdam", {}, "RowAdam"), ("Adamax", {}, "RowAdam"), ("RMSprop", {}, "RowAdam"), ("Adadelta", {}, "RowAdam"),
    ("ASGD", {}, "RowAdam"), ("Rprop", {}, "RowAdam"), ("Adafactor", {}, "RowAdam"), ("SGD", dict(weight_decay=0.1), "RowSGD"),
    ("SGD", dict(fused=True), "RowSGD"), ("Adagrad", dict(weight_decay=0.1), "RowAdagrad"), ("Adagrad", dict(fused=True), "RowAdagrad")])
def test_an_optimizer_without_row_sparse_gradients_is_refused_at_its_first_step(kind, options, ours):
    loss, encoder = sampled(), torch.nn.Embedding(N, D)
    optimizer = getattr(torch.optim, kind)([*encoder.parameters(), *loss.parameters()], lr=0.1, **options)
    before = copy.deepcopy([encoder.state_dict(), loss.state_dict()])
    with pytest.raises(RuntimeError, match=rf"^{kind}.*: expected dense gradients, got a row-sparse one of a parameter of shape \[40, 6\]: "
                                           rf"use xs.optim.{ours}, .*sparse_grad=False"):
        step(loss, optimizer, encoder)
    for now, then in zip([encoder.state_dict(), loss.state_dict()], before):
        assert all(torch.equal(now[key], then[key]) for key in then)
    assert all(state.get("step", 0) == 0 for state in optimizer.state.values())
    loss.sparse_grad = False
    step(loss, optimizer, encoder)


def test_a_closure_is_looked_at_where_it_has_run():
    """As Lightning steps: the gradients are not there before."""
    loss, hidden, target = sampled(), torch.randn(4, D), torch.randint(N, (4,))

    def closure():
        value = loss(hidden, target)
        value.backward()
        return value

    for how in (dict(args=(closure,)), dict(kwargs=dict(closure=closure))):
        loss.zero_grad()
        with pytest.raises(RuntimeError, match="^Adam: expected dense gradients, got a row-sparse one.*xs.optim.RowAdam.*sparse_grad=False"):
            torch.optim.Adam(loss.parameters()).step(*how.get("args", ()), **how.get("kwargs", {}))
    optimizer, before = torch.optim.SGD(loss.parameters(), lr=0.1), loss.linear.weight.detach().clone()
    for _ in range(2):
        loss.zero_grad()
        assert optimizer.step(closure).isfinite()
    assert not torch.equal(loss.linear.weight, before)


class Ours(torch.optim.AdamW):
    """An optimizer that derives from torch's."""


def test_a_subclass_is_refused_and_others_are_left_to_say_so_themselves():
    loss = sampled()
    with pytest.raises(RuntimeError, match="^Ours: expected dense gradients"):
        step(loss, Ours(loss.parameters()))

    class Stranger(torch.optim.Optimizer):
        steps = 0

        def __init__(self, params):
            super().__init__(params, dict(lr=0.1))

        def step(self):
            self.steps += 1
    stranger = Stranger(loss.parameters())
    step(loss, stranger)
    assert stranger.steps == 1


@pytest.mark.parametrize("make", [
    lambda params: xs.optim.RowAdam(params), lambda params: xs.optim.RowSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda params: xs.optim.RowAdagrad(params, lr=0.1, weight_decay=0.1), lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), lambda params: torch.optim.Adagrad(params), lambda params: torch.optim.SparseAdam(params)])
def test_who_takes_row_sparse_gradients_hears_nothing(make):
    loss = sampled()
    optimizer = make(list(loss.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse")
        step(loss, optimizer)
        step(loss, optimizer)


def test_only_the_first_step_is_looked_at(monkeypatch):
    loss, calls = sampled(), []
    optimizer = xs.optim.RowAdam(loss.parameters())
    real = xs._first_step.row_sparse_tables
    monkeypatch.setattr(xs._first_step, "row_sparse_tables", lambda: calls.append(1) or real())
    for _ in range(3):
        step(loss, optimizer)
    assert len(calls) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    step(loss, optimizer)
    assert len(calls) == 2


@pytest.mark.parametrize("make", [xs.optim.RowAdam, torch.optim.AdamW])
def test_a_tied_embedding_with_dense_gradients_is_warned_of_once(make):
    for sparse in (False, True):
        embedding, loss = torch.nn.Embedding(N, D, sparse=sparse), sampled(sparse_grad=True)
        loss.linear.weight = embedding.weight
        if sparse and make is torch.optim.AdamW:
            continue
        optimizer = make(loss.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                step(loss, optimizer, embedding)
        messages = [str(each.message) for each in caught if "row-sparse" in str(each.message)]
        assert len(messages) == (0 if sparse else 1)
    copied = copy.deepcopy(torch.nn.ModuleList([embedding, loss]))
    copied[0].sparse = False
    with pytest.warns(UserWarning, match=r"SampledSoftmaxLoss: expected a row-sparse gradient of its table of shape \[40, 6\].*sparse=True"):
        step(copied[1], make(copied[1].parameters()), copied[0])


def test_sparse_adam_says_how_it_gets_row_sparse_gradients():
    for sparse_grad in (None, True):
        loss = xs.SampledSoftmaxLoss(D, 40, sampler="uniform", num_samples=8, shared=False, sparse_grad=sparse_grad)
        optimizer = torch.optim.SparseAdam(list(loss.parameters()))
        loss(torch.randn(9, D), torch.randint(40, (9,))).backward()
        if sparse_grad:
            optimizer.step()
            continue
        with pytest.raises(RuntimeError, match=r"^SparseAdam: expected row-sparse gradients, got a dense one .*sparse_grad=True"):
            optimizer.step()


@pytest.mark.parametrize("make, dense_first, fixed", [
    (lambda p: torch.optim.AdamW(p), True, False), (lambda p: torch.optim.SparseAdam(p), False, True), (lambda p: xs.optim.RowAdam(p), True, None),
    (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), True, False), (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False, True),
    (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), True, False), (lambda p: torch.optim.SGD(p, lr=0.1), True, None),
    (lambda p: torch.optim.Adagrad(p), False, None), (lambda p: xs.optim.RowSGD(p, lr=0.1, momentum=0.9), False, None)])
def test_batches_of_any_size_after_the_first(make, dense_first, fixed):
    """An optimizer that takes one form of gradient gets that of the first step from then on."""
    loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False)
    optimizer = make(list(loss.parameters()))
    for queries in (20, 3, 20) if dense_first else (3, 20, 3):
        optimizer.zero_grad()
        loss(torch.randn(queries, D), torch.randint(60, (queries,))).backward()
        assert loss.linear.weight.grad.is_sparse == ((queries == 3) if loss.sparse_grad is None else loss.sparse_grad)
        optimizer.step()
        assert loss.sparse_grad is fixed


def momentum(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def few_and_many(loss):
    """A step of each form, had the first one not fixed it."""
    for queries in (3, 20, 3):
        loss(torch.randn(queries, D, dtype=next(loss.parameters()).dtype), torch.randint(60, (queries,))).backward()
        yield


def test_the_form_is_fixed_for_all_losses_of_the_optimizer():
    """A step at a learning rate of 0 counts; so does a loss whose turn comes later, another one over the same table, and a bias beside a tied table."""
    made = [xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False, bias=True) for _ in range(4)]
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
        xs.functional.sampled_softmax_loss(torch.randn(queries, D), table, torch.randint(60, (queries,)), [drawn]).backward()
        assert not table.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()


def test_loaded_momentum_decides_the_form():
    """A run that goes on with a batch of another size steps as one that was not interrupted."""
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


@pytest.mark.parametrize("make", [lambda p: xs.optim.RowAdam(p, lr=0.1, weight_decay=0.1), lambda p: xs.optim.RowAdagrad(p, lr=0.1),
                                  lambda p: xs.optim.RowSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1),
                                  lambda p: torch.optim.Adagrad(p, lr=0.1)])
def test_gradients_of_both_forms_train_as_those_of_one(make):
    """sparse_grad=False is left out: without lazy updates, candidates are scored by rows that are up to date."""
    tables = []
    for sparse_grad in (None, True):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False, bias=True, sparse_grad=sparse_grad, dtype=torch.float64)
        optimizer = make(list(loss.parameters()))
        for _ in few_and_many(loss):
            optimizer.step()
            optimizer.zero_grad()
        loss.settle()
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
        loss.settle()
        tables.append(loss.linear.weight.detach())
    torch.testing.assert_close(*tables)


def a_step(loss, optimizer, queries):
    optimizer.zero_grad()
    loss(torch.randn(queries, D), torch.randint(60, (queries,))).backward()
    optimizer.step()


def made_loss():
    return xs.SampledSoftmaxLoss(D, 60, sampler="uniform", num_samples=4, shared=False, bias=True)


def test_a_table_that_an_optimizer_is_given_later():
    loss, encoder = made_loss(), torch.nn.Linear(D, D)
    optimizer = momentum(encoder.parameters())
    encoder(torch.randn(2, D)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(loss.parameters())})
    for queries in (3, 20):
        a_step(loss, optimizer, queries)
    assert loss.sparse_grad is True


@pytest.mark.parametrize("release", ["optimizer", "assignment"])
def test_a_fixed_form_gives_way(release):
    loss = made_loss()
    a_step(loss, torch.optim.Adam(loss.parameters()), 20)
    assert loss.sparse_grad is False
    optimizer = xs.optim.RowAdam(loss.parameters())
    if release == "assignment":
        loss.sparse_grad = None
    else:
        a_step(loss, optimizer, 3)
    a_step(loss, optimizer, 3)
    assert loss.sparse_grad is None and loss.linear.weight.grad.is_sparse and loss.linear.bias.grad.is_sparse


def test_a_form_that_a_bias_needs():
    """Adam has the bias, RowAdam the table: both gradients have one form, which Adam takes."""
    loss = made_loss()
    scripted = torch.jit.script(loss)
    rows, dense = xs.optim.RowAdam([loss.linear.weight]), torch.optim.Adam([loss.linear.bias])
    for queries in (20, 3, 20, 3):
        scripted(torch.randn(queries, D), torch.randint(60, (queries,))).backward()
        for optimizer in (dense, rows):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("make, sizes", [(torch.optim.Adam, (20, 3)), (torch.optim.SparseAdam, (3, 20))])
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


def test_a_rate_that_begins_at_zero_is_no_way_around_the_check():
    loss = made_loss()
    with pytest.raises(RuntimeError, match="Adam: expected dense gradients, got a row-sparse one .*xs.optim.RowAdam"):
        a_step(loss, torch.optim.Adam(loss.parameters(), lr=0.0), 3)


def test_functions_alone_have_their_form_fixed():
    """In a process of its own: a loss or a row optimizer would have installed the hook."""
    program = """
import torch, xsoftmax as xs
table, zero = torch.nn.Parameter(torch.randn(60, 8)), torch.zeros(12)
optimizer = torch.optim.SGD([table], lr=0.1, momentum=0.9)
for queries in (5, 100, 5):
    drawn = xs.samplers.CandidateSet(torch.randint(60, (12,)), zero, torch.zeros(queries), False)
    xs.functional.sampled_softmax_loss(torch.randn(queries, 8), table, torch.randint(60, (queries,)), [drawn]).backward()
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


def test_a_dense_gradient_that_the_loss_chose_is_not_warned_of():
    loss = xs.SampledSoftmaxLoss(D, 12_000, sampler="uniform", num_samples=20, shared=False)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(torch.randn(1, D).expand(700, D), torch.zeros(700, dtype=torch.int64), torch.Generator().manual_seed(0)).backward()
    loss.linear.weight.grad[100:] = 0  # few rows, as of frequent classes
    assert not loss.linear.weight.grad.is_sparse
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_large_dense_gradient_with_few_rows_is_warned_of():
    """As an nn.Embedding makes it that is tied to a table whose own gradient is row-sparse."""
    for sparse in (False, True):
        embedding, loss = torch.nn.Embedding(12_000, D, sparse=sparse), xs.SampledSoftmaxLoss(D, 12_000, sampler="uniform", num_samples=8)
        loss.linear.weight = embedding.weight
        optimizer = xs.optim.RowAdam(loss.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss(embedding(torch.arange(9)), torch.arange(9)).backward()
            optimizer.step()
        messages = [str(each.message) for each in caught if "as the loss made it" in str(each.message)]
        assert len(messages) == (0 if sparse else 1)


def test_losses_with_dense_gradients_hear_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse")
        for loss in (xs.LinearCrossEntropyLoss(D, N), sampled(sparse_grad=False)):
            step(loss, torch.optim.AdamW(loss.parameters()))
            step(loss, xs.optim.RowAdam(loss.parameters()))


def test_state_of_a_dense_optimizer_is_warned_of_once():
    loss = sampled(sparse_grad=False)
    dense = torch.optim.AdamW(loss.parameters())
    step(loss, dense)
    loss.sparse_grad = True
    optimizer = xs.optim.RowAdam(loss.parameters())
    optimizer.load_state_dict(dense.state_dict())
    with pytest.warns(UserWarning, match=r"RowAdam: the state of a parameter of shape \[40, 6\] is that of dense gradients"):
        step(loss, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse")
        step(loss, optimizer)


def test_distributed_checkpoints_make_state_without_a_word():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    loss = sampled(sparse_grad=True)
    optimizer = xs.optim.RowAdam(loss.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*row-sparse.*")
        get_optimizer_state_dict(loss, optimizer)
    with pytest.warns(UserWarning, match="expected a row-sparse gradient"):
        loss.linear.weight.grad = torch.ones(N, D)
        optimizer.step()


def test_compiled_steps():
    loss = sampled(sparse_grad=False)
    optimizer = torch.optim.AdamW(loss.parameters())
    loss(torch.randn(3, D), torch.randint(N, (3,))).backward()
    before = loss.linear.weight.detach().clone()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(before, loss.linear.weight)


EVERY = {name: kind for name, kind in vars(torch.optim).items()
         if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer}


@pytest.mark.parametrize("kind", EVERY)
def test_every_optimizer_of_torch_steps_or_gives_our_error(kind):
    """A raw error of an operator would not say what to take."""
    for options in ({}, dict(foreach=True), dict(fused=True), dict(maximize=True), dict(weight_decay=0.1), dict(capturable=True),
                    dict(momentum=0.9, nesterov=True), dict(momentum=0.9, foreach=True), dict(amsgrad=True)):
        loss = sampled()
        try:
            optimizer = EVERY[kind](loss.parameters(), lr=0.1, **options)
        except TypeError:
            assert options, "each takes a learning rate"
            continue  # it has no such option
        steps_or_gives_our_error(kind, loss, optimizer)


def steps_or_gives_our_error(kind, loss, optimizer):
    hidden, target = torch.randn(4, D), torch.randint(N, (4,))

    def closure():
        loss.zero_grad()
        value = loss(hidden, target, generator=torch.Generator().manual_seed(0))
        value.backward()
        return value
    before = loss.linear.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")
        try:
            for _ in range(2):
                optimizer.step(closure)
            assert not torch.equal(loss.linear.weight, before)
        except RuntimeError as error:
            assert str(error).startswith(f"{kind}") and ": expected dense gradients, got a row-sparse one" in str(error) and "use xs.optim.Row" in str(error)
            assert torch.equal(loss.linear.weight, before)


ROW_OPTIMIZERS = [xs.optim.RowAdam, xs.optim.RowAdagrad, xs.optim.RowSGD]


def hints(optimizer, steps=3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.step()
    return [str(each.message) for each in caught if "dense gradient" in str(each.message)]


@pytest.mark.parametrize("make", ROW_OPTIMIZERS)
def test_a_dense_embedding_of_many_rows_is_warned_of_once(make):
    for rows in (10_000, 12_345):
        embedding, loss = torch.nn.Embedding(rows, 3), sampled()
        optimizer = make([*embedding.parameters(), *loss.parameters()])
        embedding(torch.tensor([5, rows - 1])).sum().backward()
        (message,) = hints(optimizer)
        assert message.startswith(f"{make.__name__}: a parameter of shape [{rows}, 3] has a dense gradient, most of whose rows are zero")
        assert "nn.Embedding(..., sparse=True)" in message
        optimizer.load_state_dict(optimizer.state_dict())
        assert len(hints(optimizer, 2)) == 1, "a load begins anew"


def test_gradients_that_are_dense_for_a_reason_hear_no_hint():
    few, many = torch.nn.Embedding(9_999, 3), torch.nn.Embedding(12_000, 3)
    sparse = torch.nn.Embedding(12_000, 3, sparse=True)
    exact, head = xs.SampledSoftmaxLoss(3, 12_000, sampler="uniform", num_samples=8, sparse_grad=False), torch.nn.Linear(3, 12_000)
    zero = torch.nn.Linear(3, 12_000)
    few(torch.tensor([3])).sum().backward()
    many(torch.arange(7_000)).sum().backward()
    sparse(torch.tensor([3])).sum().backward()
    exact(torch.randn(2, 3), torch.tensor([1, 2])).backward()
    head(torch.ones(1, 3)).square().sum().backward()
    (zero(torch.randn(1, 3)) * 0).sum().backward()
    assert hints(xs.optim.RowAdam([each for module in (few, many, sparse, exact, head, zero) for each in module.parameters()])) == []


def test_clipping_of_torch_names_ours():
    """It ends in operators that torch lacks for sparse tensors, whose own message would not say what to call."""
    loss, encoder = sampled(), torch.nn.Linear(D, D)
    parameters = [*encoder.parameters(), *loss.parameters()]
    loss(encoder(torch.randn(4, D)), torch.randint(N, (4,))).backward()
    grads = [param.grad for param in parameters]
    before = [grad.to_dense().clone() for grad in grads]
    utils = torch.nn.utils
    for call, told in ((lambda **how: utils.clip_grad_norm_(parameters, 0.1, **how), "use xs.clip_grad_norm_"),
                       (lambda **how: utils.clip_grad_norm_(parameters, 0.1, float("inf"), **how), "use xs.clip_grad_norm_"),
                       (lambda **how: utils.get_total_norm(grads, **how), "use xs.clip_grad_norm_"),
                       (lambda **how: utils.clip_grad_value_(parameters, 0.1, **how), "clip by norm, with xs.clip_grad_norm_")):
        for foreach in (None, False, True):
            with pytest.raises(NotImplementedError, match=f"expected a dense tensor, got a sparse one. To clip row-sparse gradients, {told}"):
                call(foreach=foreach)
    assert all(torch.equal(grad.to_dense(), was) for grad, was in zip(grads[-1:], before[-1:]))
    xs.clip_grad_norm_(parameters, 0.1)
    torch.nn.utils.clip_grad_norm_(encoder.parameters(), 0.1)


def test_gradients_are_unscaled_as_dense_ones():
    loss = sampled()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), xs.optim.RowAdam(loss.parameters())
    torch.manual_seed(0)
    scaler.scale(loss(torch.randn(4, D), torch.randint(N, (4,)), generator=torch.Generator().manual_seed(0))).backward()
    scaled = loss.linear.weight.grad.to_dense()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(loss.linear.weight.grad.to_dense() * 8, scaled)
    before = loss.linear.weight.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(loss.linear.weight, before)
