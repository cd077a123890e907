"""Invalid options and loaded state of row optimizers are refused and change nothing.

Otherwise a typing error would train with other numbers, or fill a table with NaN.
"""

import copy
import re

import numpy as np
import pytest
import torch

import xsoftmax as xs

from gradient_checks import seeded, sparse  # noqa: F401 (seeded: an autouse fixture)

KINDS = {kind.__name__: kind for kind in (xs.optim.RowAdam, xs.optim.RowAdagrad, xs.optim.RowSGD)}
NUMBERS = {
    "RowAdam": ("lr", "eps", "weight_decay"),
    "RowAdagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    "RowSGD": ("lr", "momentum", "dampening", "weight_decay")
}
BOOLS = {
    "RowAdam": ("maximize", "row_wise", "stochastic_rounding"),
    "RowAdagrad": ("maximize", "row_wise", "stochastic_rounding"),
    "RowSGD": ("maximize", "nesterov", "stochastic_rounding")
}
WRONG = [(kind, name, value, f"{name} as a number, got {value!r}")
         for kind, names in NUMBERS.items() for name in names
         for value in ("0.1", b"0.1", None, True, np.str_("0.1"), [0.1])]
WRONG += [(kind, name, value, f"{name} as True or False, got {value!r}")
          for kind, names in BOOLS.items() for name in names for value in (1, 0, "true", None)]
WRONG += [(kind, "state_dtype", "float32", "state_dtype as a torch.dtype or None, got 'float32'")
          for kind in KINDS]
WRONG += [("RowAdam", "betas", ("0.9", 0.99), "beta1 as a number, got '0.9'"),
          ("RowAdam", "betas", (0.9, None), "beta2 as a number, got None"),
          ("RowAdam", "betas", 0.9, "betas as two numbers, (beta1, beta2), got 0.9"),
          ("RowAdam", "betas", "ab", "betas as two numbers, (beta1, beta2), got 'ab'"),
          ("RowAdam", "betas", None, "betas as two numbers, (beta1, beta2), got None")]


def parameter():
    return torch.nn.Parameter(torch.ones(4, 2))


@pytest.mark.parametrize("kind, name, value, words", WRONG)
def test_options_of_a_wrong_type_are_refused(kind, name, value, words):
    """The constructor, a new group, a checkpoint and an assignment before a step."""
    match = re.escape(f"{kind}: expected {words}")
    with pytest.raises(TypeError, match="^" + match):
        KINDS[kind]([parameter()], **{name: value})
    table = parameter()
    optimizer = KINDS[kind]([table], lr=0.5)
    with pytest.raises(TypeError, match="^" + match):
        optimizer.add_param_group({"params": [parameter()], name: value})
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(TypeError, match="^" + match):
        optimizer.load_state_dict(saved)
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["lr"] == 0.5
    table.grad = torch.ones(4, 2)
    optimizer.param_groups[0][name] = value
    with pytest.raises(TypeError, match="^" + match):
        optimizer.step()
    assert table.equal(torch.ones(4, 2)) and not optimizer.state


def test_numpy_numbers_are_accepted():
    optimizer = xs.optim.RowAdam([parameter()], lr=np.float32(0.5), betas=[0, np.array(0.5)], eps=1,
                                 maximize=np.True_)
    table = optimizer.param_groups[0]["params"][0]
    table.grad = torch.ones(4, 2)
    optimizer.step()
    torch.testing.assert_close(table.detach(), torch.full((4, 2), 1.25))


@pytest.mark.parametrize("name, value", [("correct_bias", False), ("momentum_decay", 0.0),
                                         ("noise", None), ("bias_correction", 0), ("alpha", 0.0)])
def test_an_unknown_option_that_changes_steps_when_off_is_refused(name, value):
    """Adam with correct_bias=False takes steps that are up to three times larger."""
    ours = xs.optim.RowAdam([parameter()], lr=0.5)
    saved = torch.optim.AdamW([parameter()], lr=0.1).state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(
            ValueError, match=r"^RowAdam: expected the state dict .* got one with "
            rf"{name}={value!r}"):
        ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["cautious", "use_gc", "amsgrad", "momentum", "lr_decay"])
def test_an_unknown_option_that_is_off_and_has_no_effect_loads(name):
    ours = xs.optim.RowAdam([parameter()], lr=0.5)
    saved = torch.optim.AdamW([parameter()], lr=0.1).state_dict()
    saved["param_groups"][0][name] = False
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.1


def trained(kind, dense, **options):
    table = parameter()
    optimizer = KINDS[kind]([table], lr=0.1, **options)
    for _ in range(2):
        table.grad = torch.ones(4, 2) if dense else sparse(torch.tensor([0, 2]), torch.ones(2, 2),
                                                           4)
        optimizer.step()
    return optimizer


MOMENTS = {
    "RowAdam": ("exp_avg", "exp_avg_sq"), "RowAdagrad": ("sum",), "RowSGD": ("momentum_buffer",)
}
OPTIONS = {"RowAdam": {}, "RowAdagrad": {}, "RowSGD": dict(momentum=0.9)}
WRONG_STATE = [("step", lambda step: -torch.ones_like(step), ValueError,
                "step .* at least 0, got -1"),
               ("step", lambda step: torch.tensor(float("nan")), ValueError, "step .* got nan"),
               ("step", lambda step: step.expand(2).clone(), ValueError, r"step .* one number, got "
                r"shape \[2\]")]
WRONG_STATE += [(name, lambda moment: moment.long(), TypeError,
                 f"{name} .* floating dtype, got int64") for names in MOMENTS.values()
                for name in names]
WRONG_STATE += [(name, lambda moment: torch.full_like(moment, float("nan")), ValueError,
                 f"{name} .* got nan") for names in MOMENTS.values() for name in names]
WRONG_STATE += [(name, lambda moment: moment.index_fill(0, torch.tensor([1]), -1.0), ValueError,
                 f"{name} .* of at least 0, got -1") for name in ("exp_avg_sq", "sum")]
WRONG_STATE += [(name, lambda moment: moment.index_fill(0, torch.tensor([1]), float("-inf")),
                 ValueError, f"{name} .* got -inf") for name in ("exp_avg", "momentum_buffer")]
WRONG_STATE += [("last_step", lambda last: last + 7, ValueError, r"last_step .* in \[0, 2\].* got"),
                ("last_step", lambda last: last - 7, ValueError, r"last_step .* in \[0, 2\].* got")]


@pytest.mark.parametrize("dense", [False, True], ids=["rows", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_state_is_refused(kind, dense):
    optimizer = trained(kind, dense, **OPTIONS[kind])
    saved = optimizer.state_dict()
    tried = 0
    for name, change, error, words in WRONG_STATE:
        if saved["state"][0].get(name) is None or saved["state"][0][name].numel() == 0:
            continue
        wrong = copy.deepcopy(saved)
        wrong["state"][0][name] = change(wrong["state"][0][name])
        fresh = KINDS[kind]([parameter()], lr=0.5, **OPTIONS[kind])
        with pytest.raises(error, match=f"^{kind}: expected {words}"):
            fresh.load_state_dict(wrong)
        assert not fresh.state and fresh.param_groups[0]["lr"] == 0.5
        tried += 1
    assert tried >= 3 + 2 * len(MOMENTS[kind])
    fresh = KINDS[kind]([parameter()], lr=0.5, **OPTIONS[kind])
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.1
