"""loss.resize_classes: a loss that was resized is one that was built at that size and given its state."""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from combinations import COMBINATIONS, COUNTS, D, HEAD, N, WEIGHT, Combination, make_sampler, sampler
from sampler_checks import chi_square
from torch import nn
from torch.nn import functional as F

import combinations
import xsoftmax as xs

LARGER, SMALLER = 29, 17  # of 23 classes; the head's last one is 16
RESIZABLE = {name: combination for name, combination in COMBINATIONS.items() if combination.tree is None}


def resized_spec(spec, size):
    """The sampler of a description for another number of classes: new ones are as rare as the rarest."""
    spec = dict(spec)
    if "counts" in spec:
        spec["counts"] = torch.cat([COUNTS, COUNTS.new_ones(max(0, size - N))])[:size]
    if "parts" in spec:
        spec["parts"] = [resized_spec(part, size) for part in spec["parts"]]
    if "sampler" in spec:
        spec["sampler"] = resized_spec(spec["sampler"], size)
    return spec


def built_at(combination: Combination, size: int, monkeypatch):
    """The loss of a combination with that many classes."""
    tensors = dict(combination.tensors)
    if "weight" in tensors:
        tensors["weight"] = torch.cat([WEIGHT, WEIGHT.new_ones(max(0, size - N))])[:size]
    other = copy.copy(combination)
    other.sampler = combination.sampler and resized_spec(combination.sampler, size)
    other.candidates = combination.candidates and resized_spec(combination.candidates, size)
    other.tensors = tensors
    with monkeypatch.context() as patch:
        patch.setattr(combinations, "N", size)
        return other.make(seed=3)


def train(combination, loss, optimizer, steps, seed, classes):
    values = []
    for step in range(steps):
        made = torch.Generator().manual_seed(seed + step)
        input, target = torch.randn(7, D, dtype=torch.float64, generator=made), torch.randint(classes, (7,), generator=made)
        optimizer.zero_grad()
        value = combination.call(loss, input, target, torch.Generator().manual_seed(seed + 100 + step))
        value.sum().backward()
        optimizer.step()
        values.append(value.detach().clone())
    return values


def state_of(loss, optimizer=None):
    tensors = {name: value.clone() for name, value in loss.state_dict().items()}
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{name}": value.clone() for name, value in state.items()}
    return tensors


def assert_equal(one, other, close=False):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6 if close else 0, atol=1e-9 if close else 0, equal_nan=True,
                                   msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("name, size", [(name, (LARGER, SMALLER)[number % 5]) for number, name in enumerate(RESIZABLE) if number % 5 < 2])
def test_goes_on_as_one_that_was_built_at_that_size(name, size, monkeypatch):
    # What fails: a sampler, an index, class weights or an optimizer that has another number of classes, or another law, than its loss.
    combination = RESIZABLE[name]
    loss = combination.make()
    optimizer = combination.make_optimizer(loss)
    train(combination, loss, optimizer, 2, seed=1, classes=N)
    tables = [loss.linear.weight, loss.linear.bias]
    loss.settle()
    rows = [None if table is None else table.detach().clone() for table in tables]
    torch.manual_seed(5)
    loss.resize_classes(size)
    assert loss.num_classes == loss.linear.out_features == size and loss.linear.weight is tables[0] and loss.linear.bias is tables[1]
    kept = min(size, N)
    for table, before in zip(tables, rows):
        if table is not None:
            assert len(table) == size and table.grad is None and torch.equal(table[:kept], before[:kept])
    torch.manual_seed(5)
    fresh = nn.Linear(D, size - kept, bias=tables[1] is not None, dtype=torch.float64) if size > N else None
    if fresh is not None:
        assert torch.equal(tables[0][kept:], fresh.weight) and (fresh.bias is None or torch.equal(tables[1][kept:], fresh.bias))
    other = built_at(combination, size, monkeypatch)
    other_optimizer = combination.make_optimizer(other)
    other.load_state_dict(loss.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    static = "unigram" in name  # whose probabilities were made from counts here, and from probabilities there
    values = train(combination, loss, optimizer, 3, seed=7, classes=size)
    others = train(combination, other, other_optimizer, 3, seed=7, classes=size)
    torch.testing.assert_close(values, others, rtol=1e-6 if static else 0, atol=1e-9 if static else 0)
    assert_equal(state_of(loss, optimizer), state_of(other, other_optimizer), close=static)


@pytest.mark.parametrize("name", list(RESIZABLE)[::7])
def test_growth_and_shrinking_again_leave_what_was(name):
    combination = RESIZABLE[name]
    loss = combination.make()
    optimizer = combination.make_optimizer(loss)
    train(combination, loss, optimizer, 2, seed=1, classes=N)
    bias = loss.linear.bias
    for each in loss._samplers():  # an index takes in all biases
        each.plan_resize(N, loss.linear.weight.detach()[:0], None if bias is None else bias.detach())()
    before = state_of(loss, optimizer)
    loss.resize_classes(LARGER)
    loss.resize_classes(N)
    assert_equal(state_of(loss, optimizer), before, close="unigram" in name)


LAWS = {"uniform": {}, "log_uniform": {}, "unigram": dict(counts=COUNTS), "midx": dict(codewords=4), "exact_midx": dict(codewords=4),
        "spread_midx": dict(codewords=4), "lsh": dict(tables=4, bits=2), "sphere": {}, "rff": dict(features=8)}


@pytest.mark.parametrize("size", [LARGER, SMALLER])
@pytest.mark.parametrize("law", LAWS)
def test_draws_have_the_expected_counts_that_they_say(law, size):
    # What fails: an index whose counts are not those of what it draws from, or one that draws what is gone.
    torch.manual_seed(1)
    shared = {} if law in combinations.ADAPTIVE else {"shared": False}
    chosen = make_sampler(sampler(law, num_samples=4000, **shared, exclude=torch.tensor([1, 3]), **LAWS[law]), bias=True)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=chosen, bias=True)
    nn.init.normal_(loss.linear.weight)
    chosen.prepare(loss.linear.weight, loss.linear.bias)
    loss.resize_classes(size)
    queries = torch.randn(3, D)
    drawn = loss.sampler.sample(queries)[0]
    log_count = loss.sampler.log_count(queries, torch.arange(size)).expand(3, size)
    assert torch.isfinite(log_count[:, [2, size - 1]]).all() and (log_count[:, [1, 3]] == -torch.inf).all()  # new classes have their place
    assert log_count.exp().sum(1).tolist() == pytest.approx([4000] * 3, rel=1e-3)
    torch.testing.assert_close(drawn.log_count, log_count.gather(1, drawn.ids), rtol=1e-5, atol=1e-5)
    for q in range(3):
        assert chi_square(torch.bincount(drawn.ids[q], minlength=size), log_count[q].exp().double()) > 1e-4


def test_new_classes_of_midx_have_the_cells_of_their_rows():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.MidxSampler(N, D, 4, codewords=4, bias=True), bias=True)
    loss(torch.randn(4, D), torch.arange(4))
    cell, codebooks = loss.sampler.cell.clone(), (loss.sampler.codewords1.clone(), loss.sampler.codewords2.clone())
    loss.resize_classes(LARGER)
    assert torch.equal(loss.sampler.cell[:N], cell) and torch.equal(loss.sampler.codewords1, codebooks[0])
    assert torch.equal(loss.sampler.cell[N:], torch.ops.xsoftmax.midx_encode(loss.linear.weight[N:].detach(), *codebooks)[0])
    assert int(loss.sampler.step) == 1


@pytest.mark.parametrize("make", [lambda: xs.samplers.MidxSampler(N, D, 4, codewords=4), lambda: xs.samplers.LshSampler(N, D, 4),
                                  lambda: xs.samplers.RffSampler(N, D, 4)])
def test_a_sampler_without_the_rows_of_new_classes_begins_anew(make):
    torch.manual_seed(0)
    chosen, weight = make(), torch.randn(LARGER, D)
    chosen.refresh(weight[:N])
    chosen.resize(LARGER)
    assert int(chosen.step) == 0 and chosen.num_classes == LARGER
    chosen.refresh(weight)
    assert chosen.log_count(torch.randn(1, D), torch.arange(LARGER)).exp().sum().item() == pytest.approx(4, rel=1e-4)


# ---- optimizers

PAIRS = {"adam": (xs.optim.RowAdam, torch.optim.AdamW, dict(lr=0.05, weight_decay=0.0), {}),
         "sgd": (xs.optim.RowSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.9), {}),
         "adagrad": (xs.optim.RowAdagrad, torch.optim.Adagrad, dict(lr=0.1, initial_accumulator_value=0.5), {})}


@pytest.mark.parametrize("sizes", [[24, 25, 26, 40, 41], [22, 21, 9, 10], [30, 20, 30]])
@pytest.mark.parametrize("rule", PAIRS)
def test_row_optimizers_go_on_as_the_dense_ones(rule, sizes):
    # What fails: state of a row at the place of another, steps owed by the wrong rows or lost, new rows that owe steps of before.
    make, dense, options, _ = PAIRS[rule]
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UniformSampler(N, 3), bias=True, dtype=torch.float64)
    other = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UniformSampler(N, 3), bias=True, dtype=torch.float64, sparse_grad=False)
    other.load_state_dict(loss.state_dict())
    optimizers = make(loss.parameters(), **options), dense(other.parameters(), **options)

    def step(classes, seed):
        made = torch.Generator().manual_seed(seed)
        input, target = torch.randn(2, D, dtype=torch.float64, generator=made), torch.randint(classes, (2,), generator=made)
        for module, optimizer in zip((loss, other), optimizers):
            optimizer.zero_grad()
            # Rows that owe steps would give other gradients: those of the dense twin are taken.
            other.zero_grad()
            other(input, target, generator=torch.Generator().manual_seed(seed)).backward()
            for mine, its in zip(module.parameters(), other.parameters()):
                grad = its.grad.clone()
                if module is loss and mine.dim() == 2:
                    rows = grad.abs().sum(1).nonzero().squeeze(1)
                    grad = torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape)
                mine.grad = grad
        for optimizer in optimizers:
            optimizer.step()

    for number, size in enumerate([N, *sizes]):
        if size != N or number:
            torch.manual_seed(size)
            loss.resize_classes(size)
            torch.manual_seed(size)
            other.resize_classes(size, optimizers=[optimizers[1]])
        for k in range(4):
            step(size, 10 * number + k)
    optimizers[0].flush()
    for mine, its in zip(loss.parameters(), other.parameters()):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)


def test_growth_by_one_row_moves_memory_and_makes_rows_up_seldom():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, 1000, sampler="uniform", num_samples=4)
    optimizer = xs.optim.RowAdam(loss.parameters())
    moves, settled = [], []
    for number in range(500):
        loss(torch.randn(2, D), torch.randint(1000, (2,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = loss.linear.weight.data_ptr()
        loss.resize_classes(loss.num_classes + 1)
        moves.append(loss.linear.weight.data_ptr() != before)
        settled.append(int(optimizer.state[loss.linear.weight]["owed"][0]))
    assert sum(moves) == 2  # to room for 1,250 rows and for 1,562
    assert len(set(settled)) == 2  # where memory moved; else steps stay owed
    assert optimizer.state[loss.linear.weight]["exp_avg"].shape == loss.linear.weight.shape == (1500, D)


def test_room_for_owed_steps_grows_with_the_table():
    loss = xs.SampledSoftmaxLoss(2, 3000, sampler="uniform", num_samples=4)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(torch.randn(2, 2), torch.tensor([1, 2])).backward()
    optimizer.step()
    loss.resize_classes(20000)
    made = torch.ops.xsoftmax.row_adam_state(loss.linear.weight, True, "lr=0.1,beta1=0.9,beta2=0.99,eps=1e-8,weight_decay=0")[-1]
    assert optimizer.state[loss.linear.weight]["owed"].shape == made.shape


def test_an_optimizer_with_state_of_other_shapes_goes_on():
    loss = xs.LinearCrossEntropyLoss(D, N)
    loss.resize_classes(LARGER)
    optimizer = torch.optim.Adafactor(loss.parameters())  # rows and columns
    for _ in range(2):
        optimizer.zero_grad()
        loss(torch.randn(4, D), torch.arange(4)).backward()
        optimizer.step()
    with pytest.raises(TypeError, match="a Adafactor with row_var"):
        loss.resize_classes(LARGER + 1, optimizers=[optimizer])


TORCH = {"adam": (torch.optim.Adam, dict(amsgrad=True), False), "sparse adam": (torch.optim.SparseAdam, {}, True), "adagrad": (torch.optim.Adagrad, {}, True),
         "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9), False), "sgd, sparse": (torch.optim.SGD, dict(lr=0.1, momentum=0.9), True),
         "rmsprop": (torch.optim.RMSprop, dict(momentum=0.5, centered=True), False)}


@pytest.mark.parametrize("size", [LARGER, SMALLER, 1])
@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch_follow_where_given_and_refuse_where_not(name, size):
    make, options, sparse = TORCH[name]
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UniformSampler(N, 1), sparse_grad=sparse)
    optimizer = make(loss.parameters(), **options)

    def step():
        optimizer.zero_grad()
        loss(torch.randn(4, D), torch.randint(loss.num_classes, (4,))).backward()
        optimizer.step()

    step()
    twin = copy.deepcopy(loss), None
    forgetful = make(twin[0].parameters(), **options)
    forgetful.load_state_dict(optimizer.state_dict())
    twin[0].resize_classes(size)
    twin[0](torch.randn(4, D), torch.randint(size, (4,))).backward()
    before = twin[0].linear.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"resize_classes\(n, optimizers=\[optimizer\]\)"):
        forgetful.step()
    assert torch.equal(twin[0].linear.weight, before)
    twin[0].resize_classes(size, optimizers=[forgetful])  # what the message says helps, and keeps the gradient
    assert all(value.shape == (size, D) for value in forgetful.state[twin[0].linear.weight].values() if getattr(value, "ndim", 0) > 0)
    forgetful.step()
    assert size == 1 or not torch.equal(twin[0].linear.weight, before)  # one class has no gradient

    state = {key: value.to_dense() for key, value in optimizer.state[loss.linear.weight].items() if isinstance(value, torch.Tensor) and value.dim() == 2}
    loss.resize_classes(size, optimizers=[optimizer])
    kept = min(size, N)
    for key, value in state.items():
        after = optimizer.state[loss.linear.weight][key].to_dense()
        assert after.shape == (size, D) and torch.equal(after[:kept], value[:kept]) and (after[kept:] == 0).all()
    step()


def test_the_same_number_of_classes_changes_nothing():
    """A caller may say the number before every step: a graph that waits, gradients and the table stay as they are."""
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=4, bias=True)
    value = loss(torch.randn(4, D), torch.arange(4))
    state = copy.deepcopy(loss.state_dict())
    loss.resize_classes(N)
    value.backward()
    gradient = loss.linear.weight.grad
    loss.resize_classes(N)
    assert loss.linear.weight.grad is gradient is not None
    assert all(torch.equal(state[name], now) for name, now in loss.state_dict().items())


def test_optimizers_that_were_loaded_or_copied_are_found():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4)
    first = xs.optim.RowAdagrad(loss.parameters(), initial_accumulator_value=0.25)
    loss(torch.randn(4, D), torch.arange(4)).backward()
    first.step()
    second = xs.optim.RowAdagrad(loss.parameters(), initial_accumulator_value=0.25)
    second.load_state_dict(first.state_dict())
    copied, of_copy = copy.deepcopy((loss, first))
    loss.resize_classes(LARGER)
    copied.resize_classes(LARGER)
    for module, optimizer in ((loss, first), (loss, second), (copied, of_copy)):
        assert optimizer.state[module.linear.weight]["sum"].shape == (LARGER, D) and (optimizer.state[module.linear.weight]["sum"][N:] == 0.25).all()


# ---- autograd, memory, checkpoints


def test_a_graph_that_is_kept_changes_nothing_and_one_that_waits_is_refused():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, bias=True)
    kept = loss(torch.randn(4, D), torch.arange(4))  # as the value of the last step in a loop that assigns it anew
    kept.backward()
    loss.resize_classes(N)
    assert loss.linear.weight.grad.shape == (N, D)  # nothing happened
    seen = []
    loss.linear.weight.register_hook(lambda grad: seen.append(grad.shape))
    loss.linear.weight.register_post_accumulate_grad_hook(lambda table: seen.append(table.grad.shape))
    loss.resize_classes(LARGER)
    kept = loss(torch.randn(4, D), torch.arange(25, 29))
    kept.backward()
    assert seen == [(LARGER, D)] * 2 and loss.linear.weight.grad.shape == (LARGER, D)
    waiting = loss(torch.randn(4, D, requires_grad=True), torch.arange(4))
    loss.resize_classes(LARGER + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()


def test_checkpoints_and_copies_hold_the_rows_alone():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(8, 4000, sampler="uniform", num_samples=4)
    optimizer = xs.optim.RowAdam(loss.parameters())
    for size in (4100, 4101):
        loss(torch.randn(4, 8), torch.arange(4)).backward()
        optimizer.step()
        loss.resize_classes(size)
    fresh = xs.SampledSoftmaxLoss(8, 4101, sampler="uniform", num_samples=4)
    saved = [io.BytesIO(), io.BytesIO()]
    for module, file in zip((loss, fresh), saved):
        torch.save(module.state_dict(), file)
        file.seek(0)
    assert len(saved[0].getvalue()) == len(saved[1].getvalue())
    assert loss.linear.weight.untyped_storage().nbytes() == 4101 * 8 * 4
    state = torch.load(saved[0])
    fresh.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        xs.SampledSoftmaxLoss(8, 4000, sampler="uniform", num_samples=4).load_state_dict(state)
    buffer = io.BytesIO()
    torch.save(loss, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(loss), torch.load(buffer, weights_only=False)):
        assert torch.equal(copied.linear.weight, loss.linear.weight)
        copied.resize_classes(4200)
        copied(torch.randn(4, 8), torch.full((4,), 4199)).backward()
    assert len(loss.linear.weight) == 4101


def test_tables_on_memory_of_others_move_to_memory_of_their_own(tmp_path):
    array = np.ones((N, D), dtype=np.float32)
    np.save(tmp_path / "table.npy", array)
    mapped = torch.from_file(str(tmp_path / "raw"), shared=True, size=N * D, dtype=torch.float32) if (tmp_path / "raw").write_bytes(bytes(N * D * 4)) else None
    whole = torch.ones(50, D)
    for memory in (torch.from_numpy(array), mapped.view(N, D), whole[:N], torch.ones(D, N).t(), torch.ones(N, D).share_memory_()):
        for size in (LARGER, SMALLER):
            linear = nn.Linear(D, N, bias=False)
            linear.weight = nn.Parameter(memory)
            loss = xs.LinearCrossEntropyLoss.from_linear(linear)
            before = memory.clone()
            loss.resize_classes(size)
            with torch.no_grad():
                loss.linear.weight.fill_(7)
            assert torch.equal(memory, before) and len(linear.weight) == size
    assert (whole == 1).all()


def test_a_table_without_rows_takes_nothing_from_what_shared_its_memory():
    table = torch.ones(N, D)
    whole = table.detach()
    torch.ops.xsoftmax.resize_tables_([table], [torch.empty(0, D)], [0])
    assert table.shape == (0, D) and whole.untyped_storage().nbytes() == N * D * 4
    torch.ops.xsoftmax.resize_tables_([table], [torch.zeros(N, D)], [N])
    assert not table.any() and (whole == 1).all()


def test_an_alias_of_the_table_is_no_room_for_another():
    first = xs.LinearCrossEntropyLoss(D, N)
    first.resize_classes(N + 1)
    second = xs.LinearCrossEntropyLoss(D, N + 1)
    second.linear.weight.data = first.linear.weight.data
    first.resize_classes(N + 2)
    rows = first.linear.weight.detach().clone()
    second.resize_classes(N + 2)
    with torch.no_grad():
        second.linear.weight.zero_()
    assert torch.equal(first.linear.weight, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [LARGER, SMALLER])
def test_exact_loss_and_prediction_read_the_table_as_it_is(dtype, size):
    torch.manual_seed(0)
    weight = torch.rand(N) + 0.5
    loss = xs.LinearCrossEntropyLoss(D, N, bias=True, weight=weight, dtype=dtype)
    loss.resize_classes(size)
    input, target = torch.randn(6, D, dtype=dtype), torch.randint(size, (6,))
    weights = torch.cat([weight, torch.ones(max(0, size - N))])[:size]
    logits = F.linear(input.double(), loss.linear.weight.double(), loss.linear.bias.double())
    torch.testing.assert_close(loss(input, target).double(), F.cross_entropy(logits, target, weights.double()),
                               rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    assert loss.topk(input, size)[1].shape == (6, size) and loss.linear.weight.dtype == dtype
    loss.resize_classes(size + 2, weight=torch.tensor([2.0, 3.0]))
    assert loss.weight[-2:].tolist() == [2.0, 3.0] and len(weight) == N  # the tensor that was given keeps its size
    loss(input, target).backward()


def test_what_shares_the_parameter_goes_on():
    torch.manual_seed(0)
    embedding = nn.Embedding(N, D)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4)
    loss.linear.weight = embedding.weight
    other = xs.LinearCrossEntropyLoss.from_linear(loss.linear)
    adaptive = xs.SampledSoftmaxLoss.from_linear(loss.linear, sampler="midx")
    adaptive(torch.randn(2, D), torch.arange(2))
    loss.resize_classes(LARGER)
    loss(embedding(torch.tensor([28, 1])), torch.tensor([27, 2])).backward()
    with pytest.raises(ValueError, match="linear.weight with a row for each of 23 classes"):
        other(torch.randn(2, D), torch.arange(2))
    for module in (other, adaptive):
        module.resize_classes(LARGER)
        module(torch.randn(2, D), torch.tensor([28, 1])).backward()
    codebooks = adaptive.sampler.codewords1, adaptive.sampler.codewords2
    assert torch.equal(adaptive.sampler.cell[N:], torch.ops.xsoftmax.midx_encode(embedding.weight[N:].detach(), *codebooks)[0])


def test_on_meta_tables_have_sizes_alone():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", bias=True, device="meta")
    loss.resize_classes(LARGER)
    assert loss.linear.weight.shape == (LARGER, D) and loss.linear.weight.is_meta and loss.sampler.num_classes == LARGER


def test_a_scripted_loss_says_that_its_table_has_changed():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4)
    scripted = torch.jit.script(loss)
    loss.resize_classes(LARGER)
    with pytest.raises(torch.jit.Error, match="a row for each of 23 classes"):
        scripted(torch.randn(2, D), torch.arange(2))
    torch.jit.script(loss)(torch.randn(2, D), torch.tensor([28, 1]))


# ---- errors


class _Fixed(xs.samplers.Sampler):
    def sample(self, queries, target=None, generator=None):
        raise AssertionError

    log_count = sample


def _parametrized():
    loss = xs.LinearCrossEntropyLoss(D, N)
    nn.utils.parametrizations.weight_norm(loss.linear)
    return loss


UNIFORM = dict(num_samples=4)
ERRORS = {
    "no class": (lambda: xs.LinearCrossEntropyLoss(D, N), dict(num_classes=0), ValueError, "num_classes"),
    "no number": (lambda: xs.LinearCrossEntropyLoss(D, N), dict(num_classes=2.5), TypeError, "num_classes"),
    "a head class": (lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, head_classes=HEAD), dict(num_classes=16), ValueError,
                     "above 16, one of head_classes"),
    "a head class in a union": (lambda: xs.SampledSoftmaxLoss(D, N, sampler="in_batch", head_classes=HEAD), dict(num_classes=16), ValueError, "above 16"),
    "a candidate": (lambda: xs.CaneLoss(D, N, candidates=HEAD), dict(num_classes=16), ValueError, "above 16, one of candidates"),
    "too few to draw": (lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=20), dict(num_classes=19), ValueError, "num_samples of at most 19"),
    "too few beside a part that goes on": (lambda: xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UnionSampler(
        xs.samplers.InBatchSampler(N), xs.samplers.UnigramSampler(COUNTS, 20))), dict(num_classes=19), ValueError, "num_samples of at most 19"),
    "too few for an index": (lambda: xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.MidxSampler(N, D, 20, codewords=4, distinct=True)), dict(num_classes=19),
                             ValueError, "leave 20 classes"),
    "all that are left excluded": (lambda: xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UniformSampler(N, 2, exclude=9)), dict(num_classes=9), ValueError,
                                   "above 9"),
    "another sampler": (lambda: xs.SampledSoftmaxLoss(D, N, sampler=_Fixed(N, 3)), dict(num_classes=LARGER), TypeError,
                        "_Fixed: expected a sampler that defines"),
    "another sampler behind others": (lambda: xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UnionSampler(xs.samplers.InBatchSampler(N), _Fixed(N, 3))),
                                      dict(num_classes=LARGER), TypeError, "_Fixed"),
    "parametrized": (_parametrized, dict(num_classes=LARGER), TypeError, "parametrized"),
    "class weights of another size": (lambda: xs.LinearCrossEntropyLoss(D, N, weight=WEIGHT.float()), dict(num_classes=LARGER, weight=torch.ones(2)),
                                      ValueError, r"shape \[6\]"),
    "class weights of a loss without": (lambda: xs.LinearCrossEntropyLoss(D, N), dict(num_classes=LARGER, weight=torch.ones(6)), ValueError,
                                        "without class weights"),
    "no optimizer": (lambda: xs.LinearCrossEntropyLoss(D, N), dict(num_classes=LARGER, optimizers=[3]), TypeError, "optimizers, got int"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    make, arguments, error, message = ERRORS[case]
    torch.manual_seed(0)
    loss = make()
    before, sampler_before = state_of(loss), copy.deepcopy(getattr(loss, "sampler", None))
    with pytest.raises(error, match=message):
        loss.resize_classes(**arguments)
    assert loss.num_classes == loss.linear.out_features == N
    assert_equal(state_of(loss), before)
    if sampler_before is not None:
        assert repr(loss.sampler) == repr(sampler_before)


def test_tables_over_ranks_are_refused_and_those_resized_before_go_over_ranks(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        loss = xs.distributed.replicate(xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4))
        with pytest.raises(RuntimeError, match="neither split over ranks nor replicated"):
            loss.resize_classes(LARGER)
        split = xs.distributed.shard_classes(xs.LinearCrossEntropyLoss(D, N))
        with pytest.raises((RuntimeError, TypeError), match="split"):
            split.resize_classes(LARGER)
        for over_ranks in (nn.parallel.DistributedDataParallel, xs.distributed.replicate):
            module = xs.LinearCrossEntropyLoss(D, N)
            module.resize_classes(LARGER)
            over_ranks(module)(torch.randn(2, D), torch.tensor([28, 1])).backward()
            assert module.linear.weight.grad.shape == (LARGER, D)
    finally:
        dist.destroy_process_group()


NO_MEMORY = """
import resource, torch, xsoftmax as xs
torch.manual_seed(0)
N, D, MORE = 1_000_000, 16, 1_100_000
loss = xs.LinearCrossEntropyLoss(D, N, weight=torch.ones(N))
adam = torch.optim.Adam(loss.parameters())
loss.linear.weight.grad = torch.ones_like(loss.linear.weight)
adam.step()
loss.linear.weight.grad = None
state, old = adam.state[loss.linear.weight], loss.linear.weight.detach()  # which keeps the former memory

def sizes():
    return [len(each) for each in (loss.linear.weight, state["exp_avg"], state["exp_avg_sq"], loss.weight)] + [loss.num_classes, loss.linear.out_features]

pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 120_000_000, resource.RLIM_INFINITY))  # of three tables, 80 MB each, one
try:
    loss.resize_classes(MORE, optimizers=[adam])
    print("expected an error of memory")
except (RuntimeError, MemoryError):
    assert sizes() == [N] * 6, sizes()
    assert torch.equal(loss.linear.weight, old)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    loss.resize_classes(MORE, optimizers=[adam])
    assert sizes() == [MORE] * 6, sizes()
    assert state["exp_avg"][:N].all() and not state["exp_avg"][N:].any() and loss.weight.eq(1).all()
    print("nothing changed")
"""


def test_without_memory_for_one_of_the_tables_none_changes():
    """What has other numbers of rows than its neighbours cannot be trained, saved or resized again."""
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs /proc")
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "nothing changed", done.stdout + done.stderr


def test_another_call_goes_on_where_a_sampler_found_no_memory(monkeypatch):
    loss, call = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=5, weight=torch.ones(N)), dict(weight=torch.full((LARGER - N,), 2.0))

    def no_memory():
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(loss.sampler, "plan_resize", lambda *given: no_memory)
        with pytest.raises(MemoryError):
            loss.resize_classes(LARGER, **call)
    with pytest.raises(ValueError, match=f"expected linear.weight with a row for each of {N} classes, got shape"):
        loss(torch.randn(3, D), torch.tensor([1, 2, 3]))
    loss.resize_classes(LARGER, **call)
    assert loss.weight.tolist() == [1.0] * N + [2.0] * (LARGER - N) and loss.sampler.num_classes == LARGER
    assert loss(torch.randn(3, D), torch.tensor([1, 2, LARGER - 1])).isfinite()


def test_an_optimizer_given_twice_follows_once():
    loss = xs.LinearCrossEntropyLoss(D, N)
    adam = torch.optim.Adam(loss.parameters())
    loss.linear.weight.grad = torch.ones_like(loss.linear.weight)
    adam.step()
    loss.resize_classes(LARGER, optimizers=[adam, adam])
    assert adam.state[loss.linear.weight]["exp_avg"].shape == (LARGER, D)


def test_streaming_counts_of_ids_that_come_and_go():
    counts = xs.samplers.StreamingCounts(6, half_life=8.0)
    counts.update(torch.tensor([0, 1, 1, 5, 5, 5]))
    before = counts.counts(torch.arange(6))
    counts.resize(4)
    assert counts.total.item() == pytest.approx(before[:4].sum().item()) and torch.equal(counts.counts(torch.arange(4)), before[:4])
    counts.resize(8)
    assert counts.num_ids == 8 and counts.counts(torch.arange(4, 8)).tolist() == [0] * 4
    counts.update(torch.tensor([7]))
    assert counts.counts(torch.tensor([7])).item() == 1 and counts.log_prob(torch.arange(8)).exp().sum().item() == pytest.approx(1)


def test_operator_is_what_its_schema_says():
    table, rows = torch.randn(N, D), torch.randn(3, D)
    torch.library.opcheck(torch.ops.xsoftmax.resize_tables_.default, ([table], [rows], [N + 3]), test_utils=("test_schema",))
