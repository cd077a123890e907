"""loss.resize_classes: a resized loss continues as one that was built at that size and loaded its
state."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import combinations
import xsoftmax as xs
from combinations import (COMBINATIONS, COUNTS, HEAD, WEIGHT, Combination, D, N, make_sampler,
                          sampler)
from sampler_checks import chi_square

LARGER, SMALLER = 29, 17  # N is 23; the last head class is 16
RESIZABLE = {
    name: combination
    for name, combination in COMBINATIONS.items() if combination.tree is None
}


def resized_spec(spec, size):
    """The description of a sampler for another number of classes; new classes get the smallest
    count."""
    spec = dict(spec)
    if "counts" in spec:
        spec["counts"] = torch.cat([COUNTS, COUNTS.new_ones(max(0, size - N))])[:size]
    if "parts" in spec:
        spec["parts"] = [resized_spec(part, size) for part in spec["parts"]]
    if "sampler" in spec:
        spec["sampler"] = resized_spec(spec["sampler"], size)
    return spec


def built_at(combination: Combination, size: int, monkeypatch):
    """The loss of a combination built with `size` classes."""
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
        input, target = torch.randn(7, D, dtype=torch.float64,
                                    generator=made), torch.randint(classes, (7,), generator=made)
        optimizer.zero_grad()
        value = combination.call(loss, input, target,
                                 torch.Generator().manual_seed(seed + 100 + step))
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
        torch.testing.assert_close(one[name], other[name], rtol=1e-6 if close else 0,
                                   atol=1e-9 if close else 0, equal_nan=True,
                                   msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("name, size", [(name, (LARGER, SMALLER)[number % 5])
                                        for number, name in enumerate(RESIZABLE) if number % 5 < 2])
def test_a_resized_loss_continues_as_one_built_at_that_size(name, size, monkeypatch):
    # Fails if a sampler, an index, class weights or an optimizer has another number of classes,
    # or another distribution, than the loss.
    combination = RESIZABLE[name]
    loss = combination.make()
    optimizer = combination.make_optimizer(loss)
    train(combination, loss, optimizer, 2, seed=1, classes=N)
    tables = [loss.linear.weight, loss.linear.bias]
    loss.catch_up()
    rows = [None if table is None else table.detach().clone() for table in tables]
    torch.manual_seed(5)
    loss.resize_classes(size)
    assert loss.num_classes == loss.linear.out_features == size and loss.linear.weight is tables[
        0] and loss.linear.bias is tables[1]
    kept = min(size, N)
    for table, before in zip(tables, rows):
        if table is not None:
            assert len(table) == size and table.grad is None and torch.equal(
                table[:kept], before[:kept])
    torch.manual_seed(5)
    fresh = nn.Linear(D, size -
                      kept, bias=tables[1] is not None, dtype=torch.float64) if size > N else None
    if fresh is not None:
        assert torch.equal(tables[0][kept:], fresh.weight) and (fresh.bias is None or torch.equal(
            tables[1][kept:], fresh.bias))
    other = built_at(combination, size, monkeypatch)
    other_optimizer = combination.make_optimizer(other)
    other.load_state_dict(loss.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    # "unigram" here has probabilities from counts, but there from probabilities
    static = "unigram" in name
    values = train(combination, loss, optimizer, 3, seed=7, classes=size)
    others = train(combination, other, other_optimizer, 3, seed=7, classes=size)
    torch.testing.assert_close(values, others, rtol=1e-6 if static else 0,
                               atol=1e-9 if static else 0)
    assert_equal(state_of(loss, optimizer), state_of(other, other_optimizer), close=static)


@pytest.mark.parametrize("name", list(RESIZABLE)[::7])
def test_growing_and_shrinking_restores_the_state(name):
    combination = RESIZABLE[name]
    loss = combination.make()
    optimizer = combination.make_optimizer(loss)
    train(combination, loss, optimizer, 2, seed=1, classes=N)
    bias = loss.linear.bias
    for each in loss._samplers():  # the index takes in all biases
        each.plan_resize(N,
                         loss.linear.weight.detach()[:0], None if bias is None else bias.detach())()
    before = state_of(loss, optimizer)
    loss.resize_classes(LARGER)
    loss.resize_classes(N)
    assert_equal(state_of(loss, optimizer), before, close="unigram" in name)


DISTRIBUTIONS = {
    "uniform": {}, "log_uniform": {}, "unigram": dict(counts=COUNTS), "midx": dict(codewords=4),
    "exact_midx": dict(codewords=4), "spread_midx": dict(codewords=4),
    "lsh": dict(tables=4, bits=2), "sphere": {}, "rff": dict(features=8)
}


@pytest.mark.parametrize("size", [LARGER, SMALLER])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_draws_match_log_counts_after_a_resize(distribution, size):
    # Fails if counts differ from the distribution that is drawn from, or if removed classes are
    # drawn.
    torch.manual_seed(1)
    shared = {} if distribution in combinations.ADAPTIVE else {"shared": False}
    chosen = make_sampler(
        sampler(distribution, num_samples=4000, **shared, exclude=torch.tensor([1, 3]),
                **DISTRIBUTIONS[distribution]), bias=True)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=chosen, bias=True)
    nn.init.normal_(loss.linear.weight)
    chosen.prepare(loss.linear.weight, loss.linear.bias)
    loss.resize_classes(size)
    queries = torch.randn(3, D)
    drawn = loss.sampler.sample(queries)[0]
    log_count = loss.sampler.log_count(queries, torch.arange(size)).expand(3, size)
    # new classes can be drawn, excluded ones cannot
    assert torch.isfinite(log_count[:, [2, size - 1]]).all() and (log_count[:, [1, 3]]
                                                                  == -torch.inf).all()
    assert log_count.exp().sum(1).tolist() == pytest.approx([4000] * 3, rel=1e-3)
    torch.testing.assert_close(drawn.log_count, log_count.gather(1, drawn.ids), rtol=1e-5,
                               atol=1e-5)
    for q in range(3):
        assert chi_square(torch.bincount(drawn.ids[q], minlength=size),
                          log_count[q].exp().double()) > 1e-4


def test_midx_encodes_the_rows_of_new_classes():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N,
                                 sampler=xs.samplers.MidxSampler(N, D, 4, codewords=4,
                                                                 bias=True), bias=True)
    loss(torch.randn(4, D), torch.arange(4))
    cell, codebooks = loss.sampler.cell.clone(), (loss.sampler.codewords1.clone(),
                                                  loss.sampler.codewords2.clone())
    loss.resize_classes(LARGER)
    assert torch.equal(loss.sampler.cell[:N], cell) and torch.equal(loss.sampler.codewords1,
                                                                    codebooks[0])
    assert torch.equal(
        loss.sampler.cell[N:],
        torch.ops.xsoftmax.midx_encode(loss.linear.weight[N:].detach(), *codebooks)[0])
    assert int(loss.sampler.step) == 1


@pytest.mark.parametrize("make", [
    lambda: xs.samplers.MidxSampler(N, D, 4, codewords=4), lambda: xs.samplers.LshSampler(N, D, 4),
    lambda: xs.samplers.RffSampler(N, D, 4)
])
def test_a_sampler_resized_without_rows_rebuilds_its_index(make):
    torch.manual_seed(0)
    chosen, weight = make(), torch.randn(LARGER, D)
    chosen.refresh(weight[:N])
    chosen.resize(LARGER)
    assert int(chosen.step) == 0 and chosen.num_classes == LARGER
    chosen.refresh(weight)
    assert chosen.log_count(torch.randn(1, D),
                            torch.arange(LARGER)).exp().sum().item() == pytest.approx(4, rel=1e-4)


def test_the_same_number_of_classes_changes_nothing():
    """Programs may call resize_classes before every step: a pending graph, gradients and the table
    stay unchanged."""
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=4, bias=True)
    value = loss(torch.randn(4, D), torch.arange(4))
    state = copy.deepcopy(loss.state_dict())
    loss.resize_classes(N)
    value.backward()
    gradient = loss.linear.weight.grad
    loss.resize_classes(N)
    assert loss.linear.weight.grad is gradient is not None
    assert all(torch.equal(state[name], now) for name, now in loss.state_dict().items())


def test_a_graph_without_its_backward_pass_refuses_a_resize():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, bias=True)
    # like the loss of the last step, which a training loop still holds
    kept = loss(torch.randn(4, D), torch.arange(4))
    kept.backward()
    loss.resize_classes(N)
    assert loss.linear.weight.grad.shape == (N, D)  # nothing was changed
    seen = []
    loss.linear.weight.register_hook(lambda grad: seen.append(grad.shape))
    loss.linear.weight.register_post_accumulate_grad_hook(
        lambda table: seen.append(table.grad.shape))
    loss.resize_classes(LARGER)
    kept = loss(torch.randn(4, D), torch.arange(25, 29))
    kept.backward()
    assert seen == [(LARGER, D)] * 2 and loss.linear.weight.grad.shape == (LARGER, D)
    waiting = loss(torch.randn(4, D, requires_grad=True), torch.arange(4))
    loss.resize_classes(LARGER + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [LARGER, SMALLER])
def test_exact_loss_and_topk_use_the_resized_table(dtype, size):
    torch.manual_seed(0)
    weight = torch.rand(N) + 0.5
    loss = xs.LinearCrossEntropyLoss(D, N, bias=True, weight=weight, dtype=dtype)
    loss.resize_classes(size)
    input, target = torch.randn(6, D, dtype=dtype), torch.randint(size, (6,))
    weights = torch.cat([weight, torch.ones(max(0, size - N))])[:size]
    logits = F.linear(input.double(), loss.linear.weight.double(), loss.linear.bias.double())
    torch.testing.assert_close(
        loss(input, target).double(), F.cross_entropy(logits, target, weights.double()),
        rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    assert loss.topk(input, size)[1].shape == (6, size) and loss.linear.weight.dtype == dtype
    loss.resize_classes(size + 2, weight=torch.tensor([2.0, 3.0]))
    # the tensor passed as class weights keeps its size
    assert loss.weight[-2:].tolist() == [2.0, 3.0] and len(weight) == N
    loss(input, target).backward()


def test_modules_that_share_the_parameter_continue():
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
    assert torch.equal(adaptive.sampler.cell[N:],
                       torch.ops.xsoftmax.midx_encode(embedding.weight[N:].detach(), *codebooks)[0])


def test_resize_on_the_meta_device():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", bias=True, device="meta")
    loss.resize_classes(LARGER)
    assert loss.linear.weight.shape == (
        LARGER, D) and loss.linear.weight.is_meta and loss.sampler.num_classes == LARGER


def test_a_scripted_loss_refuses_a_resized_table():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4)
    scripted = torch.jit.script(loss)
    loss.resize_classes(LARGER)
    with pytest.raises(torch.jit.Error, match="a row for each of 23 classes"):
        scripted(torch.randn(2, D), torch.arange(2))
    torch.jit.script(loss)(torch.randn(2, D), torch.tensor([28, 1]))


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
    "no class": (lambda: xs.LinearCrossEntropyLoss(D, N), dict(num_classes=0), ValueError,
                 "num_classes"),
    "no number": (lambda: xs.LinearCrossEntropyLoss(D, N), dict(num_classes=2.5), TypeError,
                  "num_classes"),
    "a head class": (
        lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, head_classes=HEAD),
        dict(num_classes=16), ValueError, "above 16, one of head_classes"),
    "a head class in a union": (
        lambda: xs.SampledSoftmaxLoss(D, N, sampler="in_batch", head_classes=HEAD),
        dict(num_classes=16), ValueError, "above 16"),
    "a candidate": (lambda: xs.CaneLoss(D, N, candidates=HEAD), dict(num_classes=16), ValueError,
                    "above 16, one of candidates"),
    "too few to draw": (lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=20),
                        dict(num_classes=19), ValueError, "num_samples of at most 19"),
    "too few beside a part that goes on": (lambda: xs.SampledSoftmaxLoss(
        D, N, sampler=xs.samplers.UnionSampler(xs.samplers.InBatchSampler(
            N), xs.samplers.UnigramSampler(COUNTS, 20))), dict(num_classes=19), ValueError,
                                           "num_samples of at most 19"),
    "too few for an index": (lambda: xs.SampledSoftmaxLoss(
        D, N, sampler=xs.samplers.MidxSampler(N, D, 20, codewords=4, distinct=True)),
                             dict(num_classes=19), ValueError, "leave 20 classes"),
    "all that are left excluded": (
        lambda: xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UniformSampler(N, 2, exclude=9)),
        dict(num_classes=9), ValueError, "above 9"),
    "another sampler": (lambda: xs.SampledSoftmaxLoss(D, N, sampler=_Fixed(N, 3)),
                        dict(num_classes=LARGER), TypeError,
                        "_Fixed: expected a sampler that defines"),
    "another sampler behind others": (lambda: xs.SampledSoftmaxLoss(
        D, N, sampler=xs.samplers.UnionSampler(xs.samplers.InBatchSampler(N), _Fixed(N, 3))),
                                      dict(num_classes=LARGER), TypeError, "_Fixed"),
    "parametrized": (_parametrized, dict(num_classes=LARGER), TypeError, "parametrized"),
    "class weights of another size": (
        lambda: xs.LinearCrossEntropyLoss(D, N, weight=WEIGHT.float()),
        dict(num_classes=LARGER, weight=torch.ones(2)), ValueError, r"shape \[6\]"),
    "class weights of a loss without": (lambda: xs.LinearCrossEntropyLoss(D, N),
                                        dict(num_classes=LARGER, weight=torch.ones(6)), ValueError,
                                        "without class weights"),
    "no optimizer": (lambda: xs.LinearCrossEntropyLoss(D, N),
                     dict(num_classes=LARGER, optimizers=[3]), TypeError, "optimizers, got int"),
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


def test_resize_before_but_not_after_splitting_over_ranks(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0,
                            world_size=1)
    try:
        loss = xs.distributed.replicate(
            xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4))
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


def test_a_second_call_completes_a_resize_that_ran_out_of_memory(monkeypatch):
    loss, call = xs.SampledSoftmaxLoss(
        D, N, sampler="uniform", num_samples=5,
        weight=torch.ones(N)), dict(weight=torch.full((LARGER - N,), 2.0))

    def no_memory():
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(loss.sampler, "plan_resize", lambda *given: no_memory)
        with pytest.raises(MemoryError):
            loss.resize_classes(LARGER, **call)
    with pytest.raises(
            ValueError, match=f"expected linear.weight with a row for each of {N} "
            "classes, got shape"):
        loss(torch.randn(3, D), torch.tensor([1, 2, 3]))
    loss.resize_classes(LARGER, **call)
    assert loss.weight.tolist(
    ) == [1.0] * N + [2.0] * (LARGER - N) and loss.sampler.num_classes == LARGER
    assert loss(torch.randn(3, D), torch.tensor([1, 2, LARGER - 1])).isfinite()


def test_streaming_counts_of_added_and_removed_ids():
    counts = xs.samplers.StreamingCounts(6, half_life=8.0)
    counts.update(torch.tensor([0, 1, 1, 5, 5, 5]))
    before = counts.counts(torch.arange(6))
    counts.resize(4)
    assert counts.total.item() == pytest.approx(before[:4].sum().item()) and torch.equal(
        counts.counts(torch.arange(4)), before[:4])
    counts.resize(8)
    assert counts.num_ids == 8 and counts.counts(torch.arange(4, 8)).tolist() == [0] * 4
    counts.update(torch.tensor([7]))
    assert counts.counts(torch.tensor([7])).item() == 1 and counts.log_prob(
        torch.arange(8)).exp().sum().item() == pytest.approx(1)


def test_opcheck():
    table, rows = torch.randn(N, D), torch.randn(3, D)
    torch.library.opcheck(torch.ops.xsoftmax.resize_tables_.default, ([table], [rows], [N + 3]),
                          test_utils=("test_schema",))
