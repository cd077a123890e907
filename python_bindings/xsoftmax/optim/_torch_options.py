"""Options and state of torch.optim's optimizers: those that row optimizers take, ignore, or refuse by name."""

from typing import Any, Dict, Iterable, Optional, TypedDict

import torch

from .._arguments import meant_argument


class TorchOptions(TypedDict, total=False):
    """Keywords of torch.optim that the constructors of row optimizers check and keep nothing of."""

    foreach: Optional[bool]
    fused: Optional[bool]
    capturable: bool
    differentiable: bool
    amsgrad: bool
    decoupled_weight_decay: bool


# They choose among implementations of the same step, of which a row optimizer has one.
_SAME_STEP = ("foreach", "fused", "capturable")
# Keys of parameter groups that optimizers and schedulers of torch write and no step reads.
_NOT_OF_STEPS = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
# Options of torch.optim and of common libraries that change no step while they are off. Any other that
# is off may: correct_bias=False takes larger first steps, and a momentum_decay of 0 is half the momentum.
_NO_STEP_WHEN_OFF = ("amsgrad", "centered", "nesterov", "maximize", "differentiable", "momentum", "dampening", "lr_decay",
                     "initial_accumulator_value", "weight_decay", "cautious", "caution", "use_gc")
# Options of torch.optim, each with the optimizers that have it.
_OWNERS = {"amsgrad": "Adam and AdamW", "momentum_decay": "NAdam", "rho": "Adadelta", "alpha": "RMSprop and ASGD", "centered": "RMSprop",
           "lambd": "ASGD", "t0": "ASGD", "etas": "Rprop", "step_sizes": "Rprop", "ns_steps": "Muon", "ns_coefficients": "Muon",
           "adjust_lr_fn": "Muon", "history_size": "LBFGS", "max_iter": "LBFGS", "beta2_decay": "Adafactor", "momentum": "SGD",
           "dampening": "SGD", "nesterov": "SGD", "lr_decay": "Adagrad", "initial_accumulator_value": "Adagrad", "betas": "Adam",
           "eps": "Adam and Adagrad", "weight_decay": "all", "maximize": "all", "differentiable": "all", "decoupled_weight_decay": "Adam"}
_STATE_OWNERS = {"max_exp_avg_sq": "Adam and AdamW with amsgrad=True", "mu_product": "NAdam", "exp_inf": "Adamax", "acc_delta": "Adadelta",
                 "square_avg": "RMSprop and Adadelta", "grad_avg": "RMSprop with centered=True", "ax": "ASGD", "eta": "ASGD",
                 "prev": "Rprop", "step_size": "Rprop", "row_var": "Adafactor", "momentum_buffer": "SGD", "sum": "Adagrad",
                 "exp_avg_sq": "Adam", "d": "LBFGS"}
_REASONS = {"amsgrad": "keeps no largest second moment: set amsgrad=False, or take torch.optim.AdamW(amsgrad=True) and losses with "
                       "sparse_grad=False",
            "differentiable": "takes its steps by operators that have no gradient: set differentiable=False",
            "decoupled_weight_decay": "decays weights in another way: RowAdam as AdamW does, apart from the gradient, the others by the "
                                      "gradient. Set weight_decay=0, or leave the option out"}


def _is_on(value: Any) -> bool:
    return value is not None and not (isinstance(value, (bool, int, float)) and value == 0)


def _refused(name: str, value: Any, group: Dict[str, Any]) -> bool:
    """Whether an option that a row optimizer does not have changes its steps."""
    if name == "decoupled_weight_decay":  # RowAdam decays as AdamW does; the others add the decay to the gradient
        return _is_on(group.get("weight_decay")) and bool(value) != ("betas" in group)
    return name not in _SAME_STEP and (_is_on(value) or name not in _NO_STEP_WHEN_OFF)


def _reason(owner: str, name: str) -> str:
    return f"{owner} " + _REASONS.get(name, "has no such option, and would take other steps")


def check_keywords(owner: str, keywords: Dict[str, Any], group: Dict[str, Any], known: Iterable[str]) -> None:
    """Checks keywords of a constructor beside its own: options of torch.optim that change no step are ignored.

    Raises:
        ValueError: an option of torch.optim that would change the steps
        TypeError: no option of torch.optim
    """
    for name, value in keywords.items():
        if name not in _SAME_STEP and name not in _REASONS:
            hint = f": did you mean {meant}?" if (meant := meant_argument(name, known)) else ""
            raise TypeError(f"{owner}: expected options among {', '.join(known)}, got {name}{hint}")
        if _refused(name, value, group):
            raise ValueError(f"{owner}: expected no {name}={value!r}: {_reason(owner, name)}")


def check_group(owner: str, group: Dict[str, Any], known: Iterable[str]) -> None:
    """Checks the options of a parameter group. Keys that are no options of torch.optim are the user's notes.

    Raises:
        ValueError: an option of torch.optim that would change the steps
    """
    for name, value in group.items():
        if name in _OWNERS and name not in known and _refused(name, value, group):
            raise ValueError(f"{owner}: expected a parameter group without {name}={value!r}: {_reason(owner, name)}")


def _kind(names: Iterable[str], owners: Dict[str, str], known: Iterable[str]) -> str:
    """ ", that of NAdam" for names that tell the optimizer."""
    found = next((owners[name] for name in names if name in owners and name not in known), None)
    return "" if found in (None, "all") else f", that of {found}"


def _is_ours(group: Dict[str, Any]) -> bool:
    return "stochastic_rounding" in group


def check_loaded_group(optimizer: Any, group: Dict[str, Any], counterpart: str, notes: Iterable[str]) -> None:
    """Checks that the saved parameters of a group were trained by steps that the row optimizer goes on with.

    Args:
        optimizer: the row optimizer that loads
        group: its saved options
        counterpart: the optimizer of torch.optim with the same steps
        notes: keys of its own groups, which are known to be no options

    Raises:
        ValueError: options of another kind of optimizer, or that would change the steps, as any
            that is not known may
    """
    owner, known = optimizer._name, optimizer._option_names
    expected = f"{owner}: expected the state dict of such an optimizer or of torch.optim.{counterpart}"
    advice = "Load it into the optimizer that saved it, or begin with fresh state"
    missing = [name for name in known if name not in group and name not in optimizer._later_options]
    if missing:
        raise ValueError(f"{expected}, with the options {', '.join(known)}, got one without {', '.join(missing)}"
                         f"{_kind(group, _OWNERS, known)}. {advice}")
    for name, value in group.items():
        if name in known or name in _NOT_OF_STEPS or not _refused(name, value, group):
            continue
        if name == "decoupled_weight_decay":
            raise ValueError(f"{expected}, whose weight decay is decoupled, got weight_decay={group['weight_decay']} with "
                             f"{name}={value}: torch.optim.Adam adds it to the gradient. Set weight_decay=0 in its groups to go on without, "
                             "or begin with fresh state")
        if name in _OWNERS or not (_is_ours(group) or name in notes):
            reason = _reason(owner, name) if name in _OWNERS else (
                f"{owner} does not know it. A note of yours loads where the groups of this optimizer have its key, too")
            raise ValueError(f"{expected}, got one with {name}={value!r}{_kind([name], _OWNERS, known)}: {reason}. {advice}")
    if counterpart == "AdamW" and "foreach" in group and not _is_ours(group):
        _check_adam(expected, group, advice)


def _check_adam(expected: str, group: Dict[str, Any], advice: str) -> None:
    """The groups of RAdam and Adamax hold names of AdamW's, those of Adam the same."""
    if "amsgrad" not in group:
        raise ValueError(f"{expected}, got one without amsgrad, that of RAdam or Adamax. {advice}")
    if _is_on(group["weight_decay"]) and "decoupled_weight_decay" not in group:
        raise ValueError(f"{expected}, whose weight decay is decoupled, got weight_decay={group['weight_decay']} without "
                         "decoupled_weight_decay, as torch before 2.7 saved it for Adam and AdamW alike. If it is AdamW's, set "
                         "decoupled_weight_decay=True in its groups")


def check_loaded_state(optimizer: Any, number: Any, state: Dict[str, Any]) -> None:
    """Checks that the names of a parameter's saved state are those that the row optimizer keeps.

    Raises:
        ValueError: state that it does not keep, such as another optimizer's, or that lacks a part
    """
    owner, known = optimizer._name, optimizer._state_names
    expected = f"{owner}: expected state of parameter {number} with {', '.join(known)}"
    for name, value in state.items():
        if value is not None and name not in known:
            raise ValueError(f"{expected}, got {name} as well{_kind([name], _STATE_OWNERS, known)}. Begin with fresh state")
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"{expected}, all of them tensors, got {name} of type {type(value).__name__}")
    missing = [name for name in optimizer._dense_names if state.get(name) is None]
    if state and missing:
        raise ValueError(f"{expected}, got one without {', '.join(missing)}{_kind(state, _STATE_OWNERS, known)}. Begin with fresh state")


def check_parameters(owner: str, params: Any) -> Any:
    """Returns the constructor's `params`, which torch.optim checks but for modules.

    Raises:
        TypeError: a module, or one among them
    """
    given: Optional[torch.nn.Module] = params if isinstance(params, torch.nn.Module) else None
    if given is None and not isinstance(params, (torch.Tensor, dict)):
        params = list(params)
        given = next((each for each in params if isinstance(each, torch.nn.Module)), None)
    if given is not None:
        raise TypeError(f"{owner}: expected parameters, got the module {type(given).__name__}: give "
                        f"[*encoder.parameters(), *loss.parameters()], or loss.parameters() for one module")
    return params
