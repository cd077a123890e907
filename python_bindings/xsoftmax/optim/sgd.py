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

    A table is a parameter that has a row-sparse gradient at its first step, or belongs to a loss
    that may produce one (``sparse_grad`` other than False). If such a loss produces a dense
    gradient in some step, every row counts as having a gradient, and the equations above hold.
    Other parameters are updated as by ``torch.optim.SGD``, including its weight decay.

    Args:
        params: an iterable of parameters, or of dicts that define parameter groups.
        lr: learning rate: a finite number of at least 0, or a floating tensor of one element, on
            the CPU or on the parameters' device. A tensor on the device is neither read on the host
            nor checked in a step, and a captured step follows its value. Schedulers of torch.optim
            write to it in place.
        momentum: factor of the buffer [N, D], at least 0. 0: there is no buffer.
        dampening: reduces the share of the gradient in the buffer.
        weight_decay: decoupled weight decay, at least 0. For row-sparse gradients, lr *
            weight_decay must be below 1.
        nesterov: use Nesterov momentum; requires momentum and zero dampening.
        maximize: maximize the objective instead of minimizing it.
        stochastic_rounding: round updates of rows of 16-bit tables, and what :meth:`flush` applies,
            up or down at random, without bias, so that updates too small for a 16-bit number still
            move it on average. The random numbers depend only on step, row and element. Other
            parameters round to nearest.
        state_dtype: dtype of the momentum buffer: ``torch.bfloat16`` or ``torch.float32``. None:
            float32, or float64 for float64 tables. A bfloat16 buffer always uses stochastic
            rounding: rounded to nearest, it would lag behind the mean of the gradients. Read at a
            table's first gradient. Other parameters ignore it.
        lazy_gradient: on a GPU, let losses with private candidates leave the gradient of a table as
            terms, which the step reads, instead of rows. ``docs/howto/gpu.md`` says when this pays
            and what it requires. Copies of the optimizer do not use it.
        torch_options: options of ``torch.optim.SGD`` that select among its implementations,
            ``foreach``, ``fused`` and ``capturable``, are accepted and ignored: one operator takes
            the step on every device, and the step counter is on the parameters' device.
            ``differentiable=True`` is refused.

    Shape: tables [N, D] or [N], with row-sparse gradients (sparse COO in dimension 0, of R rows) or
    dense ones; other parameters of any shape, with dense gradients.

    State of a table: ``step``, ``momentum_buffer`` [N, D] (empty without momentum), ``last_step``
    int32 [N], and ``pending``, the steps that may be pending for rows
    (csrc/table/updates/pending_steps.h).

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
