from typing import TYPE_CHECKING, Optional, Union

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .row_optimizer import RowOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .torch_options import TorchOptions


class RowAdagrad(RowOptimizer):
    r"""Adagrad whose step costs the rows that have a gradient, not all N rows of the table.

    At step t of a parameter, the rows with a gradient are updated as by ``torch.optim.Adagrad``::

        grad  = grad + weight_decay * param
        sum   = sum + grad ** 2                  # row_wise: sum + (grad ** 2).mean(), one per row
        param = param - lr / (1 + (t - 1) * lr_decay) * grad / (sum.sqrt() + eps)

    Without weight decay, Adagrad leaves rows without a gradient unchanged, so this equals the dense
    optimizer. With weight decay, a row decays only in steps in which it has a gradient. No update
    is lazy: rows never have pending updates, and :meth:`flush` does nothing.

    Tables are the same parameters as for :class:`RowAdam`. Others are updated as by
    ``torch.optim.Adagrad``.

    Args:
        params, lr, maximize, stochastic_rounding, lazy_gradient: as in :class:`RowAdam`.
        lr_decay: decay of lr over the steps of a parameter.
        weight_decay: weight_decay * param is added to the gradient, as in ``torch.optim.Adagrad``;
            at least 0.
        initial_accumulator_value: initial value of ``sum``, at least 0.
        eps: added to the root.
        row_wise: keep one accumulator per row, of the mean of squares: memory [N] instead of [N,
            D], in float32. Read at a table's first gradient. Other parameters ignore it.
        state_dtype: dtype of ``sum`` [N, D]: ``torch.bfloat16`` or ``torch.float32``. None:
            float32, or float64 for float64 tables. A bfloat16 ``sum`` always uses stochastic
            rounding: rounded to nearest, it would stop growing at 256 times the increment of a
            step. Read at a table's first gradient. Other parameters ignore it.
        torch_options: as in :class:`RowAdam`; ``differentiable=True`` is refused.

    Shapes and errors as :class:`RowAdam`.

    State of a table: ``step``, and ``sum`` [N, D], or [N] with row_wise.
    """

    _op, _state_names = "row_adagrad", ("step", "sum")
    _dense_names, _counterpart = ("step", "sum"), "Adagrad"
    _later_options = dict(RowOptimizer._later_options, row_wise=False, maximize=False)
    _option_names = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps",
                     "maximize", "row_wise", "stochastic_rounding", "state_dtype")

    def __init__(self, params: ParamsT, lr: Union[float, Tensor] = 1e-2, lr_decay: float = 0.0,
                 weight_decay: float = 0.0, initial_accumulator_value: float = 0.0,
                 eps: float = 1e-10, *, maximize: bool = False, row_wise: bool = False,
                 stochastic_rounding: bool = False, state_dtype: Optional[torch.dtype] = None,
                 lazy_gradient: bool = False, **torch_options: "Unpack[TorchOptions]") -> None:
        super().__init__(
            params,
            dict(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay,
                 initial_accumulator_value=initial_accumulator_value, eps=eps, maximize=maximize,
                 row_wise=row_wise, stochastic_rounding=stochastic_rounding,
                 state_dtype=state_dtype), dict(torch_options), lazy_gradient)
