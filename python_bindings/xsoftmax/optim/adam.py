from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._base import RowOptimizer
from ._values import two_betas

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._torch_options import TorchOptions


class RowAdam(RowOptimizer):
    r"""Adam with decoupled weight decay (AdamW) whose step costs the rows that have a gradient, not all N rows of the table.

    In dense terms, for a parameter [N, D] with row-sparse gradients, at step t::

        param      = param * (1 - lr * weight_decay)
        exp_avg    = beta1 * exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad ** 2
        param      = param - lr / (1 - beta1 ** t) * exp_avg / ((exp_avg_sq / (1 - beta2 ** t)).sqrt() + eps)

    Rows without a gradient go on moving by their moments, and decaying. The optimizer updates them lazily: a row *owes* the steps in which it had no gradient,
    each at its own lr and weight decay, and catches up when it next has a gradient, by :meth:`flush`, and where the library reads the table. Every row is then
    where dense ``torch.optim.AdamW`` would have it, under any schedule, provided that gradients did not depend on rows that owed steps. The one difference is
    eps. Dense Adam adds it to a root that shrinks from step to step, so a movement that was owed is larger than the dense one, by the factor ``1 + eps / root``
    at most, root being ``(exp_avg_sq / (1 - beta2 ** t)).sqrt()`` in that step. Where betas or eps of a group change, all rows catch up first.

    ``torch.optim.SparseAdam`` differs: it leaves the moments of other rows alone. A rare row's second moment then never fades, and the row learns more slowly
    than under dense Adam, by up to the root of the share of steps in which it has a gradient.

    With row_wise (partial row-wise Adam) a row has one second moment, and all of the above holds with::

        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * (grad ** 2).mean(1)       # [N]
        param      = param - lr / (1 - beta1 ** t) * exp_avg / ((exp_avg_sq / (1 - beta2 ** t)).sqrt() + eps)[:, None]

    A table is a parameter that has a row-sparse gradient at its first step, or belongs to a loss that may give it one (``sparse_grad`` other than False). In a
    step in which such a loss gives it a dense gradient instead, every row counts as having a gradient, and the equations above hold. Other parameters are
    updated as by ``torch.optim.AdamW``.

    Args:
        params: parameters, or dicts of parameter groups
        lr: learning rate, a finite number of at least 0, or a floating tensor of one element that holds it: on the CPU, or on the
            parameters' device, where a step neither reads it on the host nor checks its value, and a captured step follows it.
            Schedulers of torch.optim write to it in place
        betas: decay of the two moments a step, numbers in [0, 1); betas[0] ** 2 < betas[1]
        eps: added to the root, at least 0
        weight_decay: decoupled, at least 0; 0 by default, as in ``torch.optim.Adam``. lr * weight_decay must be below 1 for row-sparse gradients
        maximize: ascend: the gradient counts with the other sign
        row_wise: one second moment a row, of the mean of squares: memory [N] instead of [N, D], in float32. Read at a table's first gradient; other parameters
            ignore it
        stochastic_rounding: updates of rows of 16-bit tables, and what :meth:`flush` applies, round up or down at random, without bias, so that updates too
            small for a 16-bit number still move it on average. The random numbers follow from step, row and element alone. Other parameters
            round to nearest
        state_dtype: dtype of the moments [N, D]: ``torch.bfloat16`` or ``torch.float32``. None: float32, and float64 for float64 tables. In bfloat16 moments
            are always kept with stochastic rounding: to nearest, a second moment of beta2 = 0.999 would not see a gradient that changes it by less than a
            256th. Read at a table's first gradient; other parameters ignore it
        lazy_gradient: on a GPU, losses with private candidates leave the gradient of a table as
            terms, which the step reads, instead of rows: ``docs/howto/gpu.md`` says when this pays,
            and what it asks for. Copies of the optimizer go without
        torch_options: options of ``torch.optim.AdamW`` that choose among its implementations:
            ``foreach``, ``fused``, ``capturable``. They are accepted and ignored, since one
            operator takes the step on every device, and the count of steps is on the parameters' device. ``amsgrad=True``, ``differentiable=True`` and
            a weight decay with ``decoupled_weight_decay=False`` are refused

    Shape: tables [N, D] or [N], with row-sparse gradients (sparse COO in dimension 0, of R rows) or dense ones; other parameters of any shape,
    with dense gradients.

    State of a table: ``step``, ``exp_avg`` [N, D], ``exp_avg_sq`` [N, D], or [N] with row_wise, ``last_step`` int32 [N], and
    ``owed``, the steps that rows may owe (csrc/optim/owed_steps.h).

    Raises:
        ValueError: an option out of range, or of torch.optim that would change the steps; a parameter that is given twice; a gradient that does not fit its
            parameter.
        TypeError: an option of another type, such as betas as tensors or lr as text; a module in the place of parameters;
            another keyword; a parameter that is not float32,
            float64, bfloat16 or float16.
        IndexError: a row of a gradient is not in [0, N).
        RuntimeError: a sparse gradient that is not sparse COO in dimension 0 alone, or one of a parameter with more than 2 dimensions.
    """

    _op, _state_names = "row_adam", ("step", "exp_avg", "exp_avg_sq", "last_step", "owed")
    _dense_names, _counterpart = ("step", "exp_avg", "exp_avg_sq"), "AdamW"
    _later_options = dict(RowOptimizer._later_options, row_wise=False, maximize=False)
    _option_names = ("lr", "betas", "eps", "weight_decay", "maximize", "row_wise", "stochastic_rounding", "state_dtype")

    def __init__(self, params: ParamsT, lr: Union[float, Tensor] = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
                 maximize: bool = False, row_wise: bool = False, stochastic_rounding: bool = False, state_dtype: Optional[torch.dtype] = None,
                 lazy_gradient: bool = False,
                 **torch_options: "Unpack[TorchOptions]") -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, row_wise=row_wise,
                                      stochastic_rounding=stochastic_rounding, state_dtype=state_dtype), dict(torch_options), lazy_gradient)

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        options = super()._options(group)
        betas = two_betas(self._name, options.pop("betas"))
        return dict(options, beta1=betas[0], beta2=betas[1])
