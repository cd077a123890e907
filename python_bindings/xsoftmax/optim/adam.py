from typing import Any, Dict, Optional, Tuple

import torch
from torch.optim.optimizer import ParamsT

from ._base import RowOptimizer


class RowAdam(RowOptimizer):
    r"""Adam with decoupled weight decay whose step costs the rows that have a gradient, not all rows of the table.

    In dense terms, for a parameter with row-sparse gradients, at step t::

        param      = param * (1 - lr * weight_decay)
        exp_avg    = beta1 * exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad ** 2
        param      = param - lr / (1 - beta1 ** t) * exp_avg / ((exp_avg_sq / (1 - beta2 ** t)).sqrt() + eps)

    Rows without a gradient go on moving by what their moments remember, and decaying. Each such step is owed at its own lr and weight decay,
    and applied when the row next has a gradient, by :meth:`flush`, and where the library reads the table. Every row is then where dense
    ``torch.optim.AdamW`` would have it, under any schedule, provided that gradients did not depend on rows that owed steps. The one
    difference is eps: dense Adam adds it to a root that shrinks from step to step, so a movement that was owed is larger than the dense one,
    by the factor ``1 + eps / root`` at most, root being ``(exp_avg_sq / (1 - beta2 ** t)).sqrt()`` in that step. Where betas or eps of
    a group change, all rows are made up first.

    ``torch.optim.SparseAdam`` differs: it leaves the moments of other rows alone. A rare row's second moment then never fades, and it
    learns more slowly than under dense Adam, by up to the root of the share of steps in which it has a gradient.

    With row_wise (partial row-wise Adam) a row has one second moment, and all of the above holds with::

        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * (grad ** 2).mean(1)       # [N]
        param      = param - lr / (1 - beta1 ** t) * exp_avg / ((exp_avg_sq / (1 - beta2 ** t)).sqrt() + eps)[:, None]

    Parameters with dense gradients are updated as by ``torch.optim.AdamW``.

    Args:
        params: parameters, or dicts of parameter groups
        lr: learning rate, a number
        betas: decay of the two moments a step, numbers in [0, 1); betas[0] ** 2 < betas[1]
        eps: added to the root
        weight_decay: decoupled; 0 by default, as in ``torch.optim.Adam``. lr * weight_decay must be below 1 for row-sparse gradients
        row_wise: one second moment a row, of the mean of squares: [N] instead of [N, D] memory, in float32. Read at a parameter's first gradient;
            parameters with dense gradients ignore it
        stochastic_rounding: steps of rows of 16-bit tables, and what :meth:`flush` makes up, round up or down by chance, right on average, so that
            steps too small for a 16-bit number move it all the same; the chances follow from step, row and element alone.
            Parameters with dense gradients round to nearest
        state_dtype: of state with an element for each of the table's: ``torch.bfloat16`` or ``torch.float32``; None: as float32, and float64 for float64
            tables. In bfloat16 moments are kept always with stochastic rounding: to nearest, a second moment of beta2 = 0.999 would not
            see a gradient that changes it by less than a 256th. Read at a parameter's first gradient; parameters with dense gradients
            ignore it

    State of a table: ``step``, ``exp_avg`` [N, D], ``exp_avg_sq`` [N, D], or [N] with row_wise, ``last_step`` int32 [N], and
    ``owed``, the steps that rows may owe (csrc/optim/owed_steps.h).

    Raises:
        ValueError: an option out of range, or a gradient that does not fit its parameter
        TypeError: lr or betas are tensors, or a parameter's dtype is not float32, float64, bfloat16 or float16
        IndexError: a row of a gradient is not in the table
        RuntimeError: a gradient that is sparse in another way than in its rows
    """

    _op, _state_names = "row_adam", ("step", "exp_avg", "exp_avg_sq", "last_step", "owed")
    _later_options = dict(RowOptimizer._later_options, row_wise=False)
    _option_names = ("lr", "betas", "eps", "weight_decay", "row_wise", "stochastic_rounding", "state_dtype")

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
                 row_wise: bool = False, stochastic_rounding: bool = False, state_dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, row_wise=row_wise,
                                      stochastic_rounding=stochastic_rounding, state_dtype=state_dtype))

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        options = super()._options(group)
        betas = options.pop("betas")
        if len(betas) != 2:
            raise ValueError(f"RowAdam: expected betas as two numbers, got {betas}")
        return dict(options, beta1=betas[0], beta2=betas[1])
