"""Invariants of every loss with every sampler, estimator and optimizer (combinations.py)."""

import copy
import random

import pytest
import torch

import xsoftmax as xs
from combinations import COMBINATIONS, D, N, Q

each = pytest.mark.parametrize("made", COMBINATIONS.values(), ids=COMBINATIONS.keys())


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def all_tensors(loss):
    """Returns parameters and buffers, including those that no state dict holds."""
    return {
        name: tensor.detach().clone()
        for name, tensor in (*loss.named_parameters(), *loss.named_buffers())
    }


def assert_same(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if tolerance and value.is_floating_point():
            torch.testing.assert_close(got[name], value, equal_nan=True, **tolerance)
        else:
            assert torch.equal(got[name], value), name


def train_step(made, loss, optimizer, input, target, seed):
    optimizer.zero_grad()
    value = made.call(loss, input, target, generator(seed))
    value.sum().backward()
    optimizer.step()
    return value.detach()


# ---- ignored queries


@each
def test_ignored_queries_change_nothing(made):
    """Ignored queries with NaN change no loss, no gradient and no state of a sampler."""
    results = []
    for ignored in (0, 3):
        loss = made.make()
        input, target = made.batch()
        input = torch.cat([input, torch.full((ignored, D), float("nan"), dtype=input.dtype)])
        target = torch.cat([target, torch.full((ignored,), loss.ignore_index)])
        found = {}
        for step, reduction in enumerate(("none", "mean", "sum")):
            loss.reduction = reduction
            loss.zero_grad()
            queries = input.clone().requires_grad_()
            value = made.call(loss, queries, target, generator(step))
            assert reduction != "none" or value[Q:].eq(0).all()
            value.sum().backward()
            assert queries.grad[Q:].eq(0).all()
            found |= {
                f"{reduction} loss": value.detach()[:Q] if reduction == "none" else value.detach(),
                f"{reduction} queries": queries.grad[:Q]
            }
            found |= {
                f"{reduction} gradient of {name}": parameter.grad.to_dense()
                for name, parameter in loss.named_parameters() if parameter.grad is not None
            }
        results.append(found | all_tensors(loss))
    assert all(value.isfinite().all() for value in results[1].values() if value.is_floating_point())
    # Sums over another number of rows may round differently, and codebooks are float32. Features of
    # RFF are float32 sums of terms up to 1 that cancel down to the floor of 0.01, so each level of
    # its tree adds an error of 1.2e-7 / 0.01.
    tolerance = 5e-5 if made.sampler is not None and made.sampler["name"] == "rff" else 1e-6
    assert_same(results[1], results[0], rtol=tolerance, atol=tolerance / 100)


# ---- errors


def bad_calls(made, loss, optimizer):
    input, target = made.batch()

    def call(input, target):
        return lambda: made.call(loss, input, target, generator())

    table = made.table(loss)

    def with_table(change, what):
        def run():
            kept = table.weight
            table.weight = torch.nn.Parameter(change(kept.detach()))
            try:
                what()
            finally:
                table.weight = kept

        return run

    def refused_step():
        weight = table.weight
        kept = weight.grad
        weight.grad = torch.sparse_coo_tensor([[1]], torch.zeros(1, D, dtype=weight.dtype),
                                              weight.shape)
        weight.grad._indices().fill_(len(weight))
        try:
            optimizer.step()
        finally:
            weight.grad = kept

    one = target.clone()
    yield "width of input", call(input[:, 1:], target), ValueError
    yield "dtype of input", call(input.float(), target), TypeError
    yield "no tensor", call(input.tolist(), target), TypeError
    yield "shape of target", call(input, target[1:]), ValueError
    yield "dtype of target", call(input, target.int()), TypeError
    one[-1] = N
    yield "target too large", call(input, one), IndexError
    yield "negative target", call(input, torch.where(one == N, -1, one)), IndexError
    yield "rows of the table", with_table(lambda table: torch.cat([table, table[:1]]),
                                          call(input, target)), ValueError
    yield "number of the best", lambda: loss.topk(input, N + 1), ValueError
    yield "width of queries", lambda: loss.topk(input[:, 1:], 2), ValueError
    yield "target of the exact loss", lambda: loss.exact(input, one), IndexError
    yield "step", refused_step, IndexError
    if made.loss == "CaneLoss":
        yield "candidates beside others", lambda: loss(input, target, torch.tensor([1, 2]),
                                                       generator=generator()), ValueError
    if made.follows_table:

        def with_nan(table):
            table = table.clone()
            table[3] = float("nan")
            return table

        yield "NaN in the table", with_table(with_nan, call(input, target)), ValueError


@each
def test_errors_change_nothing(made):
    """An error changes no parameter, no state of samplers and optimizer, and no generator."""
    loss = made.make()
    optimizer = made.make_optimizer(loss)
    for step in range(2):  # samplers that refresh at every second step are due in the next call
        train_step(made, loss, optimizer, *made.batch(seed=step), step)
    optimizer.flush()
    before, state = all_tensors(loss), copy.deepcopy(optimizer.state_dict())
    for what, wrong, error in bad_calls(made, loss, optimizer):
        drawn = torch.get_rng_state()
        with pytest.raises(error):
            wrong()
            pytest.fail(f"nothing was raised for: {what}")
        assert torch.equal(torch.get_rng_state(), drawn), what
        assert_same(all_tensors(loss), before)
        now = optimizer.state_dict()
        assert now["param_groups"] == state["param_groups"]
        for key, tensors in state["state"].items():
            assert_same(now["state"][key], tensors)


# ---- order of flushing, refreshing and saving


def caught_up(loss, optimizer):
    loss.catch_up()


def flushed(loss, optimizer):
    optimizer.flush()


def evaluated(loss, optimizer):
    loss.eval()
    with torch.no_grad():
        loss(torch.ones(2, D, dtype=torch.float64), torch.tensor([1, 2]))
    loss.train()


def saved(loss, optimizer):
    loss.load_state_dict(copy.deepcopy(loss.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def predicted(loss, optimizer):
    loss.predict(torch.ones(2, D, dtype=torch.float64))


def refreshed(loss, optimizer):
    for name in ("sampler", "noise", "candidate_sampler"):
        sampler = getattr(loss, name, None)
        if sampler is not None:
            if sampler.follows_table:
                sampler.refresh(loss.linear.weight, loss.linear.bias)
    if isinstance(loss, xs.BeamTreeLoss):
        loss.balance()


@each
def test_the_order_of_flushes_refreshes_and_saves_changes_nothing(made):
    """Between steps a table is caught up, evaluated, saved and refreshed in any order.

    A refresh must see the table as after flush(). A training step scores rows without their pending
    updates, so every variant catches up somewhere between two steps.
    """
    rng = random.Random(3)
    results = []
    for variant in range(4):
        loss = made.make()
        optimizer = made.make_optimizer(loss)
        for step in range(5):
            train_step(made, loss, optimizer, *made.batch(seed=step), step)
            doings = [caught_up, refreshed]
            if variant > 0:
                doings = [refreshed, rng.choice([caught_up, flushed, evaluated, saved, predicted])]
                doings += [
                    what for what in (caught_up, flushed, evaluated, saved, predicted)
                    if rng.random() < 0.4
                ]
                rng.shuffle(doings)
            torch.manual_seed(step)  # a refresh may draw
            for what in doings:
                what(loss, optimizer)
        optimizer.flush()
        results.append(all_tensors(loss))
    for other in results[1:]:
        assert_same(other, results[0], rtol=1e-9, atol=1e-11)
