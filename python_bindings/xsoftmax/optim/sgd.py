from typing import TYPE_CHECKING, Optional, Union

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._base import RowOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._torch_options import TorchOptions


class RowSGD(RowOptimizer):
    r"""Stochastic gradient descent whose step costs the rows that have a gradient, not all N rows of the table.

    In dense terms, for a parameter [N, D] with row-sparse gradients::

        param  = param * (1 - lr * weight_decay)
        buffer = momentum * buffer + (1 - dampening) * grad         # the first step of a parameter: buffer = grad
        param  = param - lr * (grad + momentum * buffer if nesterov else buffer)

    Rows without a gradient go on moving by their momentum, and decaying. The optimizer updates them lazily: a row *owes* the steps in which it had no gradient,
    each at its own lr and weight decay, and catches up when it next has a gradient, by :meth:`flush`, and where the library reads the table. Every row is then
    where dense ``torch.optim.SGD`` would have it to rounding, under any schedule, provided that gradients did not depend on rows that owed steps. Where
    momentum or nesterov of a group change, all rows catch up first.

    It differs from ``torch.optim.SGD`` in weight decay, which is decoupled: a factor on the parameter, outside the momentum buffer, not a term of the gradient.

    A table is a parameter that has a row-sparse gradient at its first step, or belongs to a loss that may give it one (``sparse_grad`` other than False). In a
    step in which such a loss gives it a dense gradient instead, every row counts as having a gradient, and the equations above hold. Other parameters are
    updated as by ``torch.optim.SGD``, its weight decay included.

    Args:
        params: parameters, or dicts of parameter groups
        lr: learning rate, a finite number of at least 0, or a floating tensor of one element that holds it: on the CPU, or on the
            parameters' device, where a step neither reads it on the host nor checks its value, and a captured step follows it.
            Schedulers of torch.optim write to it in place
        momentum: factor of the buffer [N, D], at least 0 (0: none is kept)
        dampening: damps the gradient's share in the buffer
        weight_decay: decoupled, at least 0; lr * weight_decay must be below 1 for row-sparse gradients
        nesterov: look ahead along the buffer; needs a momentum and no dampening
        maximize: ascend
        stochastic_rounding: updates of rows of 16-bit tables, and what :meth:`flush` applies, round up or down at random, without bias, so that updates too
            small for a 16-bit number still move it on average. The random numbers follow from step, row and element alone. Other parameters
            round to nearest
        state_dtype: dtype of the momentum buffer: ``torch.bfloat16`` or ``torch.float32``. None: float32, and float64 for float64 tables. In bfloat16 the
            buffer is always kept with stochastic rounding: to nearest, it would stay behind the mean of gradients. Read at a table's first gradient; other
            parameters ignore it
        lazy_gradient: on a GPU, losses with private candidates leave the gradient of a table as
            terms, which the step reads, instead of rows: ``docs/howto/gpu.md`` says when this pays,
            and what it asks for. Copies of the optimizer go without
        torch_options: options of ``torch.optim.SGD`` that choose among its implementations:
            ``foreach``, ``fused``, ``capturable``. They are accepted and ignored, since one
            operator takes the step on every device, and the count of steps is on the parameters' device. ``differentiable=True`` is refused

    Shape: tables [N, D] or [N], with row-sparse gradients (sparse COO in dimension 0, of R rows) or dense ones; other parameters of any shape,
    with dense gradients.

    State of a table: ``step``, ``momentum_buffer`` [N, D] (empty without momentum), ``last_step`` int32 [N],
    and ``owed``, the steps that rows may owe (csrc/optim/owed_steps.h).

    Raises:
        ValueError: an option out of range, or of torch.optim that would change the steps; a parameter that is given twice; a gradient that does not fit its
            parameter.
        TypeError: an option of another type, such as lr as text; a module in the place of parameters;
            another keyword; a parameter that is not float32,
            float64, bfloat16 or float16.
        IndexError: a row of a gradient is not in [0, N).
        RuntimeError: a sparse gradient that is not sparse COO in dimension 0 alone, or one of a parameter with more than 2 dimensions.
    """

    _op, _state_names = "row_sgd", ("step", "momentum_buffer", "last_step", "owed")
    _dense_names, _counterpart = (), "SGD"
    _option_names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "stochastic_rounding", "state_dtype")

    def __init__(self, params: ParamsT, lr: Union[float, Tensor] = 1e-3,
                 momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *,
                 maximize: bool = False, stochastic_rounding: bool = False, state_dtype: Optional[torch.dtype] = None,
                 lazy_gradient: bool = False,
                 **torch_options: "Unpack[TorchOptions]") -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
                                      maximize=maximize, stochastic_rounding=stochastic_rounding, state_dtype=state_dtype), dict(torch_options), lazy_gradient)
