from typing import TYPE_CHECKING, Optional, Union

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .row_optimizer import RowOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .torch_options import TorchOptions


class RowSGD(RowOptimizer):
    r"""Stochastic gradient descent whose step costs the rows that have a gradient, not all N rows
    of the table.

    In dense terms, for a parameter [N, D] with row-sparse gradients::

        param  = param * (1 - lr * weight_decay)
        buffer = momentum * buffer + (1 - dampening) * grad      # buffer = grad in the first step
        param  = param - lr * (grad + momentum * buffer if nesterov else buffer)

    Rows without a gradient keep moving by their momentum, and keep decaying. These updates are
    applied lazily: a row's steps without a gradient are *pending*, each with its own lr and weight
    decay, until the row next has a gradient, :meth:`flush` is called, or the library reads the
    table. Every row then has the value that dense ``torch.optim.SGD`` would give it, up to
    rounding, under any schedule, provided that no gradient depended on a row with pending updates.
    If momentum or nesterov of a group change, all rows catch up first.

    It differs from ``torch.optim.SGD`` in weight decay, which is decoupled: a factor on the
    parameter, outside of the momentum buffer, instead of a term of the gradient.

    Tables are the same parameters as for :class:`RowAdam`. Others are updated as by
    ``torch.optim.SGD``, including its weight decay.

    Args:
        params, lr, maximize, stochastic_rounding, lazy_gradient: as in :class:`RowAdam`.
        momentum: factor of the buffer [N, D], at least 0. 0: there is no buffer.
        dampening: reduces the share of the gradient in the buffer.
        weight_decay: decoupled weight decay, at least 0. For row-sparse gradients, lr *
            weight_decay must be below 1.
        nesterov: use Nesterov momentum; requires momentum and zero dampening.
        state_dtype: dtype of the momentum buffer: ``torch.bfloat16`` or ``torch.float32``. None:
            float32, or float64 for float64 tables. A bfloat16 buffer always uses stochastic
            rounding: rounded to nearest, it would lag behind the mean of the gradients. Read at a
            table's first gradient. Other parameters ignore it.
        torch_options: as in :class:`RowAdam`; ``differentiable=True`` is refused.

    Shapes and errors as :class:`RowAdam`.

    State of a table: ``step``, ``momentum_buffer`` [N, D] (empty without momentum), ``last_step``
    int32 [N], and ``pending``, the steps that may be pending for rows
    (csrc/table/updates/pending_steps.h).
    """

    _op, _state_names = "row_sgd", ("step", "momentum_buffer", "last_step", "pending")
    _dense_names, _counterpart = (), "SGD"
    _option_names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize",
                     "stochastic_rounding", "state_dtype")

    def __init__(self, params: ParamsT, lr: Union[float, Tensor] = 1e-3, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *,
                 maximize: bool = False, stochastic_rounding: bool = False,
                 state_dtype: Optional[torch.dtype] = None, lazy_gradient: bool = False,
                 **torch_options: "Unpack[TorchOptions]") -> None:
        super().__init__(
            params,
            dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                 nesterov=nesterov, maximize=maximize, stochastic_rounding=stochastic_rounding,
                 state_dtype=state_dtype), dict(torch_options), lazy_gradient)
