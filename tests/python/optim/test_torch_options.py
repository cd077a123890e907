"""State of torch.optim in row optimizers, and the reverse.

State that loads gives the same steps as before; anything else is refused with an error that names
the optimizer or option.
"""

import copy
import re

import pytest
import torch

import xsoftmax as xs
from gradient_checks import seeded, sparse  # noqa: F401 (seeded: an autouse fixture)

ROWS = {kind.__name__: kind for kind in (xs.optim.RowAdam, xs.optim.RowAdagrad, xs.optim.RowSGD)}
TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items() if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OPTIONS = [
    dict(),
    dict(weight_decay=0.5),
    dict(maximize=True),
    dict(amsgrad=True),
    dict(differentiable=True),
    dict(foreach=True),
    dict(fused=True),
    dict(capturable=True),
    dict(momentum=0.9),
    dict(momentum=0.9, dampening=0.3, weight_decay=0.5),
    dict(momentum=0.9, nesterov=True),
    dict(lr_decay=0.1, initial_accumulator_value=0.3),
    dict(weight_decay=0.5, decoupled_weight_decay=True),
    dict(centered=True)
]
SAME = {"RowAdam": ("AdamW", "Adam"), "RowAdagrad": ("Adagrad",), "RowSGD": ("SGD",)}


def dense_step(optimizer, param, number):
    param.grad = torch.full_like(param, 0.5) * (-1)**number + torch.arange(float(len(param)))[:,
                                                                                              None]
    if isinstance(optimizer, torch.optim.SparseAdam):
        param.grad = param.grad.to_sparse(1)
    optimizer.step(lambda: param.detach().square().sum()) if isinstance(
        optimizer, torch.optim.LBFGS) else optimizer.step()


def trained(kind, options):
    """Returns (parameter, optimizer) after three steps, or None without support for the options."""
    param = torch.nn.Parameter(torch.ones(3, 2))
    try:
        optimizer = TORCH[kind](
            [param], lr=0.1,
            **{**options, **({"differentiable": False} if options.get("differentiable") else {})})
        for number in range(3):
            dense_step(optimizer, param, number)
    except (TypeError, RuntimeError, AssertionError) as error:
        # torch refuses capturable=True on a CPU
        assert "unexpected keyword" in str(error) or options.get("capturable"), error
        return None
    # set here: a differentiable step refuses leaf parameters
    optimizer.param_groups[0].update(options)
    return param, optimizer


def same_steps(row, kind, options):
    if kind not in SAME[row] or options.get("amsgrad") or options.get("differentiable"):
        return False
    return kind != "Adam" or not options.get("weight_decay") or options.get(
        "decoupled_weight_decay", False)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", TORCH)
def test_state_of_torch_optim_gives_the_same_steps_or_is_refused(kind, row):
    loaded = 0
    for options in OPTIONS:
        if (made := trained(kind, options)) is None:
            continue
        param, optimizer = made
        mine = torch.nn.Parameter(param.detach().clone())
        ours = ROWS[row]([mine], lr=0.7)
        saved = copy.deepcopy(optimizer.state_dict())
        if not same_steps(row, kind, options):
            with pytest.raises(
                    ValueError, match=rf"^{row}: expected .*(got|without) "
                    rf".*({'|'.join([*options, 'without', 'as well', 'momentum_decay'])})"):
                ours.load_state_dict(saved)
            assert ours.param_groups[0]["lr"] == 0.7 and not ours.state
            continue
        ours.load_state_dict(saved)
        for number in range(3, 6):
            dense_step(optimizer, param, number)
            dense_step(ours, mine, number)
        torch.testing.assert_close(mine, param)
        loaded += 1
    assert (loaded > 3) == (kind in SAME[row])


@pytest.mark.parametrize("kind, row, named", [("NAdam", "RowAdam", "NAdam"),
                                              ("RAdam", "RowAdam", "RAdam"),
                                              ("Adamax", "RowAdam", "Adamax"),
                                              ("Adadelta", "RowAdam", "Adadelta"),
                                              ("RMSprop", "RowSGD", "RMSprop"),
                                              ("ASGD", "RowSGD", "ASGD"),
                                              ("Rprop", "RowSGD", "Rprop"),
                                              ("Muon", "RowSGD", "Muon")])
def test_the_error_names_the_optimizer(kind, row, named):
    _, optimizer = trained(kind, {})
    with pytest.raises(
            ValueError, match=rf"^{row}: expected the state dict of such an optimizer "
            rf"or of torch\.optim\.\w+.*that of .*{named}.*fresh "
            r"state"):
        ROWS[row]([torch.nn.Parameter(torch.ones(3, 2))]).load_state_dict(optimizer.state_dict())


def test_unknown_options_and_state_are_refused():
    param, optimizer = trained("AdamW", {})
    ours = xs.optim.RowAdam([torch.nn.Parameter(torch.ones(3, 2))], lr=0.7)

    def change(group=None, state=None, without=()):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0].update(group or {})
        saved["state"][0].update(state or {})
        for name in without:
            del saved["state"][0][name]
        return saved

    for saved, message in ((change(dict(warmup=3)), "warmup=3: RowAdam does not know it"),
                           (change(dict(cautious=True)), "cautious=True"),
                           (change(state=dict(mu_product=torch.ones(()))), "mu_product as well, "
                            "that of NAdam"), (change(state=dict(noise=torch.ones(3, 2))),
                                               "noise as well"), (change(state=dict(step=3)),
                                                                  "step of type int"),
                           (change(without=["exp_avg_sq"]), "one without exp_avg_sq"),
                           (change(dict(lr=-1.0)), "lr as a finite number of at least 0"),
                           (change(dict(differentiable=True)), "set differentiable=False")):
        with pytest.raises(ValueError, match=rf"^RowAdam: expected .*{message}"):
            ours.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"^RowAdam: expected lr as a finite number of at least 0, "
                       r"got -1"):
        ours.load_state_dict(change(dict(lr=torch.tensor(-1.0))))
    old = change(dict(weight_decay=0.5))
    del old["param_groups"][0]["decoupled_weight_decay"]
    with pytest.raises(
            ValueError, match=r"weight_decay=0.5 without decoupled_weight_decay.*set "
            r"decoupled_weight_decay=True"):
        ours.load_state_dict(old)
    assert ours.param_groups[0]["lr"] == 0.7 and not ours.state
    for harmless in (dict(cautious=False), dict(momentum=0),
                     dict(use_gc=None, initial_lr=0.3, name=None)):
        ours.param_groups[0].update({"name": "table"} if "name" in harmless else {})
        ours.load_state_dict(change(harmless))
    assert ours.param_groups[0]["lr"] == 0.1


def test_extra_keys_of_parameter_groups_load():
    """Keys that users add to groups load from a row optimizer, or if the group has the key too."""
    def make(kind, **notes):
        return kind([{"params": [torch.nn.Parameter(torch.ones(3, 2))], **notes}], lr=0.1)

    make(xs.optim.RowAdam).load_state_dict(make(xs.optim.RowAdam, name="table").state_dict())
    optimizer = make(xs.optim.RowAdam, name="table")
    optimizer.load_state_dict(make(torch.optim.AdamW, name="other").state_dict())
    assert optimizer.param_groups[0]["name"] == "other"
    with pytest.raises(ValueError, match="name='other': RowAdam does not know it"):
        make(xs.optim.RowAdam).load_state_dict(make(torch.optim.AdamW, name="other").state_dict())


# ---- constructors ----


@pytest.mark.parametrize("row", ROWS)
def test_keywords_of_torch_are_accepted_or_refused_by_name(row):
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = ROWS[row]([param], foreach=True, fused=True, capturable=True, differentiable=False,
                          amsgrad=False)
    assert not {"foreach", "fused", "capturable", "amsgrad"} & optimizer.param_groups[0].keys()
    for name, told in (("differentiable", "set differentiable=False"),
                       ("amsgrad", "no largest second moment: .*torch.optim.AdamW")):
        with pytest.raises(ValueError, match=rf"^{row}: expected no {name}=True: .*{told}"):
            ROWS[row]([param], **{name: True})
        with pytest.raises(
                ValueError, match=rf"^{row}: expected a parameter group without "
                rf"{name}=True: .*{told}"):
            ROWS[row]([{"params": [param], name: True}])
    with pytest.raises(TypeError, match=rf"^{row}: expected options among lr, .*, got "
                       r"learning_rate"):
        ROWS[row]([param], learning_rate=0.1)


@pytest.mark.parametrize("row, option",
                         [("RowAdam", dict(momentum=0.9)), ("RowAdagrad", dict(betas=(0.9, 0.99))),
                          ("RowSGD", dict(eps=1e-8)),
                          ("RowAdam", dict(weight_decay=0.5, decoupled_weight_decay=False))])
def test_options_of_another_optimizer_in_a_group_are_refused(row, option):
    name = list(option)[-1]
    with pytest.raises(ValueError, match=rf"^{row}: expected a parameter group without {name}="):
        ROWS[row]([{"params": [torch.nn.Parameter(torch.ones(3, 2))], **option}])


@pytest.mark.parametrize("row", ROWS)
def test_a_module_instead_of_parameters_is_refused(row):
    loss, encoder = xs.SampledSoftmaxLoss(4, 20, sampler="uniform",
                                          num_samples=3), torch.nn.Sequential(torch.nn.Linear(2, 4))
    for given, named in ((loss, "SampledSoftmaxLoss"), (encoder, "Sequential"),
                         ([*encoder.parameters(), loss], "SampledSoftmaxLoss")):
        with pytest.raises(
                TypeError, match=rf"^{row}: expected parameters, got the module "
                rf"{named}: give \[\*encoder.parameters\(\), "
                r"\*loss.parameters\(\)\]"):
            ROWS[row](given)
    with pytest.raises(
            TypeError, match="should be an iterable of Tensors or dicts, but got "
            "torch.FloatTensor"):
        ROWS[row](loss.linear.weight)
    for nothing in ([], iter([])):
        with pytest.raises(ValueError, match="empty parameter list"):
            ROWS[row](nothing)
    assert len(ROWS[row](loss.named_parameters()).param_groups[0]["params"]) == 1


# ---- state of row optimizers in torch.optim ----


def row_trained(row, is_sparse, **options):
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = ROWS[row]([param], lr=0.1, **options)
    for number in range(3):
        rows = torch.tensor([number, 3])
        param.grad = sparse(rows, torch.ones(2, 4), 4)
        param.grad = param.grad if is_sparse else param.grad.to_dense()
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("after_steps", [False, True])
@pytest.mark.parametrize("row, kind, options, told", [
    ("RowAdam", "AdamW", {}, "got last_step, which xs.optim.RowAdam keeps for rows"),
    ("RowSGD", "SGD", dict(momentum=0.9), "got last_step, which xs.optim.RowSGD"),
    ("RowAdam", "AdamW", dict(row_wise=True), "xs.optim.RowAdam keeps for rows"),
    ("RowAdagrad", "Adagrad", dict(row_wise=True), "got sum, which xs.optim.RowAdagrad keeps for "
     "rows"), ("RowAdam", "RAdam", {}, "got that of xs.optim.RowAdam"),
    ("RowAdagrad", "SGD", {}, "got that of xs.optim.RowAdagrad"),
    ("RowAdam", "Adam", dict(weight_decay=0.5), "RowAdam with weight_decay=0.5, which is decoupled")
])
def test_torch_optimizers_refuse_row_state_in_their_next_step(row, kind, options, told,
                                                              after_steps):
    """torch loads any state; it would use outdated moments or another weight decay."""
    _, optimizer = row_trained(row, True, **options)
    param = torch.nn.Parameter(torch.ones(4, 4))
    other = TORCH[kind]([param], lr=0.1)
    if after_steps:
        dense_step(other, param, 0)
    before = param.detach().clone()
    other.load_state_dict(optimizer.state_dict())
    param.grad = torch.ones(4, 4)
    with pytest.raises(
            RuntimeError, match=rf"^{kind}: expected state of "
            rf".*{re.escape(told)}.*(fresh state|RowAdam)"):
        other.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize(
    "row, kind, is_sparse, options",
    [("RowAdam", "AdamW", False, dict(weight_decay=0.1, maximize=True)),
     ("RowAdam", "Adam", False, {}), ("RowAdagrad", "Adagrad", False, {}),
     ("RowAdagrad", "Adagrad", True, dict(lr_decay=0.1)),
     ("RowSGD", "SGD", False, dict(momentum=0.9, nesterov=True, weight_decay=0.1))])
def test_torch_optimizers_resume_from_dense_state(row, kind, is_sparse, options):
    param, optimizer = row_trained(row, is_sparse, **options)
    twin = torch.nn.Parameter(param.detach().clone())
    other = TORCH[kind]([twin], lr=0.7)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3):
        dense_step(optimizer, param, number)
        dense_step(other, twin, number)
    torch.testing.assert_close(param, twin)
