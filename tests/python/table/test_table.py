"""Behaviour shared by all modules over a table of rows: when pending updates of a row optimizer are
applied, options, data parallelism."""

import copy
import pickle

import pytest
import torch
from torch import nn

import xsoftmax as xs

D, N = 4, 12


def tree():
    return xs.LabelTree.balanced(N, 3)


MODULES = {
    "linear": lambda **options: xs.LinearCrossEntropyLoss(D, N, bias=True, **options),
    "sampled": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, bias=
                                                       True, **options),
    "cane": lambda **options: xs.CaneLoss(D, N, candidates=3, bias=True, **options),
    "beam tree": lambda **options: xs.BeamTreeLoss(D, tree(), num_candidates=2, num_noises=1,
                                                   balance_every=0, bias=True, **options),
    "hierarchical softmax": lambda **options: xs.HierarchicalSoftmaxLoss(
        D, tree(), bias=True, **options),
    "matcher": lambda **options: xs.HierarchicalMatcher(D, tree(), **options),
}


def deferred(module):
    """Returns the module after steps that met a few of its rows, and its optimizer."""
    optimizer = xs.optim.RowAdam(module.parameters(), lr=0.05, weight_decay=0.5)
    generator = torch.Generator().manual_seed(3)
    for step in range(8):
        target = torch.tensor([step % N, 0])
        optimizer.zero_grad()
        torch.manual_seed(step)
        module(
            torch.randn(2, D, generator=generator),
            target if not isinstance(module, xs.HierarchicalMatcher) else target[:,
                                                                                 None]).backward()
        optimizer.step()
    return module, optimizer


def made(name, **options):
    torch.manual_seed(0)
    return MODULES[name](**options)


def tables(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


SPARSE = sorted(set(MODULES) - {"linear"})


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("move", [
    lambda module: module.double(), lambda module: module.to(torch.float64),
    lambda module: module._apply(lambda t: t.clone())
], ids=["double", "to", "another memory"])
def test_moving_a_module_applies_pending_updates(name, move):
    module, optimizer = deferred(made(name))
    want, flushing = deferred(made(name))
    assert any(not torch.equal(a, b)
               for a, b in zip(tables(module), (flushing.flush(),
                                                tables(want))[1])), "no update was pending"
    move(module)
    for got, caught_up in zip(tables(module), tables(want)):
        torch.testing.assert_close(got.float(), caught_up, rtol=1e-6, atol=1e-7)


READS = [
    lambda module, input: module.predict(input), lambda module, input: module.topk(input, 2),
    lambda module, input: module.state_dict(), lambda module, input: module.eval().train(),
    lambda module, input: copy.deepcopy(module)
]


@pytest.mark.parametrize("name", sorted(set(SPARSE) - {"matcher"}))
@pytest.mark.parametrize("read", READS, ids=["predict", "topk", "state_dict", "eval", "deepcopy"])
def test_a_table_may_be_read_between_forward_and_backward(name, read):
    module, optimizer = deferred(made(name))
    for step in range(3):
        input = torch.randn(2, D, requires_grad=True)
        optimizer.zero_grad()
        value = module(input, torch.tensor([step, 0]))
        read(module, input.detach())
        value.backward()
        assert input.grad.ne(0).any()
        optimizer.step()


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)),
    lambda module: copy.deepcopy(nn.ModuleList([module]))[0]
], ids=["deepcopy", "pickle", "of a model"])
def test_a_copy_has_no_pending_updates(name, copied):
    module, optimizer = deferred(made(name))
    other = copied(module)
    optimizer.flush()
    assert all(torch.equal(a, b) for a, b in zip(tables(other), tables(module)))
    assert other.reduction == module.reduction and other(
        torch.ones(2, D),
        torch.tensor([1, 2]) if name != "matcher" else torch.tensor([[1], [2]])).isfinite()


@pytest.mark.parametrize("name", SPARSE)
def test_saving_and_loading_only_the_linear_layer(name):
    (module, optimizer), (want, flushing) = deferred(made(name)), deferred(made(name))
    flushing.flush()
    linear, other = (getattr(each, "linear", None) or each.edges for each in (module, want))
    assert all(
        torch.equal(value,
                    other.state_dict()[key]) for key, value in linear.state_dict().items())
    module, optimizer = deferred(made(name))
    linear = getattr(module, "linear", None) or module.edges
    linear.load_state_dict(
        {key: torch.ones_like(value)
         for key, value in linear.state_dict().items()})
    optimizer.flush()
    assert all(value.eq(1).all() for value in linear.parameters())


@pytest.mark.parametrize("name", SPARSE)
def test_a_loaded_table_is_as_it_was_saved(name):
    """Updates pending before the load are not applied to the loaded rows."""
    module, optimizer = deferred(made(name))
    torch.manual_seed(1)
    saved = MODULES[name]().state_dict()
    module.load_state_dict(copy.deepcopy(saved))
    module.eval()
    optimizer.flush()
    assert all(torch.equal(value, saved[key]) for key, value in module.state_dict().items())


def test_rows_of_the_next_layer_have_no_pending_updates():
    results = []
    for flush_first in (False, True):
        module, optimizer = deferred(made("matcher"))
        if flush_first:
            optimizer.flush()
        assert module.next_layer()
        optimizer.flush()
        results.append(tables(module))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_prototypes_have_no_pending_updates():
    module, optimizer = deferred(made("matcher"))
    module.init_from_prototypes(torch.randn(30, D), torch.randint(N, (30, 1)))
    before = tables(module)
    optimizer.flush()
    assert all(torch.equal(a, b) for a, b in zip(tables(module), before))


@pytest.mark.parametrize("name", SPARSE)
def test_a_refused_optimizer_state_keeps_pending_updates(name):
    module, optimizer = deferred(made(name))
    want, flushing = deferred(made(name))
    flushing.flush()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    module.eval()
    for got, caught_up in zip(tables(module), tables(want)):
        torch.testing.assert_close(got, caught_up, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"matcher"}))
def test_reduction_and_ignore_index_may_be_assigned(name):
    input, target = torch.randn(3, D), torch.tensor([1, 2, 5])
    assigned, want = made(name), made(name, reduction="none", ignore_index=2)
    assigned.reduction, assigned.ignore_index = "none", 2
    for training in (True, False):
        values = []
        for module in (assigned, want):
            torch.manual_seed(4)
            values.append(module.train(training)(input, target).detach())
        assert torch.equal(*values) and values[0].shape == (3,) and values[0][1] == 0
    with pytest.raises(ValueError, match="expected reduction to be"):
        assigned.reduction = "max"
    assert assigned.reduction == "none"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_numpy_counts_and_repr(name):
    import numpy as np

    module = made(name)
    assert "in_features=4" in repr(module) and f"num_classes={N}" in repr(module)
    assert xs.LinearCrossEntropyLoss(np.int64(D), np.int32(N)).in_features == D
    assert type(xs.HierarchicalSoftmaxLoss(np.int64(D), tree()).in_features) is int


@pytest.mark.parametrize("name", sorted(MODULES))
def test_on_the_meta_device_only_the_table_is_meta(name):
    module = made(name, device="meta")
    assert "in_features=4" in repr(module)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_an_estimator_with_noise_needs_candidates_and_noise():
    for options in (dict(sampler="midx"),
                    dict(sampler=xs.samplers.UniformSampler(N, 4), head_classes=0)):
        with pytest.raises(
                ValueError, match="expected candidates .head classes, or draws without "
                "replacement. and noise"):
            xs.SampledSoftmaxLoss(D, N, estimator="cane", **options)
    union = xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4),
                                     xs.samplers.UniformSampler(N, 4, shared=False))
    assert xs.SampledSoftmaxLoss(D, N,
                                 sampler=union, estimator="cane")(torch.randn(2, D),
                                                                  torch.tensor([0, 1])).isfinite()


@pytest.mark.parametrize("sampler", ["uniform", "log_uniform", "midx"])
def test_cane_without_noise(sampler):
    loss = xs.CaneLoss(D, N, candidates=6, num_noises=0, noise_sampler=sampler)
    assert loss(torch.randn(2, D), torch.tensor([0, 1])).isfinite()
