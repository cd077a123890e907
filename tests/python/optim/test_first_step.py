"""Errors and warnings of an optimizer's first step.

An optimizer that does not support row-sparse gradients raises an error; row-sparse gradients that
became dense give a warning.
"""

import copy
import importlib
import warnings
import weakref

import pytest
import torch

import xsoftmax as xs
from xsoftmax._core import hooks

N, D = 40, 6


def step(loss, optimizer, encoder=None, **kwargs):
    optimizer.zero_grad()
    hidden = torch.randn(4, D) if encoder is None else encoder(torch.randint(N, (4,)))
    value = loss(hidden, torch.randint(N, (4,)))
    value.backward()
    optimizer.step(**kwargs)


def sampled(**kwargs):
    return xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=8, **kwargs)


@pytest.mark.parametrize("kind, options, ours",
                         [("AdamW", {}, "RowAdam"), ("AdamW", dict(foreach=True), "RowAdam"),
                          ("AdamW", dict(fused=True), "RowAdam"), ("Adam", {}, "RowAdam"),
                          ("NAdam", {}, "RowAdam"), ("RAdam", {}, "RowAdam"),
                          ("Adamax", {}, "RowAdam"), ("RMSprop", {}, "RowAdam"),
                          ("Adadelta", {}, "RowAdam"), ("ASGD", {}, "RowAdam"),
                          ("Rprop", {}, "RowAdam"), ("Adafactor", {}, "RowAdam"),
                          ("SGD", dict(weight_decay=0.1), "RowSGD"),
                          ("SGD", dict(fused=True), "RowSGD"),
                          ("Adagrad", dict(weight_decay=0.1), "RowAdagrad"),
                          ("Adagrad", dict(fused=True), "RowAdagrad")])
def test_an_optimizer_without_row_sparse_gradients_is_refused_at_its_first_step(
        kind, options, ours):
    loss, encoder = sampled(), torch.nn.Embedding(N, D)
    optimizer = getattr(torch.optim, kind)([*encoder.parameters(), *loss.parameters()], lr=0.1,
                                           **options)
    before = copy.deepcopy([encoder.state_dict(), loss.state_dict()])
    with pytest.raises(
            RuntimeError, match=rf"^{kind}.*: expected dense gradients, got a "
            r"row-sparse one of a parameter of shape \[40, 6\]: "
            rf"use xs.optim.{ours}, .*sparse_grad=False"):
        step(loss, optimizer, encoder)
    for now, then in zip([encoder.state_dict(), loss.state_dict()], before):
        assert all(torch.equal(now[key], then[key]) for key in then)
    assert all(state.get("step", 0) == 0 for state in optimizer.state.values())
    loss.sparse_grad = False
    step(loss, optimizer, encoder)


def test_gradients_of_a_closure_are_checked_after_it_has_run():
    """Lightning steps with a closure, which computes the gradients."""
    loss, hidden, target = sampled(), torch.randn(4, D), torch.randint(N, (4,))

    def closure():
        value = loss(hidden, target)
        value.backward()
        return value

    for how in (dict(args=(closure,)), dict(kwargs=dict(closure=closure))):
        loss.zero_grad()
        with pytest.raises(
                RuntimeError, match="^Adam: expected dense gradients, got a row-sparse "
                "one.*xs.optim.RowAdam.*sparse_grad=False"):
            torch.optim.Adam(loss.parameters()).step(*how.get("args", ()), **how.get("kwargs", {}))
    optimizer, before = torch.optim.SGD(loss.parameters(),
                                        lr=0.1), loss.linear.weight.detach().clone()
    for _ in range(2):
        loss.zero_grad()
        assert optimizer.step(closure).isfinite()
    assert not torch.equal(loss.linear.weight, before)


class Ours(torch.optim.AdamW):
    """A subclass of an optimizer of torch."""


def test_subclasses_of_torch_optimizers_are_checked_and_other_optimizers_are_not():
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
    lambda params: xs.optim.RowAdam(params),
    lambda params: xs.optim.RowSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda params: xs.optim.RowAdagrad(params, lr=0.1, weight_decay=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adagrad(params), lambda params: torch.optim.SparseAdam(params)
])
def test_optimizers_that_support_row_sparse_gradients_give_no_warning(make):
    loss = sampled()
    optimizer = make(list(loss.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse")
        step(loss, optimizer)
        step(loss, optimizer)


def test_only_the_first_step_is_checked(monkeypatch):
    # Modules of other tests, with gradients and without an optimizer, would keep the check alive.
    monkeypatch.setattr(hooks, "table_modules", weakref.WeakSet())
    loss, calls = sampled(), []
    optimizer = xs.optim.RowAdam(loss.parameters())
    real = xs.optim.first_step.row_sparse_tables
    monkeypatch.setattr(xs.optim.first_step, "row_sparse_tables", lambda: calls.append(1) or real())
    for _ in range(3):
        step(loss, optimizer)
    assert len(calls) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    step(loss, optimizer)
    assert len(calls) == 2


@pytest.mark.parametrize("make", [xs.optim.RowAdam, torch.optim.AdamW])
def test_a_tied_embedding_with_dense_gradients_gives_one_warning(make):
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
    with pytest.warns(
            UserWarning, match=r"SampledSoftmaxLoss: expected a row-sparse gradient of "
            r"its table of shape \[40, 6\].*sparse=True"):
        step(copied[1], make(copied[1].parameters()), copied[0])


def test_sparse_adam_names_the_option_for_row_sparse_gradients():
    for sparse_grad in (None, True):
        loss = xs.SampledSoftmaxLoss(D, 40, sampler="uniform", num_samples=8, shared=False,
                                     sparse_grad=sparse_grad)
        optimizer = torch.optim.SparseAdam(list(loss.parameters()))
        loss(torch.randn(9, D), torch.randint(40, (9,))).backward()
        if sparse_grad:
            optimizer.step()
            continue
        with pytest.raises(
                RuntimeError, match=r"^SparseAdam: expected row-sparse gradients, got a "
                r"dense one .*sparse_grad=True"):
            optimizer.step()


def test_a_dense_gradient_that_the_loss_chose_gives_no_warning():
    loss = xs.SampledSoftmaxLoss(D, 12_000, sampler="uniform", num_samples=20, shared=False)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(
        torch.randn(1, D).expand(700, D), torch.zeros(700, dtype=torch.int64),
        torch.Generator().manual_seed(0)).backward()
    loss.linear.weight.grad[100:] = 0  # few nonzero rows, as with frequent classes
    assert not loss.linear.weight.grad.is_sparse
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_large_dense_gradient_with_few_rows_gives_a_warning():
    """A tied nn.Embedding without sparse=True makes the row-sparse gradient of the loss dense."""
    for sparse in (False, True):
        embedding, loss = torch.nn.Embedding(12_000, D, sparse=sparse), xs.SampledSoftmaxLoss(
            D, 12_000, sampler="uniform", num_samples=8)
        loss.linear.weight = embedding.weight
        optimizer = xs.optim.RowAdam(loss.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss(embedding(torch.arange(9)), torch.arange(9)).backward()
            optimizer.step()
        messages = [
            str(each.message) for each in caught if "as the loss made it" in str(each.message)
        ]
        assert len(messages) == (0 if sparse else 1)


def test_losses_with_dense_gradients_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse")
        for loss in (xs.LinearCrossEntropyLoss(D, N), sampled(sparse_grad=False)):
            step(loss, torch.optim.AdamW(loss.parameters()))
            step(loss, xs.optim.RowAdam(loss.parameters()))


def test_loaded_state_of_a_dense_optimizer_gives_one_warning():
    loss = sampled(sparse_grad=False)
    dense = torch.optim.AdamW(loss.parameters())
    step(loss, dense)
    loss.sparse_grad = True
    optimizer = xs.optim.RowAdam(loss.parameters())
    optimizer.load_state_dict(dense.state_dict())
    with pytest.warns(
            UserWarning, match=r"RowAdam: the state of a parameter of shape \[40, 6\] is "
            r"that of dense gradients"):
        step(loss, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse")
        step(loss, optimizer)


def test_distributed_checkpoints_create_state_without_a_warning():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    loss = sampled(sparse_grad=True)
    optimizer = xs.optim.RowAdam(loss.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*row-sparse.*")
        get_optimizer_state_dict(loss, optimizer)
    with pytest.warns(UserWarning, match="expected a row-sparse gradient"):
        loss.linear.weight.grad = torch.ones(N, D)
        optimizer.step()


def test_a_compiled_step_runs():
    loss = sampled(sparse_grad=False)
    optimizer = torch.optim.AdamW(loss.parameters())
    loss(torch.randn(3, D), torch.randint(N, (3,))).backward()
    before = loss.linear.weight.detach().clone()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(before, loss.linear.weight)


EVERY = {
    name: kind
    for name, kind in vars(torch.optim).items() if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


@pytest.mark.parametrize("kind", EVERY)
def test_every_torch_optimizer_steps_or_raises_our_error(kind):
    """An error of an ATen operator would not name an optimizer to use instead."""
    for options in ({}, dict(foreach=True), dict(fused=True), dict(maximize=True),
                    dict(weight_decay=0.1), dict(capturable=True),
                    dict(momentum=0.9, nesterov=True), dict(momentum=0.9,
                                                            foreach=True), dict(amsgrad=True)):
        loss = sampled()
        try:
            optimizer = EVERY[kind](loss.parameters(), lr=0.1, **options)
        except TypeError:
            assert options, "every optimizer has a learning rate"
            continue  # this optimizer lacks the option
        steps_or_raises_our_error(kind, loss, optimizer)


def steps_or_raises_our_error(kind, loss, optimizer):
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
            assert str(error).startswith(
                f"{kind}") and ": expected dense gradients, got a row-sparse one" in str(
                    error) and "use xs.optim.Row" in str(error)
            assert torch.equal(loss.linear.weight, before)


ROW_OPTIMIZERS = [xs.optim.RowAdam, xs.optim.RowAdagrad, xs.optim.RowSGD]


def hints(optimizer, steps=3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.step()
    return [str(each.message) for each in caught if "dense gradient" in str(each.message)]


@pytest.mark.parametrize("make", ROW_OPTIMIZERS)
def test_a_dense_embedding_of_many_rows_gives_one_hint(make):
    for rows in (10_000, 12_345):
        embedding, loss = torch.nn.Embedding(rows, 3), sampled()
        optimizer = make([*embedding.parameters(), *loss.parameters()])
        embedding(torch.tensor([5, rows - 1])).sum().backward()
        (message,) = hints(optimizer)
        assert message.startswith(f"{make.__name__}: a parameter of shape [{rows}, 3] has a dense "
                                  "gradient, most of whose rows are zero")
        assert "nn.Embedding(..., sparse=True)" in message
        optimizer.load_state_dict(optimizer.state_dict())
        assert len(hints(optimizer, 2)) == 1, "loading a state dict repeats the check"


def test_justified_dense_gradients_give_no_hint():
    few, many = torch.nn.Embedding(9_999, 3), torch.nn.Embedding(12_000, 3)
    sparse = torch.nn.Embedding(12_000, 3, sparse=True)
    exact, head = xs.SampledSoftmaxLoss(3, 12_000, sampler="uniform", num_samples=8,
                                        sparse_grad=False), torch.nn.Linear(3, 12_000)
    zero = torch.nn.Linear(3, 12_000)
    few(torch.tensor([3])).sum().backward()
    many(torch.arange(7_000)).sum().backward()
    sparse(torch.tensor([3])).sum().backward()
    exact(torch.randn(2, 3), torch.tensor([1, 2])).backward()
    head(torch.ones(1, 3)).square().sum().backward()
    (zero(torch.randn(1, 3)) * 0).sum().backward()
    assert hints(
        xs.optim.RowAdam([
            each for module in (few, many, sparse, exact, head, zero)
            for each in module.parameters()
        ])) == []


def test_the_error_of_torch_clipping_names_our_function():
    """torch.nn.utils lacks operators for sparse tensors, and their errors would not say what to
    call instead."""
    loss, encoder = sampled(), torch.nn.Linear(D, D)
    parameters = [*encoder.parameters(), *loss.parameters()]
    loss(encoder(torch.randn(4, D)), torch.randint(N, (4,))).backward()
    grads = [param.grad for param in parameters]
    before = [grad.to_dense().clone() for grad in grads]
    utils = torch.nn.utils
    for call, told in ((lambda **how: utils.clip_grad_norm_(parameters, 0.1, **how),
                        "use xs.clip_grad_norm_"),
                       (lambda **how: utils.clip_grad_norm_(parameters, 0.1, float("inf"), **how),
                        "use xs.clip_grad_norm_"),
                       (lambda **how: utils.get_total_norm(grads, **how), "use xs.clip_grad_norm_"),
                       (lambda **how: utils.clip_grad_value_(parameters, 0.1, **how),
                        "clip by norm, with xs.clip_grad_norm_")):
        for foreach in (None, False, True):
            with pytest.raises(
                    NotImplementedError, match="expected a dense tensor, got a sparse "
                    "one. To clip row-sparse gradients, "
                    f"{told}"):
                call(foreach=foreach)
    assert all(torch.equal(grad.to_dense(), was) for grad, was in zip(grads[-1:], before[-1:]))
    xs.clip_grad_norm_(parameters, 0.1)
    torch.nn.utils.clip_grad_norm_(encoder.parameters(), 0.1)


def test_grad_scaler_unscales_row_sparse_gradients():
    loss = sampled()
    scaler, optimizer = torch.amp.GradScaler("cpu",
                                             init_scale=8.0), xs.optim.RowAdam(loss.parameters())
    torch.manual_seed(0)
    scaler.scale(
        loss(torch.randn(4, D), torch.randint(N, (4,)),
             generator=torch.Generator().manual_seed(0))).backward()
    scaled = loss.linear.weight.grad.to_dense()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(loss.linear.weight.grad.to_dense() * 8, scaled)
    before = loss.linear.weight.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(loss.linear.weight, before)


@pytest.mark.parametrize(
    "place, make",
    [("losses.linear_loss", sampled),
     ("trees.tree_loss", lambda: xs.HierarchicalSoftmaxLoss(D, xs.LabelTree.balanced(N))),
     ("matcher.hierarchical_matcher", lambda: xs.HierarchicalMatcher(D, xs.LabelTree.balanced(N)))])
def test_an_optimizer_steps_while_another_thread_makes_a_table(place, make, monkeypatch):
    loss = sampled()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    module = importlib.import_module(f"xsoftmax.{place}")
    make_linear, calls = module.make_linear, []

    def step_first(*args):
        monkeypatch.setattr(module, "make_linear", make_linear)
        calls.append(step(loss, optimizer))
        return make_linear(*args)

    monkeypatch.setattr(module, "make_linear", step_first)
    made = make()
    assert calls and made in hooks.table_modules
