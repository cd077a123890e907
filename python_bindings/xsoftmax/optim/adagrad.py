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

    A table is a parameter that has a row-sparse gradient at its first step, or belongs to a loss
    that may produce one (``sparse_grad`` other than False). If such a loss produces a dense
    gradient in some step, every row counts as having a gradient, and the equations above hold.
    Other parameters are updated as by ``torch.optim.Adagrad``.

    Args:
        params: an iterable of parameters, or of dicts that define parameter groups.
        lr: learning rate: a finite number of at least 0, or a floating tensor of one element, on
            the CPU or on the parameters' device. A tensor on the device is neither read on the host
            nor checked in a step, and a captured step follows its value. Schedulers of torch.optim
            write to it in place.
        lr_decay: decay of lr over the steps of a parameter.
        weight_decay: weight_decay * param is added to the gradient, as in ``torch.optim.Adagrad``;
            at least 0.
        initial_accumulator_value: initial value of ``sum``, at least 0.
        eps: added to the root.
        maximize: maximize the objective instead of minimizing it.
        row_wise: keep one accumulator per row, of the mean of squares: memory [N] instead of [N,
            D], in float32. Read at a table's first gradient. Other parameters ignore it.
        stochastic_rounding: round updates of rows of 16-bit tables up or down at random, without
            bias, so that updates too small for a 16-bit number still move it on average. The random
            numbers depend only on step, row and element. Other parameters round to nearest.
        state_dtype: dtype of ``sum`` [N, D]: ``torch.bfloat16`` or ``torch.float32``. None:
            float32, or float64 for float64 tables. A bfloat16 ``sum`` always uses stochastic
            rounding: rounded to nearest, it would stop growing at 256 times the increment of a
            step. Read at a table's first gradient. Other parameters ignore it.
        lazy_gradient: on a GPU, let losses with private candidates leave the gradient of a table as
            terms, which the step reads, instead of rows. ``docs/howto/gpu.md`` says when this pays
            and what it requires. Copies of the optimizer do not use it.
        torch_options: options of ``torch.optim.Adagrad`` that select among its implementations,
            ``foreach``, ``fused`` and ``capturable``, are accepted and ignored: one operator takes
            the step on every device, and the step counter is on the parameters' device.
            ``differentiable=True`` is refused.

    Shape: tables [N, D] or [N], with row-sparse gradients (sparse COO in dimension 0, of R rows) or
    dense ones; other parameters of any shape, with dense gradients.

    State of a table: ``step``, and ``sum`` [N, D], or [N] with row_wise.

    Raises:
        ValueError: an option is out of range, or is an option of torch.optim that would change the
            steps; a parameter is passed twice; a gradient does not fit its parameter.
        TypeError: an option has another type, such as lr as text; a module is passed instead of
            parameters; a keyword is unknown; a parameter is not float32, float64, bfloat16 or
            float16.
        IndexError: a row of a gradient is not in [0, N).
        RuntimeError: a sparse gradient is not sparse COO in dimension 0 only, or its parameter has
            more than 2 dimensions.
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
