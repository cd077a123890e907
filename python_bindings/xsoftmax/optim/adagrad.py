from typing import TYPE_CHECKING, Optional, Union

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._base import RowOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._torch_options import TorchOptions


class RowAdagrad(RowOptimizer):
    r"""Adagrad whose step costs the rows that have a gradient, not all N rows of the table.

    For the rows with a gradient, at step t of the parameter, as ``torch.optim.Adagrad``::

        grad  = grad + weight_decay * param
        sum   = sum + grad ** 2                           # row_wise: one number a row, sum + (grad ** 2).mean()
        param = param - lr / (1 + (t - 1) * lr_decay) * grad / (sum.sqrt() + eps)

    Without weight decay, a row without a gradient stays where it is under Adagrad, so this equals the dense optimizer. With it, the decay acts only in the
    steps in which a row has a gradient. No update is lazy: no row has pending updates, and :meth:`flush` does nothing.

    A table is a parameter that has a row-sparse gradient at its first step, or belongs to a loss that may give it one (``sparse_grad`` other than False). In a
    step in which such a loss gives it a dense gradient instead, every row counts as having a gradient, and the equations above hold. Other parameters are
    updated as by ``torch.optim.Adagrad``.

    Args:
        params: parameters, or dicts of parameter groups
        lr: learning rate, a finite number of at least 0, or a floating tensor of one element that holds it: on the CPU, or on the
            parameters' device, where a step neither reads it on the host nor checks its value, and a captured step follows it.
            Schedulers of torch.optim write to it in place
        lr_decay: decay of lr over the steps of a parameter
        weight_decay: weight_decay * param is added to the gradient, as in ``torch.optim.Adagrad``; at least 0
        initial_accumulator_value: what ``sum`` starts from, at least 0
        eps: added to the root
        maximize: ascend: the gradient counts with the other sign
        row_wise: one accumulator a row, the mean of squares: memory [N] instead of [N, D], in float32. Read at a table's first gradient; other parameters
            ignore it
        stochastic_rounding: updates of rows of 16-bit tables round up or down at random, without bias, so that updates too small for a 16-bit number still move
            it on average. The random numbers follow from step, row and element alone. Other parameters round to nearest
        state_dtype: dtype of ``sum`` [N, D]: ``torch.bfloat16`` or ``torch.float32``. None: float32, and float64 for float64 tables. In bfloat16 ``sum`` is
            always kept with stochastic rounding: to nearest, it would stop growing at 256 times what a step adds. Read at a table's first gradient; other
            parameters ignore it
        lazy_gradient: on a GPU, losses with private candidates leave the gradient of a table as
            terms, which the step reads, instead of rows: ``docs/howto/gpu.md`` says when this pays,
            and what it asks for. Copies of the optimizer go without
        torch_options: options of ``torch.optim.Adagrad`` that choose among its implementations:
            ``foreach``, ``fused``, ``capturable``. They are accepted and ignored, since one
            operator takes the step on every device, and the count of steps is on the parameters' device. ``differentiable=True`` is refused

    Shape: tables [N, D] or [N], with row-sparse gradients (sparse COO in dimension 0, of R rows) or dense ones; other parameters of any shape,
    with dense gradients.

    State of a table: ``step``, and ``sum`` [N, D], or [N] with row_wise.

    Raises:
        ValueError: an option out of range, or of torch.optim that would change the steps; a parameter that is given twice; a gradient that does not fit its
            parameter.
        TypeError: an option of another type, such as lr as text; a module in the place of parameters;
            another keyword; a parameter that is not float32,
            float64, bfloat16 or float16.
        IndexError: a row of a gradient is not in [0, N).
        RuntimeError: a sparse gradient that is not sparse COO in dimension 0 alone, or one of a parameter with more than 2 dimensions.
    """

    _op, _state_names = "row_adagrad", ("step", "sum")
    _dense_names, _counterpart = ("step", "sum"), "Adagrad"
    _later_options = dict(RowOptimizer._later_options, row_wise=False, maximize=False)
    _option_names = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize", "row_wise", "stochastic_rounding", "state_dtype")

    def __init__(self, params: ParamsT, lr: Union[float, Tensor] = 1e-2, lr_decay: float = 0.0,
                 weight_decay: float = 0.0, initial_accumulator_value: float = 0.0,
                 eps: float = 1e-10, *, maximize: bool = False, row_wise: bool = False, stochastic_rounding: bool = False,
                 state_dtype: Optional[torch.dtype] = None,
                 lazy_gradient: bool = False, **torch_options: "Unpack[TorchOptions]") -> None:
        super().__init__(params, dict(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay,
                                      initial_accumulator_value=initial_accumulator_value, eps=eps, maximize=maximize, row_wise=row_wise,
                                      stochastic_rounding=stochastic_rounding, state_dtype=state_dtype), dict(torch_options), lazy_gradient)
