"""What the row-wise optimizers share: their operators, and checkpoints that resume bit for bit."""

import contextlib
import operator
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .. import _first_step, _hooks
from .._lazy_gradient import PLAIN, drop_terms, make_lazy, terms_of
from .._options import option_text
from .._placement import state_of_rank, whole_state
from . import _torch_options, _values


def sparse_rows(who: str, param: Tensor, grad: Tensor) -> Tuple[Tensor, Tensor]:
    """(rows [R], values [R, ...]) of a sparse COO gradient, uncoalesced or not."""
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        layout = f"{grad.sparse_dim()} sparse dimensions" if grad.layout == torch.sparse_coo else f"layout {grad.layout}"
        raise RuntimeError(f"{who}: expected a gradient that is dense, or sparse COO in dimension 0 alone, got {layout}")
    if param.dim() > 2:
        raise RuntimeError(f"{who}: expected a parameter with 1 or 2 dimensions for a sparse gradient, got shape "
                           f"{tuple(param.shape)}")
    return grad._indices().select(0, 0), grad._values()


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor, as fully_shard makes parameters: a dense step is that of each element."""
    return tensor if type(tensor) in PLAIN or not hasattr(tensor, "to_local") else tensor.to_local()


def _spread(param: Any, tensor: Tensor) -> Any:
    """State of this rank's part as a DTensor like the parameter; a number stays one."""
    if type(param) in PLAIN or not hasattr(param, "to_local") or tensor.dim() == 0:
        return tensor
    return type(param).from_local(tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())


def _is_fixed(value: Any) -> bool:
    return all(map(_is_fixed, value)) if type(value) is tuple else value is None or type(value) in (bool, int, float, str, torch.dtype)


def _is_of_rows(state: Dict[str, Any]) -> bool:
    step = state.get("step")
    return isinstance(step, torch.Tensor) and step.dtype == torch.int64


class _Hidden:
    """Hides a tensor from torch.optim's cast of loaded state to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _with_numbers(state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """State under the numbers of parameters: torch.distributed.checkpoint.format_utils writes them as text, and leaves out what is empty."""
    numbers = {str(number): number for group in state_dict["param_groups"] for number in group["params"]}
    return {**state_dict, "state": {numbers.get(key, key): state for key, state in state_dict.get("state", {}).items()}}


def _hide_tensors(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    hidden = {key: {name: _Hidden(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
              if isinstance(state, dict) else state for key, state in state_dict["state"].items()}
    return {**state_dict, "state": hidden}


class RowOptimizer(torch.optim.Optimizer):
    """Base of RowSGD, RowAdagrad and RowAdam: parameters, options and the tensors of state. The step is an operator (csrc/optim/row_step.h).

    A subclass gives ``_op`` (its operators are ``_op + "_state"``, ``"_step_"``, ``"_flush_"``), ``_state_names`` (of the state tensors, in
    the operators' order), ``_dense_names`` (those that dense state always has), ``_option_names`` (as in a group of parameters) and ``_counterpart`` (the
    optimizer of torch.optim with the same steps).
    """

    _op: str
    _state_names: Tuple[str, ...]
    _dense_names: Tuple[str, ...]
    _option_names: Tuple[str, ...]
    _counterpart: str
    _later_options: Dict[str, Any] = dict(stochastic_rounding=False, state_dtype=None)  # which older checkpoints and torch.optim's know nothing of

    def __init__(self, params: Any, options: Dict[str, Any], torch_options: Dict[str, Any], lazy_gradient: bool = False) -> None:
        if not isinstance(lazy_gradient, bool):
            raise TypeError(f"{self._name}: expected lazy_gradient as a bool, got {type(lazy_gradient).__name__}")
        self._lazy_gradient = lazy_gradient
        _torch_options.check_keywords(self._name, torch_options, options, self._option_names)
        super().__init__(_torch_options.check_parameters(self._name, params), options)
        _first_step.register_row_optimizer(self)

    def _call(self, suffix: str, *args: Any) -> Any:
        return getattr(torch.ops.xsoftmax, self._op + suffix)(*args)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {name: group[name] for name in self._option_names}

    def _texts_and_rates(self) -> Tuple[List[str], Optional[List[Tensor]]]:
        """The options of each group as text, and their learning rates where one of them is a tensor."""
        texts = [self._text(group) for group in self.param_groups]
        rates = [group["lr"] for group in self.param_groups]
        if not any(isinstance(rate, Tensor) for rate in rates):
            return texts, None
        return texts, [rate if isinstance(rate, Tensor) else torch.tensor(float(rate), dtype=torch.float64) for rate in rates]

    def _text(self, group: Dict[str, Any]) -> str:
        # Texts are made anew where an option is another object: a step would else spend a tenth of its time on them. Those that can change in place are
        # not remembered.
        values = [None if name == "lr" and isinstance(group[name], Tensor) else group[name] for name in self._option_names]
        texts = self.__dict__.setdefault("_texts", {})
        known, text = texts.get(id(group), ((), None))
        if text is not None and len(known) == len(values) and all(map(operator.is_, known, values)):
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
        return [_local(state[name]) for name in self._state_names if name in state]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _torch_options.check_group(self._name, group, self._option_names)
            _values.check_tensor_rate(self._name, group["lr"])
            seen: Dict[int, Any] = {}
            for number, param in enumerate(group["params"]):
                first = seen.setdefault(id(param), number)
                if first != number:
                    raise ValueError(f"{self._name}: expected each parameter once, got that of shape {list(param.shape)} as number {first} and as number "
                                     f"{number}, as where a table is tied to an embedding: give list(dict.fromkeys(parameters))")
            for dtype in {torch.float32, *(param.dtype for param in group["params"])}:
                self._call("_state", torch.empty(0, dtype=dtype), False, self._text(group))  # checks the options
        except Exception:
            self.param_groups.pop()
            raise
        for param in group["params"] if self._lazy_gradient else ():
            make_lazy(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's. A gradient that was not written out (lazy_gradient) is dropped as it is."""
        for group in self.param_groups:
            for param in group["params"] if set_to_none else ():
                drop_terms(param)
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]  # torch's are overloads
        """Takes one step for all parameters that have a gradient. A step that is refused changes nothing.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.optim.

        Returns:
            The loss of the closure, or None.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: as the class
        """
        if _hooks.deferred:
            _hooks.run_deferred()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        texts, rates = self._texts_and_rates()
        rows: List[Optional[Tensor]] = []
        params, values, tensors, counts = [], [], [], []
        fresh: Dict[Tensor, Dict[str, Any]] = {}
        lazy: List[Tuple[Tensor, List[Tensor], List[Tensor], str, Optional[Tensor]]] = []
        for number, (group, text) in enumerate(zip(self.param_groups, texts)):
            terms = {param: terms_of(param) for param in group["params"]} if self._lazy_gradient else {}
            for param, left in terms.items():
                if left:
                    state = self.state.get(param) or self._new_state(param, True, text, fresh)
                    if _is_of_rows(state):
                        lazy.append((param, self._tensors(state), left, text, rates[number] if rates is not None else None))
                    else:
                        terms[param] = []  # state of dense gradients takes one that is written out
            group_params = [param for param in group["params"] if not terms.get(param) and param.grad is not None]
            for param in group_params:
                grad = param.grad
                is_sparse = grad.layout != torch.strided
                state = self.state.get(param)
                if is_sparse and (not state or grad.layout != torch.sparse_coo):
                    sparse_rows(self._name, param, grad)  # which says what is wrong
                if not state:
                    # A table may have gradients of both kinds, and torch.distributed.checkpoint shows it a dense one of zeros, so that an optimizer makes
                    # the state that is loaded next.
                    known = type(param) in PLAIN and torch.ops.xsoftmax.is_row_table(param)
                    keeps_rows = is_sparse or known or id(param) in _first_step.row_sparse_tables()
                    state = self._new_state(param, keeps_rows, text, fresh)
                params.append(_local(param))
                rows.append(None)  # the operator reads those of a sparse gradient
                values.append(_local(grad))
                tensors += self._tensors(state)
            counts.append(len(group_params))
        if params:
            self._call("_step_", params, rows, values, tensors, texts, counts, rates)
        by_terms = {param: fresh.pop(param) for param, *_ in lazy if param in fresh}
        self.state.update(fresh)
        for param, of_rows, left, text, rate in lazy:
            self._call("_terms_", param, of_rows, *left, text, rate)
            if param in by_terms:
                self.state[param] = by_terms[param]
        return loss

    def _new_state(self, param: Tensor, keeps_rows: bool, text: str, fresh: Dict[Tensor, Any]) -> Dict[str, Any]:
        made = self._call("_state", _local(param), keeps_rows, text)
        state = fresh[param] = {name: _spread(param, tensor) for name, tensor in zip(self._state_names, made)}
        return state

    @torch.no_grad()
    def flush(self) -> None:
        """Brings every row of every table up to date: applies the steps that rows without a gradient still owe (the catch-up of lazy updates).

        It touches all N rows. Reading a table through the library (``eval()``, ``topk``, ``state_dict()`` and the like) does the same. Call it before tables
        are read by other means. An optimizer that is deleted calls it (after the capture, where that is during one of a CUDA
        graph). Given the same gradients, training goes on as if it had not been called, up to rounding.
        """
        if _hooks.deferred:
            _hooks.run_deferred()
        self._flush_later()()

    def _flush_later(self) -> Callable[[], None]:
        """Returns what :meth:`flush` does, without a reference to the optimizer."""
        flush = getattr(torch.ops.xsoftmax, self._op + "_flush_")
        states = [(_local(param), self._tensors(state))
                  for param, state in self.state.items() if state]

        def flush_states() -> None:
            with torch.no_grad():
                for param, tensors in states:
                    flush(param, tensors)

        return flush_states

    def __del__(self) -> None:
        # Pending updates would be lost with the state: a function that trains and returns the model keeps nothing else.
        if not sys.is_finalizing() and hasattr(self, "state"):
            with contextlib.suppress(Exception):  # of a table that has moved elsewhere
                if _hooks.is_capturing():  # the collector of cycles chose this moment
                    _hooks.defer(self._flush_later())
                else:
                    self.flush()

    def state_dict(self) -> Dict[str, Any]:
        """As torch.optim's, after :meth:`flush`. State of a table that is split over ranks (:mod:`xsoftmax.distributed`) is that of the whole table:
        DTensors where it has a row for each class, and as one process would have it else."""
        self.flush()
        return whole_state(self, super().state_dict())

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """As torch.optim's, except that state keeps the dtype it was saved in: counters stay integers, and the float32 state of
        16-bit parameters stays float32; it moves to the parameter's device. Checkpoints of
        torch.optim's optimizer with the same steps (AdamW, Adagrad, SGD) load as dense state; those
        with an option that would change the steps, or of another optimizer, are refused. Of a table
        that is split over ranks: DTensors of any placement, whole tables, or this rank's rows.

        Raises:
            ValueError: state of a parameter of another shape, such as one from before a resize_classes, or of another kind of optimizer; an option that
                the optimizer does not know; a step that is negative or not finite, squares that are negative or NaN, moments that are not finite. Nothing is
                loaded then
            TypeError: state of rows of another dtype, moments of integers, an option of another type; nothing is loaded then
        """
        state_dict = state_of_rank(self, _with_numbers(state_dict))
        self._check_state(state_dict)
        before = self.state, self.param_groups
        replaced = [self._tensors(state) for state in self.state.values() if state]
        hide = self.register_load_state_dict_pre_hook(_hide_tensors)
        reveal = self.register_load_state_dict_post_hook(RowOptimizer._reveal_tensors, prepend=True)  # type: ignore[arg-type]
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups = before
            raise
        finally:
            hide.remove()
            reveal.remove()
        for tensors in replaced:
            torch.ops.xsoftmax.forget_debt(tensors)

    def _check_state(self, state_dict: Dict[str, Any]) -> None:
        """Whether it can be loaded: for all parameters, before anything is written to the file of the first."""
        notes = {name for group in self.param_groups for name in group}
        for group in state_dict["param_groups"]:
            _torch_options.check_loaded_group(self, group, self._counterpart, notes)
            _values.check_tensor_rate(self._name, group["lr"])
            self._call("_state", torch.empty(0, device="meta"), False, self._new_text({**self._later_options, **group}))  # checks the options
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [(number, group) for group in state_dict["param_groups"] for number in group["params"]]
        for (number, group), param in zip(numbers, params) if len(numbers) == len(params) else ():  # else torch.optim says so
            state = state_dict["state"].get(number)
            for name, value in state.items() if isinstance(state, dict) else ():
                # `step` is a number, `owed` has room for steps, and an absent tensor is of size 0.
                may_have_rows = name in self._state_names and name not in ("step", "owed")
                has_rows = may_have_rows and isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0
                if has_rows and value.shape not in (param.shape, param.shape[:1]):
                    raise ValueError(f"{self._name}: expected {name} of parameter {number} with the shape {list(param.shape)} of the parameter or a number for "
                                     f"each of its rows, got {list(value.shape)}: a table loads the state of as many rows as it has (resize_classes)")
            if isinstance(state, dict):
                _torch_options.check_loaded_state(self, number, state)
                _values.check_state_values(self._name, number, {name: _local(value) for name, value in state.items()})
            if isinstance(state, dict) and _is_of_rows(state):
                self._check_rows(number, _local(param), group, {name: _local(value) for name, value in state.items()})

    def _check_rows(self, number: int, param: Tensor, group: Dict[str, Any], state: Dict[str, Any]) -> None:
        """State of rows: what the next step would refuse, and what does not fit into the file beside a table (:mod:`xsoftmax.tables`)."""
        like = torch.empty_like(param, device="meta")
        made = dict(zip(self._state_names, self._call("_state", like, True, self._new_text({**self._later_options, **group}))))
        given = {name: made[name] if state.get(name) is None else state[name] for name in self._state_names}
        for name, tensor in made.items() if torch.ops.xsoftmax.mapped_table_path(param) else ():
            if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype or (state.get(name) is None and tensor.numel()):
                got = "none" if state.get(name) is None else f"shape {list(given[name].shape)} and dtype {given[name].dtype}"
                raise ValueError(f"{self._name}: expected {name} of parameter {number} with the shape {list(tensor.shape)} and dtype {tensor.dtype} for a "
                                 f"table in a file, got {got}")
        self._call("_flush_", like, [given[name].to("meta") for name in self._state_names])  # on meta tensors it checks, and does nothing

    def _reveal_tensors(self) -> None:
        groups = {param: group for group in self.param_groups for param in group["params"]}
        in_files = []
        for param, state in self.state.items():
            hidden = {name: value.tensor for name, value in state.items() if isinstance(value, _Hidden)}
            if _is_of_rows(hidden) and torch.ops.xsoftmax.mapped_table_path(_local(param)):
                state.update(zip(self._state_names, self._call("_state", _local(param), True, self._text(groups[param]))))
                in_files.append((_local(param), state, hidden))
            else:
                state.update({name: tensor.to(param.device, copy=True) for name, tensor in hidden.items()})
            if state and any(state.get(name) is None for name in self._state_names[:2]):  # torch.optim.SGD counts no steps
                made = self._call("_state", _local(param), False, self._text(groups[param]))
                complete = {name: _spread(param, tensor) for name, tensor in zip(self._state_names, made)}
                complete["step"].fill_(1)
                state.update({name: tensor for name, tensor in complete.items() if state.get(name) is None})
        self._register_debts()
        for param, state, loaded in in_files:  # last, as it cannot be taken back
            torch.ops.xsoftmax.mapped_table_changes(param)
            with torch.no_grad():
                for name in self._state_names:
                    if name in loaded:
                        state[name].copy_(loaded[name])

    def _register_debts(self) -> None:
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for param, state in self.state.items():
            if tensors := self._tensors(state):
                torch.ops.xsoftmax.register_row_state(_local(param), tensors, groups[param].get("initial_accumulator_value", 0.0))
            if "owed" in state:
                torch.ops.xsoftmax.register_debt(param, self._tensors(state), self._op)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        for group in state["param_groups"]:
            for name, value in self._later_options.items():
                group.setdefault(name, value)
        super().__setstate__(state)
        self.__dict__.setdefault("_lazy_gradient", False)
        if not any(isinstance(value, _Hidden) for tensors in self.state.values() for value in tensors.values()):
            self._register_debts()  # of a copy
