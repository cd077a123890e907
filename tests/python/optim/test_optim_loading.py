"""State of a table with another number of rows is refused and changes nothing."""

import copy

import pytest
import torch

import xsoftmax as xs

N, D = 23, 5
OPTIMIZERS = {
    "adam": lambda params: xs.optim.RowAdam(params, lr=0.05),
    "adagrad": lambda params: xs.optim.RowAdagrad(params, lr=0.1),
    "sgd": lambda params: xs.optim.RowSGD(params, lr=0.1, momentum=0.9)
}
FIRST = {"adam": "exp_avg", "adagrad": "sum", "sgd": "momentum_buffer"}


def step(loss, optimizer, seed):
    made = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    loss(torch.randn(4, D, generator=made), torch.randint(N - 6, (4,), generator=made),
         generator=torch.Generator().manual_seed(seed)).backward()
    optimizer.step()


def trained(rule, classes, **options):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, classes, sampler="uniform", num_samples=4, bias=True, **options)
    optimizer = OPTIMIZERS[rule](loss.parameters())
    step(loss, optimizer, 0)
    return loss, optimizer


@pytest.mark.parametrize("classes", [N - 6, N + 6])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_state_with_another_number_of_rows_is_refused_and_changes_nothing(rule, sparse, classes):
    loss, optimizer = trained(rule, N, sparse_grad=sparse)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["param_groups"][0]["lr"] = 0.7
    loss.resize_classes(classes)
    step(loss, optimizer, 1)
    twin, of_twin = copy.deepcopy((loss, optimizer))
    before = copy.deepcopy(optimizer.state_dict())
    kept = {name: value for state in optimizer.state.values() for name, value in state.items()}
    with pytest.raises(
            ValueError, match=rf"Row\w+: expected {FIRST[rule]} of parameter 0 with the "
            rf"shape \[{classes}, 5\].*got \[23, 5\].*resize_classes"):
        optimizer.load_state_dict(checkpoint)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for number, state in before["state"].items():
        assert all(
            torch.equal(value, after["state"][number][name]) for name, value in state.items())
    # the state still holds the same tensors
    assert all(
        any(value is now for state in optimizer.state.values() for now in state.values())
        for value in kept.values())
    for module, each in ((loss, optimizer), (twin, of_twin)):
        step(module, each, 2)
        each.flush()
    assert all(
        torch.equal(value, other) for value, other in zip(loss.parameters(), twin.parameters()))


def test_torch_optim_state_with_another_number_of_rows_is_refused():
    loss, optimizer = trained("adam", N)
    dense = torch.nn.Linear(D, N + 1)
    adam = torch.optim.Adam(dense.parameters())
    dense(torch.randn(2, D)).sum().backward()
    adam.step()
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 .*got \[24, 5\]"):
        optimizer.load_state_dict(adam.state_dict())


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_state_with_the_same_number_of_rows_loads_after_a_resize(rule):
    loss, optimizer = trained(rule, N)
    loss.resize_classes(N + 6)
    step(loss, optimizer, 1)
    other, of_other = trained(rule, N)
    other.resize_classes(N + 6)
    other.load_state_dict(loss.state_dict())
    of_other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for module, each in ((loss, optimizer), (other, of_other)):
        step(module, each, 2)
        each.flush()
    assert all(
        torch.equal(value, again) for value, again in zip(loss.parameters(), other.parameters()))


OTHERS = {
    "asgd": torch.optim.ASGD, "rprop": torch.optim.Rprop, "adafactor": torch.optim.Adafactor,
    "lbfgs": torch.optim.LBFGS,
    "muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2])
}


@pytest.mark.parametrize("classes", [N - 6, N + 6])
@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_whose_state_cannot_be_resized_raises_an_error(name, classes):
    torch.manual_seed(0)
    loss = xs.LinearCrossEntropyLoss(D, N, bias=True)
    optimizer = OTHERS[name](list(loss.parameters()))

    def closure():
        optimizer.zero_grad()
        value = loss(torch.randn(4, D, generator=torch.Generator().manual_seed(1)), torch.arange(4))
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(closure)
    loss.resize_classes(classes)
    closure()
    before = [param.detach().clone() for param in loss.parameters()]
    with pytest.raises(
            RuntimeError, match=r"\w+: its \w+ is of shape .*, but resize_classes made "
            rf"the parameter \[{classes}, 5\]: .*make a new one"):
        optimizer.step(closure)
    assert all(torch.equal(param, value) for param, value in zip(loss.parameters(), before))
    OTHERS[name](list(loss.parameters())).step(closure)


@pytest.mark.parametrize("other", [xs.optim.RowAdam, xs.optim.RowSGD, torch.optim.SparseAdam])
def test_state_of_another_kind_of_optimizer_is_refused(other):
    table = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = xs.optim.RowAdagrad([table], lr=0.5)
    with pytest.raises(
            ValueError, match="RowAdagrad: expected the state dict of such an "
            "optimizer.*got one without .*lr_decay"):
        optimizer.load_state_dict(other([table], lr=0.25).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_loads_twice():
    optimizer = xs.optim.RowAdagrad([torch.nn.Parameter(torch.zeros(4, 2))], lr=0.5)
    for lr in (0.25, 0.125):  # torch.optim adds an option to `defaults` when it loads
        optimizer.load_state_dict(
            xs.optim.RowAdagrad([torch.nn.Parameter(torch.zeros(4, 2))], lr=lr).state_dict())
        assert optimizer.param_groups[0]["lr"] == lr
