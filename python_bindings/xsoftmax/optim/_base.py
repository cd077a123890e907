"""What the row-wise optimizers share: the rows of a gradient, two kinds of state, and checkpoints that resume bit for bit."""

import math
from itertools import groupby

import torch

from .._memory import table_empty

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def sparse_rows(who, param, grad):
    """(rows [R], values [R, ...]) of a sparse COO gradient, uncoalesced or not."""
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        layout = f"{grad.sparse_dim()} sparse dimensions" if grad.layout == torch.sparse_coo else f"layout {grad.layout}"
        raise RuntimeError(f"{who}: expected a gradient that is dense, or sparse COO in dimension 0 alone, got {layout}")
    if param.dim() > 2:
        raise RuntimeError(f"{who}: expected a parameter with 1 or 2 dimensions for a sparse gradient, got shape "
                           f"{tuple(param.shape)}")
    return grad._indices()[0], grad._values()


class _Held:
    """Hides a tensor from torch.optim's cast of loaded state to the parameter's dtype."""

    def __init__(self, tensor):
        self.tensor = tensor


def _hide_tensors(optimizer, state_dict):
    hidden = {key: {name: _Held(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
              if isinstance(state, dict) else state for key, state in state_dict["state"].items()}
    return {**state_dict, "state": hidden}


def _reveal_tensors(optimizer):
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, _Held):
                state[name] = value.tensor.to(param.device)


class RowOptimizer(torch.optim.Optimizer):
    """Base of RowSGD, RowAdagrad and RowAdam. A subclass gives `_check(options)`, `_step_rows`, `_step_dense` and `_flush_rows`.

    The first gradient of a parameter decides what state it keeps, for rows or for dense gradients: state["rows"] says which. State
    without that key, from a checkpoint of torch.optim's optimizer of the same name, is dense.
    """

    def __init__(self, params, defaults):
        self._check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            for param in group["params"]:
                if param.dtype not in _DTYPES:
                    raise TypeError(f"{self._name}: expected parameters of dtype float32, float64, bfloat16 or float16, got "
                                    f"{param.dtype}")
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def _name(self):
        return type(self).__name__

    def _check(self, options):
        if isinstance(options["lr"], torch.Tensor):
            raise TypeError(f"{self._name}: expected lr as a number, got a tensor (learning-rate schedulers set numbers)")
        if not 0 <= options["lr"] < math.inf:
            raise ValueError(f"{self._name}: expected lr as a finite number of at least 0, got {options['lr']}")
        if not options["weight_decay"] >= 0:
            raise ValueError(f"{self._name}: expected weight_decay of at least 0, got {options['weight_decay']}")

    def _opmath(self, param):
        return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype

    def _row_state(self, param, shape, dtype=None, fill=0):
        """A tensor of state beside the table; dtype None: the one that sums are held in."""
        return table_empty(*shape, dtype=dtype or self._opmath(param), device=param.device).fill_(fill)

    def _add_decay(self, group, param, state):
        """Adds this step to the decay that rows owe; returns (decay, last_decay) for the row ops."""
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        if weight_decay != 0:
            if not lr * weight_decay < 1:
                raise ValueError(f"{self._name}: expected lr * weight_decay below 1, got {lr} * {weight_decay}")
            if "last_decay" not in state:
                state["decay"] = 0.0
                state["last_decay"] = self._row_state(param, param.shape[:1], torch.float64)
            # log1p in float64, as the marks are: the sum stays exact to many millions of steps.
            state["decay"] += torch.log1p(torch.tensor(-lr * weight_decay, dtype=torch.float64)).item()
        return state.get("decay", 0.0), state.get("last_decay")

    @torch.no_grad()
    def step(self, closure=None):
        """One step for all parameters that have a gradient. `closure`: as in torch.optim; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            dense = []
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(group, param, dense)
            by_kernel = sorted(dense, key=lambda item: not self._can_fuse(*item))
            for fused, items in groupby(by_kernel, key=lambda item: self._can_fuse(*item)):
                params, grads = zip(*items)
                self._step_dense(group, list(params), list(grads), fused or None)
        return loss

    def _step_param(self, group, param, dense):
        state, grad = self.state[param], param.grad
        is_sparse = grad.layout != torch.strided
        if is_sparse:
            rows, values = sparse_rows(self._name, param, grad)
        state.setdefault("rows", is_sparse and not state)
        if not state["rows"]:
            dense.append((param, grad.to_dense() if is_sparse else grad))
            return
        if not is_sparse:
            rows, values = torch.arange(param.shape[0], device=param.device), grad
        self._step_rows(group, param, state, rows, values)

    @staticmethod
    def _can_fuse(param, grad):
        # In torch 2.13 the fused CPU kernel of SGD is wrong for 16-bit parameters of 16 elements and more.
        if param.device.type == "cpu" and param.dtype in (torch.bfloat16, torch.float16):
            return False
        # Fused kernels walk the memory of their tensors.
        return param.device.type in ("cpu", "cuda") and param.is_contiguous() and grad.is_contiguous()

    @torch.no_grad()
    def flush(self):
        """Brings every row of every table up to date: applies what rows without a gradient still owe.

        Touches all N rows, so it is for the places where the whole table is read: before evaluating, and before saving weights.
        Training goes on as if it had not been called, up to rounding. Where nothing is owed (RowAdagrad; RowSGD without momentum and
        weight decay) it does nothing.
        """
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param)
                if state and state.get("rows"):
                    self._flush_rows(group, param, state)

    def _flush_rows(self, group, param, state):
        if "last_decay" in state:
            torch.ops.xsoftmax.row_decay_(param, state["last_decay"], state["decay"])

    def load_state_dict(self, state_dict):
        """As torch.optim's, except that state keeps the dtype it was saved in: counters stay integers, and the float32 state of
        16-bit parameters stays float32."""
        hide = self.register_load_state_dict_pre_hook(_hide_tensors)
        reveal = self.register_load_state_dict_post_hook(_reveal_tensors, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            hide.remove()
            reveal.remove()


def dense_steps(optimizer, params, *names, fill=0.0):
    """torch.optim's state for dense gradients: lists of the step counts and of each name's tensors."""
    for param in params:
        state = optimizer.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in names:
                state[name] = torch.full_like(param, fill, memory_format=torch.preserve_format)
    return [[optimizer.state[param][name] for param in params] for name in ("step", *names)]
