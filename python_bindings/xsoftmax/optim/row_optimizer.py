"""Base class of row optimizers: options, state, and checkpoints that resume bit for bit."""

import contextlib
import operator
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import first_step
from .._core import hooks
from .._core.lazy_gradient import PLAIN, drop_terms, make_lazy, terms_of
from .._core.options import option_text
from .._core.placement import state_of_rank, whole_state
from . import torch_options as _torch_options
from . import values as _values


def sparse_rows(owner: str, param: Tensor, grad: Tensor) -> Tuple[Tensor, Tensor]:
    """Returns rows [R] and values [R, ...] of a sparse COO gradient, coalesced or not."""
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        layout = (f"{grad.sparse_dim()} sparse dimensions"
                  if grad.layout == torch.sparse_coo else f"layout {grad.layout}")
        raise RuntimeError(
            f"{owner}: expected a gradient that is dense, or sparse COO in dimension "
            f"0 alone, got {layout}")
    if param.dim() > 2:
        raise RuntimeError(f"{owner}: expected a parameter with 1 or 2 dimensions for a sparse "
                           "gradient, got shape "
                           f"{tuple(param.shape)}")
    return grad._indices().select(0, 0), grad._values()


def _to_local(tensor: Any) -> Any:
    """Returns this rank's part of a DTensor, such as a parameter of fully_shard. Dense steps are
    element-wise, so each rank updates its part."""
    return tensor if type(tensor) in PLAIN or not hasattr(tensor, "to_local") else tensor.to_local()


def _to_dtensor(param: Any, tensor: Tensor) -> Any:
    """Returns state of this rank's part as a DTensor like the parameter. 0-dim tensors are returned
    unchanged."""
    if type(param) in PLAIN or not hasattr(param, "to_local") or tensor.dim() == 0:
        return tensor
    return type(param).from_local(tensor, param.device_mesh, param.placements, run_check=False,
                                  shape=param.shape, stride=param.stride())


def _is_fixed(value: Any) -> bool:
    return all(map(_is_fixed, value)) if type(value) is tuple else value is None or type(value) in (
        bool, int, float, str, torch.dtype)


def _is_row_state(state: Dict[str, Any]) -> bool:
    step = state.get("step")
    return isinstance(step, torch.Tensor) and step.dtype == torch.int64


class _HiddenTensor:
    """Protects a tensor from torch.optim's cast of loaded state to the dtype of the parameter."""
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _number_parameters(state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Returns a state dict whose state is keyed by parameter numbers.
    torch.distributed.checkpoint.format_utils writes them as text, and omits empty entries."""
    numbers = {
        str(number): number
        for group in state_dict["param_groups"]
        for number in group["params"]
    }
    return {
        **state_dict, "state": {
            numbers.get(key, key): state
            for key, state in state_dict.get("state", {}).items()
        }
    }


def _hide_tensors(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    hidden = {
        key: {
            name: _HiddenTensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        } if isinstance(state, dict) else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": hidden}


class RowOptimizer(torch.optim.Optimizer):
    """Base class of RowSGD, RowAdagrad and RowAdam: parameters, options and state tensors. The step
    is an operator (csrc/optim/row_step.h).

    A subclass defines ``_op`` (its operators are ``_op + "_state"``, ``"_step_"``, ``"_flush_"``),
    ``_state_names`` (of state tensors, in the order of the operators), ``_dense_names`` (those that
    dense state always has), ``_option_names`` (keys of parameter groups) and ``_counterpart`` (the
    optimizer of torch.optim with the same steps).
    """

    _op: str
    _state_names: Tuple[str, ...]
    _dense_names: Tuple[str, ...]
    _option_names: Tuple[str, ...]
    _counterpart: str
    # Options that are missing from older checkpoints and from those of torch.optim.
    _later_options: Dict[str, Any] = dict(stochastic_rounding=False, state_dtype=None)

    def __init__(self, params: Any, options: Dict[str, Any], torch_options: Dict[str, Any],
                 lazy_gradient: bool = False) -> None:
        if not isinstance(lazy_gradient, bool):
            raise TypeError(f"{self._name}: expected lazy_gradient as a bool, got "
                            f"{type(lazy_gradient).__name__}")
        self._lazy_gradient = lazy_gradient
        _torch_options.check_keywords(self._name, torch_options, options, self._option_names)
        super().__init__(_torch_options.check_parameters(self._name, params), options)
        first_step.register_row_optimizer(self)

    def _call(self, suffix: str, *args: Any) -> Any:
        return getattr(torch.ops.xsoftmax, self._op + suffix)(*args)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {name: group[name] for name in self._option_names}

    def _texts_and_rates(self) -> Tuple[List[str], Optional[List[Tensor]]]:
        """Returns the options of each group as text, and their learning rates if any of them is a
        tensor, else None."""
        texts = [self._text(group) for group in self.param_groups]
        rates = [group["lr"] for group in self.param_groups]
        if not any(isinstance(rate, Tensor) for rate in rates):
            return texts, None
        return texts, [
            rate if isinstance(rate, Tensor) else torch.tensor(float(rate), dtype=torch.float64)
            for rate in rates
        ]

    def _text(self, group: Dict[str, Any]) -> str:
        # Cache the text as long as all options are the same objects: building it would take a tenth
        # of the time of a step. Options that can change in place are not cached.
        values = [
            None if name == "lr" and isinstance(group[name], Tensor) else group[name]
            for name in self._option_names
        ]
        texts = self.__dict__.setdefault("_texts", {})
        old_values, text = texts.get(id(group), ((), None))
        if text is not None and len(old_values) == len(values) and all(
                map(operator.is_, old_values, values)):
            return str(text)
        text = self._new_text(group)
        if all(_is_fixed(value) for value in values):
            texts[id(group)] = values, text
        return text

    def _new_text(self, group: Dict[str, Any]) -> str:
        options = _values.without_tensor_rate(self._options(group))
        _values.check_options(self._name, options)
        try:
            return option_text(**options)
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from None

    def _tensors(self, state: Dict[str, Any]) -> List[Tensor]:
        return [_to_local(state[name]) for name in self._state_names if name in state]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "lazy_gradient" in param_group:
            raise TypeError(
                f"{self._name}: expected lazy_gradient as an argument of the optimizer, "
                "got it in a group of parameters")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _torch_options.check_group(self._name, group, self._option_names)
            _values.check_tensor_rate(self._name, group["lr"])
            positions: Dict[int, Any] = {}
            for number, param in enumerate(group["params"]):
                position = positions.setdefault(id(param), number)
                if position != number:
                    raise ValueError(
                        f"{self._name}: expected each parameter once, got that of "
                        f"shape {list(param.shape)} as number {position} and as number "
                        f"{number}, as where a table is tied to an embedding: give "
                        "list(dict.fromkeys(parameters))")
            for dtype in {torch.float32, *(param.dtype for param in group["params"])}:
                # Checks the options.
                self._call("_state", torch.empty(0, dtype=dtype), False, self._text(group))
        except Exception:
            self.param_groups.pop()
            raise
        for param in group["params"] if self._lazy_gradient else ():
            make_lazy(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, as torch.optim does. A gradient that is left as terms (lazy_gradient)
        is dropped without being materialised."""
        for group in self.param_groups:
            for param in group["params"] if set_to_none else ():
                drop_terms(param)
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's are overloads
            self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        """Updates all parameters that have a gradient. An error changes nothing.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.optim.

        Returns:
            The loss of the closure, or None.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: same as the class.
        """
        if hooks.deferred_work:
            hooks.run_deferred()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        texts, rates = self._texts_and_rates()
        rows: List[Optional[Tensor]] = []
        params, values, tensors, counts = [], [], [], []
        new_states: Dict[Tensor, Dict[str, Any]] = {}
        lazy_updates: List[Tuple[Tensor, List[Tensor], List[Tensor], str, Optional[Tensor]]] = []
        for number, (group, text) in enumerate(zip(self.param_groups, texts)):
            terms = {param: terms_of(param)
                     for param in group["params"]} if self._lazy_gradient else {}
            for param, param_terms in terms.items():
                if param_terms:
                    state = self.state.get(param) or self._new_state(param, True, text, new_states)
                    if _is_row_state(state):
                        lazy_updates.append((param, self._tensors(state), param_terms, text,
                                             rates[number] if rates is not None else None))
                    else:
                        terms[param] = []  # dense state takes a materialised gradient
            group_params = [
                param
                for param in group["params"] if not terms.get(param) and param.grad is not None
            ]
            for param in group_params:
                grad = param.grad
                is_sparse = grad.layout != torch.strided
                state = self.state.get(param)
                if is_sparse and (not state or grad.layout != torch.sparse_coo):
                    sparse_rows(self._name, param, grad)  # raises
                if not state:
                    # A table may get both forms of gradient, and torch.distributed.checkpoint
                    # creates the state to load with a dense gradient of zeros, so the form of the
                    # first gradient does not decide.
                    is_table = type(param) in PLAIN and torch.ops.xsoftmax.is_row_table(param)
                    keeps_rows = is_sparse or is_table or id(
                        param) in first_step.row_sparse_tables()
                    state = self._new_state(param, keeps_rows, text, new_states)
                params.append(_to_local(param))
                rows.append(None)  # the operator reads the rows of a sparse gradient
                values.append(_to_local(grad))
                tensors += self._tensors(state)
            counts.append(len(group_params))
        # before any parameter changes
        for param, row_state, param_terms, text, rate in lazy_updates:
            self._call("_check_terms", param, row_state, *param_terms, text, rate)
        if params:
            self._call("_step_", params, rows, values, tensors, texts, counts, rates)
        lazy_states = {
            param: new_states.pop(param)
            for param, *_ in lazy_updates if param in new_states
        }
        self.state.update(new_states)
        for param, row_state, param_terms, text, rate in lazy_updates:
            self._call("_terms_", param, row_state, *param_terms, text, rate)
            if param in lazy_states:
                self.state[param] = lazy_states[param]
        return loss

    def _new_state(self, param: Tensor, keeps_rows: bool, text: str,
                   new_states: Dict[Tensor, Any]) -> Dict[str, Any]:
        tensors = self._call("_state", _to_local(param), keeps_rows, text)
        state = new_states[param] = {
            name: _to_dtensor(param, tensor)
            for name, tensor in zip(self._state_names, tensors)
        }
        return state

    @torch.no_grad()
    def flush(self) -> None:
        """Applies the pending updates of all rows of all tables (lazy updates).

        It touches all N rows. Reading a table through the library (``eval()``, ``topk``,
        ``state_dict()`` and others) does the same. Call it before tables are read by other means.
        An optimizer that is deleted calls it; during a CUDA graph capture, the call is deferred to
        the end of the capture. Up to rounding, it does not change the course of training, given the
        same gradients.
        """
        if hooks.deferred_work:
            hooks.run_deferred()
        self._flush_later()()

    def _flush_later(self) -> Callable[[], None]:
        """Returns a function that does :meth:`flush` and has no reference to the optimizer."""
        flush = getattr(torch.ops.xsoftmax, self._op + "_flush_")
        states = [(_to_local(param), self._tensors(state))
                  for param, state in self.state.items() if state]

        def flush_states() -> None:
            with torch.no_grad():
                for param, tensors in states:
                    flush(param, tensors)

        return flush_states

    def __del__(self) -> None:
        # Pending updates would be lost with the state, as when a function trains and returns only
        # the model.
        if not sys.is_finalizing() and hasattr(self, "state"):
            # A table may have moved since. The garbage collector may run while torch.compile traces
            # a program, and the flush must not become a part of that.
            with contextlib.suppress(Exception), _disable_current_modes():
                if hooks.is_capturing():  # collected during a capture
                    hooks.defer(self._flush_later())
                else:
                    self.flush()

    def state_dict(self) -> Dict[str, Any]:
        """Returns the state dict, as torch.optim does, after :meth:`flush`.

        The state of a table that is sharded over ranks (:mod:`xsoftmax.distributed`) is that of the
        whole table: DTensors for state with a row for each class, and the state of a single process
        otherwise.
        """
        self.flush()
        return whole_state(self, super().state_dict())

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state dict, as torch.optim does, but keeps the dtype in which state was saved.

        Counters stay integers, and the float32 state of 16-bit parameters stays float32. State is
        moved to the parameter's device. Checkpoints of the torch.optim optimizer with the same
        steps (AdamW, Adagrad, SGD) load as dense state; those with an option that would change the
        steps, and those of other optimizers, are refused. For a table that is sharded over ranks,
        state may be DTensors of any placement, whole tables, or this rank's rows. An error loads
        nothing.

        Raises:
            ValueError: state of a parameter has another shape, such as that before a
                resize_classes, or belongs to another kind of optimizer; an option is unknown; a
                step is negative or not finite, squares are negative or NaN, or moments are not
                finite.
            TypeError: row state has another dtype, moments are integers, or an option has another
                type.
        """
        state_dict = state_of_rank(self, _number_parameters(state_dict))
        self._check_state(state_dict)
        old_state = self.state, self.param_groups
        old_tensors = [self._tensors(state) for state in self.state.values() if state]
        hide = self.register_load_state_dict_pre_hook(_hide_tensors)
        reveal = self.register_load_state_dict_post_hook(
            RowOptimizer._reveal_tensors,  # type: ignore[arg-type]
            prepend=True)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups = old_state
            raise
        finally:
            hide.remove()
            reveal.remove()
        for tensors in old_tensors:
            torch.ops.xsoftmax.forget_pending(tensors)

    def _check_state(self, state_dict: Dict[str, Any]) -> None:
        """Raises if a state dict cannot be loaded. It checks all parameters before anything is
        written to the file of the first."""
        notes = {name for group in self.param_groups for name in group}
        for group in state_dict["param_groups"]:
            _torch_options.check_loaded_group(self, group, self._counterpart, notes)
            _values.check_tensor_rate(self._name, group["lr"])
            # Checks the options.
            self._call("_state", torch.empty(0, device="meta"), False,
                       self._new_text({**self._later_options, **group}))
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [(number, group) for group in state_dict["param_groups"]
                   for number in group["params"]]
        # If the lengths differ, torch.optim raises.
        for (number, group), param in zip(numbers, params) if len(numbers) == len(params) else ():
            state = state_dict["state"].get(number)
            for name, value in state.items() if isinstance(state, dict) else ():
                # `step` is a number, `pending` is sized by steps, and absent tensors are empty.
                may_have_rows = name in self._state_names and name not in ("step", "pending")
                has_rows = may_have_rows and isinstance(
                    value, torch.Tensor) and value.dim() > 0 and value.numel() > 0
                if has_rows and value.shape not in (param.shape, param.shape[:1]):
                    raise ValueError(f"{self._name}: expected {name} of parameter {number} with "
                                     f"the shape {list(param.shape)} of the parameter or a number "
                                     "for "
                                     f"each of its rows, got {list(value.shape)}: a table loads "
                                     "the state of as many rows as it has (resize_classes)")
            if isinstance(state, dict):
                _torch_options.check_loaded_state(self, number, state)
                _values.check_state_values(
                    self._name, number, {name: _to_local(value)
                                         for name, value in state.items()})
            if isinstance(state, dict) and _is_row_state(state):
                self._check_rows(number, _to_local(param), group,
                                 {name: _to_local(value)
                                  for name, value in state.items()})

    def _check_rows(self, number: int, param: Tensor, group: Dict[str, Any],
                    state: Dict[str, Any]) -> None:
        """Raises for row state that the next step would refuse, or that does not fit into the state
        file of a table in a file (:mod:`xsoftmax.tables`)."""
        like = torch.empty_like(param, device="meta")
        fresh_state = dict(
            zip(self._state_names,
                self._call("_state", like, True, self._new_text({**self._later_options, **group}))))
        loaded_state = {
            name: fresh_state[name] if state.get(name) is None else state[name]
            for name in self._state_names
        }
        for name, tensor in fresh_state.items() if torch.ops.xsoftmax.mapped_table_path(
                param) else ():
            value = state.get(name)
            if value is None and tensor.numel() or value is not None and (
                    value.shape != tensor.shape or value.dtype != tensor.dtype):
                got = ("none"
                       if value is None else f"shape {list(value.shape)} and dtype {value.dtype}")
                raise ValueError(f"{self._name}: expected {name} of parameter {number} with the "
                                 f"shape {list(tensor.shape)} and dtype {tensor.dtype} for a "
                                 f"table in a file, got {got}")
        # On meta tensors it only makes its checks.
        self._call("_flush_", like, [loaded_state[name].to("meta") for name in self._state_names])

    def _reveal_tensors(self) -> None:
        groups = {param: group for group in self.param_groups for param in group["params"]}
        file_states = []
        for param, state in self.state.items():
            hidden = {
                name: value.tensor
                for name, value in state.items() if isinstance(value, _HiddenTensor)
            }
            if _is_row_state(hidden) and torch.ops.xsoftmax.mapped_table_path(_to_local(param)):
                state.update(
                    zip(self._state_names,
                        self._call("_state", _to_local(param), True, self._text(groups[param]))))
                file_states.append((_to_local(param), state, hidden))
            else:
                state.update(
                    {name: tensor.to(param.device, copy=True)
                     for name, tensor in hidden.items()})
            # State of torch.optim.SGD has no step.
            if state and any(state.get(name) is None for name in self._state_names[:2]):
                tensors = self._call("_state", _to_local(param), False, self._text(groups[param]))
                complete = {
                    name: _to_dtensor(param, tensor)
                    for name, tensor in zip(self._state_names, tensors)
                }
                complete["step"].fill_(1)
                state.update(
                    {name: tensor
                     for name, tensor in complete.items() if state.get(name) is None})
        self._register_pending()
        for param, state, hidden_tensors in file_states:  # last, because it cannot be undone
            torch.ops.xsoftmax.mapped_table_changes(param)
            with torch.no_grad():
                for name in self._state_names:
                    if name in hidden_tensors:
                        state[name].copy_(hidden_tensors[name])

    def _register_pending(self) -> None:
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for param, state in self.state.items():
            if tensors := self._tensors(state):
                torch.ops.xsoftmax.register_row_state(
                    _to_local(param), tensors, groups[param].get("initial_accumulator_value", 0.0))
            if "pending" in state:
                torch.ops.xsoftmax.register_pending(param, self._tensors(state), self._op)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        for group in state["param_groups"]:
            for name, value in self._later_options.items():
                group.setdefault(name, value)
        super().__setstate__(state)
        self.__dict__.setdefault("_lazy_gradient", False)
        if not any(
                isinstance(value, _HiddenTensor) for tensors in self.state.values()
                for value in tensors.values()):
            self._register_pending()  # for a copy
