"""Options and state of torch.optim optimizers: those that row optimizers accept, ignore, or refuse
by name."""

from typing import Any, Dict, Iterable, Optional, TypedDict

import torch

from .._core.arguments import guess_argument


class TorchOptions(TypedDict, total=False):
    """Keywords of torch.optim that constructors of row optimizers check but do not store."""

    foreach: Optional[bool]
    fused: Optional[bool]
    capturable: bool
    differentiable: bool
    amsgrad: bool
    decoupled_weight_decay: bool


# These select among implementations of the same step. A row optimizer has only one.
_IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable")
# Keys of parameter groups that optimizers and schedulers of torch write but no step reads.
_SCHEDULER_KEYS = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum",
                   "max_momentum", "swa_lr")
# Options of torch.optim and of common libraries that do not affect a step while they are off. Other
# options may: correct_bias=False takes larger first steps, and momentum_decay=0 halves the
# momentum.
_HARMLESS_WHEN_OFF = ("amsgrad", "centered", "nesterov", "maximize", "differentiable", "momentum",
                      "dampening", "lr_decay", "initial_accumulator_value", "weight_decay",
                      "cautious", "caution", "use_gc")
# Options of torch.optim, with the optimizers that have them.
_OWNERS = {
    "amsgrad": "Adam and AdamW", "momentum_decay": "NAdam", "rho": "Adadelta",
    "alpha": "RMSprop and ASGD", "centered": "RMSprop", "lambd": "ASGD", "t0": "ASGD",
    "etas": "Rprop", "step_sizes": "Rprop", "ns_steps": "Muon", "ns_coefficients": "Muon",
    "adjust_lr_fn": "Muon", "history_size": "LBFGS", "max_iter": "LBFGS",
    "beta2_decay": "Adafactor", "momentum": "SGD", "dampening": "SGD", "nesterov": "SGD",
    "lr_decay": "Adagrad", "initial_accumulator_value": "Adagrad", "betas": "Adam",
    "eps": "Adam and Adagrad", "weight_decay": "all", "maximize": "all", "differentiable": "all",
    "decoupled_weight_decay": "Adam"
}
_STATE_OWNERS = {
    "max_exp_avg_sq": "Adam and AdamW with amsgrad=True", "mu_product": "NAdam",
    "exp_inf": "Adamax", "acc_delta": "Adadelta", "square_avg": "RMSprop and Adadelta",
    "grad_avg": "RMSprop with centered=True", "ax": "ASGD", "eta": "ASGD", "prev": "Rprop",
    "step_size": "Rprop", "row_var": "Adafactor", "momentum_buffer": "SGD", "sum": "Adagrad",
    "exp_avg_sq": "Adam", "d": "LBFGS"
}
_REASONS = {
    "amsgrad": "keeps no largest second moment: set amsgrad=False, or take "
    "torch.optim.AdamW(amsgrad=True) and losses with "
    "sparse_grad=False",
    "differentiable": "takes its steps by operators that have no gradient: set "
    "differentiable=False",
    "decoupled_weight_decay": "decays weights in another way: RowAdam as AdamW does, apart "
    "from the gradient, the others by the "
    "gradient. Set weight_decay=0, or leave the option out"
}


def _is_on(value: Any) -> bool:
    return value is not None and not (isinstance(value, (bool, int, float)) and value == 0)


def _changes_steps(name: str, value: Any, group: Dict[str, Any]) -> bool:
    """Returns whether an option that a row optimizer does not have would change its steps."""
    # RowAdam decays weights as AdamW does; the others add the decay to the gradient.
    if name == "decoupled_weight_decay":
        return _is_on(group.get("weight_decay")) and bool(value) != ("betas" in group)
    return name not in _IMPLEMENTATION_OPTIONS and (_is_on(value) or name not in _HARMLESS_WHEN_OFF)


def _reason(owner: str, name: str) -> str:
    return f"{owner} " + _REASONS.get(name, "has no such option, and would take other steps")


def check_keywords(owner: str, keywords: Dict[str, Any], group: Dict[str, Any],
                   option_names: Iterable[str]) -> None:
    """Checks additional keywords of a constructor. Options of torch.optim that would not change a
    step are ignored.

    Raises:
        ValueError: an option of torch.optim would change the steps.
        TypeError: a keyword is not an option of torch.optim.
    """
    for name, value in keywords.items():
        if name not in _IMPLEMENTATION_OPTIONS and name not in _REASONS:
            hint = f": did you mean {guess}?" if (guess := guess_argument(name,
                                                                          option_names)) else ""
            raise TypeError(
                f"{owner}: expected options among {', '.join(option_names)}, got {name}{hint}")
        if _changes_steps(name, value, group):
            raise ValueError(f"{owner}: expected no {name}={value!r}: {_reason(owner, name)}")


def check_group(owner: str, group: Dict[str, Any], option_names: Iterable[str]) -> None:
    """Checks the options of a parameter group. Keys that are not options of torch.optim are the
    user's and are ignored.

    Raises:
        ValueError: an option of torch.optim would change the steps.
    """
    for name, value in group.items():
        if name in _OWNERS and name not in option_names and _changes_steps(name, value, group):
            raise ValueError(f"{owner}: expected a parameter group without {name}={value!r}: "
                             f"{_reason(owner, name)}")


def _kind(names: Iterable[str], owners: Dict[str, str], own_names: Iterable[str]) -> str:
    """Returns which optimizer the names identify, for messages: ", that of NAdam", or ""."""
    kind = next((owners[name] for name in names if name in owners and name not in own_names), None)
    return "" if kind in (None, "all") else f", that of {kind}"


def _is_row_group(group: Dict[str, Any]) -> bool:
    return "stochastic_rounding" in group


def check_loaded_group(optimizer: Any, group: Dict[str, Any], counterpart: str,
                       notes: Iterable[str]) -> None:
    """Checks that a row optimizer can continue from the saved options of a group, that is, that
    they define the same steps.

    Args:
        optimizer: the row optimizer that loads the state.
        group: the saved options.
        counterpart: the optimizer of torch.optim with the same steps.
        notes: keys of the optimizer's groups, known not to be options.

    Raises:
        ValueError: the options are those of another kind of optimizer, or one of them would change
            the steps. Unknown options are assumed to.
    """
    owner, option_names = optimizer._name, optimizer._option_names
    expected = (f"{owner}: expected the state dict of such an optimizer or of "
                f"torch.optim.{counterpart}")
    advice = "Load it into the optimizer that saved it, or begin with fresh state"
    missing_names = [
        name for name in option_names if name not in group and name not in optimizer._later_options
    ]
    if missing_names:
        raise ValueError(f"{expected}, with the options {', '.join(option_names)}, got one without "
                         f"{', '.join(missing_names)}"
                         f"{_kind(group, _OWNERS, option_names)}. {advice}")
    for name, value in group.items():
        if name in option_names or name in _SCHEDULER_KEYS or not _changes_steps(
                name, value, group):
            continue
        if name == "decoupled_weight_decay":
            raise ValueError(f"{expected}, whose weight decay is decoupled, got "
                             f"weight_decay={group['weight_decay']} with "
                             f"{name}={value}: torch.optim.Adam adds it to the gradient. Set "
                             "weight_decay=0 in its groups to go on without, "
                             "or begin with fresh state")
        if name in _OWNERS or not (_is_row_group(group) or name in notes):
            reason = _reason(owner, name) if name in _OWNERS else (
                f"{owner} does not know it. A note of yours loads where the groups of this "
                "optimizer have its key, too")
            raise ValueError(
                f"{expected}, got one with "
                f"{name}={value!r}{_kind([name], _OWNERS, option_names)}: {reason}. {advice}")
    if counterpart == "AdamW" and "foreach" in group and not _is_row_group(group):
        _check_adam(expected, group, advice)


def _check_adam(expected: str, group: Dict[str, Any], advice: str) -> None:
    """Checks options that RAdam and Adamax share with AdamW, and that Adam shares entirely."""
    if "amsgrad" not in group:
        raise ValueError(f"{expected}, got one without amsgrad, that of RAdam or Adamax. {advice}")
    if _is_on(group["weight_decay"]) and "decoupled_weight_decay" not in group:
        raise ValueError(f"{expected}, whose weight decay is decoupled, got "
                         f"weight_decay={group['weight_decay']} without "
                         "decoupled_weight_decay, as torch before 2.7 saved it for Adam and AdamW "
                         "alike. If it is AdamW's, set "
                         "decoupled_weight_decay=True in its groups")


def check_loaded_state(optimizer: Any, number: Any, state: Dict[str, Any]) -> None:
    """Checks that the saved state of a parameter has the names that the row optimizer uses.

    Raises:
        ValueError: the state has other names, such as those of another optimizer, or lacks some.
    """
    owner, state_names = optimizer._name, optimizer._state_names
    expected = f"{owner}: expected state of parameter {number} with {', '.join(state_names)}"
    for name, value in state.items():
        if value is not None and name not in state_names:
            raise ValueError(
                f"{expected}, got {name} as "
                f"well{_kind([name], _STATE_OWNERS, state_names)}. Begin with fresh state")
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"{expected}, all of them tensors, got {name} of type "
                             f"{type(value).__name__}")
    missing_names = [name for name in optimizer._dense_names if state.get(name) is None]
    if state and missing_names:
        raise ValueError(
            f"{expected}, got one without "
            f"{', '.join(missing_names)}{_kind(state, _STATE_OWNERS, state_names)}. Begin with "
            "fresh state")


def check_parameters(owner: str, params: Any) -> Any:
    """Returns the `params` of a constructor, after checking for modules. torch.optim makes all
    other checks.

    Raises:
        TypeError: `params` is a module, or contains one.
    """
    module: Optional[torch.nn.Module] = params if isinstance(params, torch.nn.Module) else None
    if module is None and not isinstance(params, (torch.Tensor, dict)):
        params = list(params)
        module = next((param for param in params if isinstance(param, torch.nn.Module)), None)
    if module is not None:
        raise TypeError(f"{owner}: expected parameters, got the module {type(module).__name__}: "
                        "give "
                        "[*encoder.parameters(), *loss.parameters()], or loss.parameters() for "
                        "one module")
    return params
