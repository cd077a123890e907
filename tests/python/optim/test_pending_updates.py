"""Pending updates of row-wise optimizers.

A table is caught up before it is read, also in compiled and exported modules; updates are dropped
when the table is overwritten or the state is replaced.
"""

import copy
import io
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gradient_checks import seeded, sparse  # noqa: F401 (seeded: an autouse fixture)
from xsoftmax.optim import RowAdam, RowSGD, catch_up

ops = torch.ops.xsoftmax
N, WIDTH = 20, 3


def deferred(make=RowAdam, **options):
    """Returns a table with pending updates, and its optimizer."""
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(N, WIDTH))
    optimizer = make([table], lr=0.1, **({"momentum": 0.9} if make is RowSGD else {}), **options)
    for t in range(5):
        table.grad = sparse(torch.tensor([t, t + 1]), torch.randn(2, WIDTH), N)
        optimizer.step()
    return table, optimizer


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("alias", [lambda p: p, lambda p: p.data, lambda p: p.detach().t()[:1]],
                         ids=["itself", "data", "view"])
def test_catch_up_equals_flush(make, alias):
    (table, optimizer), (other, other_optimizer) = deferred(make), deferred(make)
    before, version = table.detach().clone(), table._version
    other_optimizer.flush()
    catch_up(alias(table))
    # the version is unchanged: a backward pass through earlier reads still works
    assert torch.equal(table,
                       other) and not torch.equal(table, before) and table._version == version
    catch_up(alias(table))
    optimizer.flush()
    assert torch.equal(table, other)
    catch_up(table)
    catch_up(torch.ones(3))
    ops.catch_up_(torch.empty(3, device="meta"))


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("write", [
    lambda p: p.copy_(torch.ones_like(p)), lambda p: torch.nn.init.ones_(p),
    lambda p: p.mul_(0).add_(1)
])
@pytest.mark.parametrize("then", ["flush", "catch_up", "state_dict", "step", "delete"])
def test_overwriting_a_table_drops_its_pending_updates(make, write, then):
    """A table loaded after early stopping, say, is not moved by updates of the table before."""
    table, optimizer = deferred(make)
    with torch.no_grad():
        write(table)
    if then == "step":  # row 0 had a gradient in the first step only
        table.grad = sparse(torch.tensor([N - 1]), torch.zeros(1, WIDTH), N)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    else:
        {
            "flush": optimizer.flush, "catch_up": lambda: catch_up(table),
            "state_dict": optimizer.state_dict, "delete": optimizer.__del__
        }[then]()
    assert torch.equal(table, torch.ones_like(table))
    optimizer.flush()
    assert torch.equal(table, torch.ones_like(table))


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("turns", [[(0, 1)] * 6, [(0,), (1,), (0, 1), (1,), (0,), (0, 1)]],
                         ids=["together", "in turns"])
def test_tables_that_are_views_of_one_tensor_are_updated_like_separate_tables(make, turns):
    """They share a version counter, but a step of one does not count as a write to the other."""
    options = {"momentum": 0.9} if make is RowSGD else {}
    both = torch.randn(2 * N, WIDTH)
    apart = [torch.nn.Parameter(both[:N].clone()), torch.nn.Parameter(both[N:].clone())]
    views = [torch.nn.Parameter(both[:N]), torch.nn.Parameter(both[N:])]
    for tables in (views, apart):
        optimizer = make(tables, lr=0.1, weight_decay=0.1, **options)
        for t, turn in enumerate(turns):
            for i, table in enumerate(tables):
                table.grad = sparse(torch.tensor([t]), torch.ones(1, WIDTH),
                                    N) if i in turn else None
            optimizer.step()
        optimizer.flush()
    assert all(torch.equal(view, alone) for view, alone in zip(views, apart))


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
def test_a_refused_step_drops_no_pending_updates(make):
    (table, optimizer), (other, other_optimizer) = deferred(make), deferred(make)
    for wrong in (torch.tensor([N]), torch.tensor([-1])):
        table.grad = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64),
                                             torch.ones(1, WIDTH), (N, WIDTH))
        table.grad._indices().copy_(wrong)
        with pytest.raises(IndexError):
            optimizer.step()
    for parameter, each in ((table, optimizer), (other, other_optimizer)):
        parameter.grad = sparse(torch.tensor([2]), torch.ones(1, WIDTH), N)
        each.step()
        each.flush()
    assert torch.equal(table, other)


def test_moments_survive_an_overwritten_table():
    """Dropped updates do not move the table; the moments keep their age."""
    table, optimizer = deferred(RowAdam)
    want, other = deferred(RowAdam)
    other.flush()
    with torch.no_grad():
        table.copy_(want)
    for parameter, each in ((table, optimizer), (want, other)):
        parameter.grad = sparse(torch.tensor([1, 3]), torch.ones(2, WIDTH), N)
        each.step()
        each.flush()
    torch.testing.assert_close(table, want)


def test_a_backward_pass_works_after_catch_up_and_fails_after_flush():
    table, optimizer = deferred()
    table.grad = None
    loss = table.square().sum()
    catch_up(table)
    loss.backward()
    assert torch.equal(table.grad, 2 * table)
    optimizer.step()
    loss = table.square().sum()
    optimizer.flush()  # unlike catch_up, a write
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_catch_up_of_a_tensor_includes_all_parameters_on_its_storage():
    both = torch.randn(2 * N, WIDTH)
    tables = [torch.nn.Parameter(both[:N]), torch.nn.Parameter(both[N:])]
    optimizer = RowAdam(tables, lr=0.1)
    for row in (1, 2):
        for table in tables:
            table.grad = sparse(torch.tensor([row]), torch.ones(1, WIDTH), N)
        optimizer.step()
    catch_up(both)
    before = both.clone()
    optimizer.flush()
    assert torch.equal(both, before)


def test_loading_a_state_dict_drops_pending_updates():
    table, optimizer = deferred()
    before = table.detach().clone()
    saved = copy.deepcopy(optimizer.state_dict())
    assert not torch.equal(table, before)  # state_dict flushes
    table.grad = sparse(torch.tensor([0]), torch.ones(1, WIDTH), N)
    optimizer.step()
    alive = dict(optimizer.state[table])
    before = table.detach().clone()
    # updates of the old state are dropped, although `alive` still holds its tensors
    optimizer.load_state_dict(saved)
    catch_up(table)
    assert torch.equal(table.detach(), before) and alive


def test_deleting_an_optimizer_flushes_its_tables():
    (table, optimizer), (other, other_optimizer) = deferred(), deferred()
    other_optimizer.flush()
    assert not torch.equal(table, other)
    del optimizer
    assert torch.equal(table, other)


def test_an_optimizer_that_is_deleted_while_a_program_is_traced_flushes_its_tables():
    (table, optimizer), (other, other_optimizer) = deferred(), deferred()
    other_optimizer.flush()
    alive = [optimizer]
    del optimizer

    def program(x):
        alive.clear()
        return x + 1

    graph = make_fx(program, tracing_mode="fake")(torch.ones(2)).graph
    assert not any("flush" in str(node.target) for node in graph.nodes)
    assert torch.equal(table, other)


def test_clearing_the_state_drops_pending_updates():
    table, optimizer = deferred()
    before = table.detach().clone()
    optimizer.state.clear()
    catch_up(table)
    assert torch.equal(table.detach(), before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_the_same_pending_updates(how):
    table, optimizer = deferred()
    if how == "deepcopy":
        copied, copied_optimizer = copy.deepcopy((table, optimizer))
    else:
        buffer = io.BytesIO()
        torch.save((table, optimizer), buffer)
        buffer.seek(0)
        copied, copied_optimizer = torch.load(buffer, weights_only=False)
    catch_up(table)
    assert not torch.equal(copied, table)
    catch_up(copied)
    assert torch.equal(copied, table) and copied_optimizer.state


def test_catch_up_from_several_threads():
    (table, optimizer), (other, other_optimizer) = deferred(), deferred()
    other_optimizer.flush()
    threads = [threading.Thread(target=catch_up, args=(table,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(table, other) and optimizer.state


class Scores(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.weight = table

    def forward(self, input):
        catch_up(self.weight)
        return input @ self.weight.t()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", ["compile", "script"])
def test_catch_up_in_compiled_modules(how, grad):
    (table, optimizer), (other, other_optimizer) = deferred(), deferred()
    other_optimizer.flush()
    model = torch.compile(Scores(table), fullgraph=True) if how == "compile" else torch.jit.script(
        Scores(table))
    input = torch.randn(2, WIDTH)
    with torch.set_grad_enabled(grad):
        scores = model(input)
    assert torch.equal(table, other)
    torch.testing.assert_close(scores.detach(), input @ other.detach().t())
    before = table.detach().clone()
    optimizer.flush()
    assert torch.equal(table.detach(), before)


def test_catch_up_can_be_exported():
    table, optimizer = deferred()
    input = torch.randn(2, WIDTH)
    optimizer.flush()
    expected = Scores(table)(input)
    exported = torch.export.export(Scores(table), (input,)).run_decompositions({})
    torch.testing.assert_close(exported.module()(input), expected)
