from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .row_optimizer import RowOptimizer
from .values import two_betas

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .torch_options import TorchOptions


class RowAdam(RowOptimizer):
    r"""Adam with decoupled weight decay (AdamW) whose step costs the rows that have a gradient, not
    all N rows of the table.

    In dense terms, for a parameter [N, D] with row-sparse gradients, at step t::

        param      = param * (1 - lr * weight_decay)
        exp_avg    = beta1 * exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad ** 2
        root       = (exp_avg_sq / (1 - beta2 ** t)).sqrt()
        param      = param - lr / (1 - beta1 ** t) * exp_avg / (root + eps)

    Rows without a gradient keep moving by their moments, and keep decaying. These updates are
    applied lazily: a row's steps without a gradient are *pending*, each with its own lr and weight
    decay, until the row next has a gradient, :meth:`flush` is called, or the library reads the
    table. Every row then has the value that dense ``torch.optim.AdamW`` would give it, under any
    schedule, provided that no gradient depended on a row with pending updates. The only difference
    is eps. Dense Adam adds it to a root that shrinks from step to step, so a lazy update is larger
    than the dense one, by a factor of at most ``1 + eps / root``, with the root of that step. If
    betas or eps of a group change, all rows catch up first.

    ``torch.optim.SparseAdam`` differs: it leaves the moments of other rows unchanged. The second
    moment of a rare row then never decays, and the row learns more slowly than under dense Adam, by
    a factor of up to the square root of the share of steps in which it has a gradient.

    With row_wise (partial row-wise Adam), a row has a single second moment, and all of the above
    holds with::

        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * (grad ** 2).mean(1)             # [N]
        param      = param - lr / (1 - beta1 ** t) * exp_avg / (root + eps)[:, None]

    A table is a parameter that has a row-sparse gradient at its first step, or belongs to a loss
    that may produce one (``sparse_grad`` other than False). If such a loss produces a dense
    gradient in some step, every row counts as having a gradient, and the equations above hold.
    Other parameters are updated as by ``torch.optim.AdamW``.

    Args:
        params: an iterable of parameters, or of dicts that define parameter groups.
        lr: learning rate: a finite number of at least 0, or a floating tensor of one element, on
            the CPU or on the parameters' device. A tensor on the device is neither read on the host
            nor checked in a step, and a captured step follows its value. Schedulers of torch.optim
            write to it in place.
        betas: decay rates of the two moments, in [0, 1), with betas[0] ** 2 < betas[1].
        eps: added to the root, at least 0.
        weight_decay: decoupled weight decay, at least 0; 0 by default, as in ``torch.optim.Adam``.
            For row-sparse gradients, lr * weight_decay must be below 1.
        maximize: maximize the objective instead of minimizing it.
        row_wise: keep one second moment per row, of the mean of squares: memory [N] instead of [N,
            D], in float32. Read at a table's first gradient. Other parameters ignore it.
        stochastic_rounding: round updates of rows of 16-bit tables, and what :meth:`flush` applies,
            up or down at random, without bias, so that updates too small for a 16-bit number still
            move it on average. The random numbers depend only on step, row and element. Other
            parameters round to nearest.
        state_dtype: dtype of the moments [N, D]: ``torch.bfloat16`` or ``torch.float32``. None:
            float32, or float64 for float64 tables. bfloat16 moments always use stochastic rounding:
            rounded to nearest, a second moment with beta2 = 0.999 would ignore gradients that
            change it by less than a 256th. Read at a table's first gradient. Other parameters
            ignore it.
        lazy_gradient: on a GPU, let losses with private candidates leave the gradient of a table as
            terms, which the step reads, instead of rows. ``docs/howto/gpu.md`` says when this pays
            and what it requires. Copies of the optimizer do not use it.
        torch_options: options of ``torch.optim.AdamW`` that select among its implementations,
            ``foreach``, ``fused`` and ``capturable``, are accepted and ignored: one operator takes
            the step on every device, and the step counter is on the parameters' device.
            ``amsgrad=True``, ``differentiable=True``, and a weight decay with
            ``decoupled_weight_decay=False`` are refused.

    Shape: tables [N, D] or [N], with row-sparse gradients (sparse COO in dimension 0, of R rows) or
    dense ones; other parameters of any shape, with dense gradients.

    State of a table: ``step``, ``exp_avg`` [N, D], ``exp_avg_sq`` [N, D], or [N] with row_wise,
    ``last_step`` int32 [N], and ``pending``, the steps that may be pending for rows
    (csrc/table/updates/pending_steps.h).

    Raises:
        ValueError: an option is out of range, or is an option of torch.optim that would change the
            steps; a parameter is passed twice; a gradient does not fit its parameter.
        TypeError: an option has another type, such as betas as tensors or lr as text; a module is
            passed instead of parameters; a keyword is unknown; a parameter is not float32, float64,
            bfloat16 or float16.
        IndexError: a row of a gradient is not in [0, N).
        RuntimeError: a sparse gradient is not sparse COO in dimension 0 only, or its parameter has
            more than 2 dimensions.
    """

    _op, _state_names = "row_adam", ("step", "exp_avg", "exp_avg_sq", "last_step", "pending")
    _dense_names, _counterpart = ("step", "exp_avg", "exp_avg_sq"), "AdamW"
    _later_options = dict(RowOptimizer._later_options, row_wise=False, maximize=False)
    _option_names = ("lr", "betas", "eps", "weight_decay", "maximize", "row_wise",
                     "stochastic_rounding", "state_dtype")

    def __init__(self, params: ParamsT, lr: Union[float, Tensor] = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, *, maximize: bool = False, row_wise: bool = False,
                 stochastic_rounding: bool = False, state_dtype: Optional[torch.dtype] = None,
                 lazy_gradient: bool = False, **torch_options: "Unpack[TorchOptions]") -> None:
        super().__init__(
            params,
            dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize,
                 row_wise=row_wise, stochastic_rounding=stochastic_rounding,
                 state_dtype=state_dtype), dict(torch_options), lazy_gradient)

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        options = super()._options(group)
        betas = two_betas(self._name, options.pop("betas"))
        return dict(options, beta1=betas[0], beta2=betas[1])
