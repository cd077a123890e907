import torch
from torch.optim import adamw as torch_adamw

from ._base import RowOptimizer, dense_steps


class RowAdam(RowOptimizer):
    r"""Adam with decoupled weight decay whose step costs the rows that have a gradient, not all rows of the table.

    In dense terms, for a parameter with row-sparse gradients, at step t::

        param      = param * (1 - lr * weight_decay)
        exp_avg    = beta1 * exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad ** 2
        param      = param - lr / (1 - beta1 ** t) * exp_avg / ((exp_avg_sq / (1 - beta2 ** t)).sqrt() + eps)

    Rows without a gradient go on moving by what their moments remember, and decaying. That is owed, and applied when the row next has a
    gradient or by :meth:`flush`, after which every row is where dense ``torch.optim.AdamW`` would have it, provided that gradients did
    not depend on parameters and lr was constant: movement is made up with the lr of the day, weight decay with the lr of each step that
    passed. So call :meth:`flush` before evaluating, before saving weights and before large changes of lr.

    ``torch.optim.SparseAdam`` differs: it leaves the moments of other rows alone. A rare row's second moment then never fades, and it
    learns more slowly than under dense Adam, by up to the root of the share of steps in which it has a gradient.

    Parameters with dense gradients are updated as by ``torch.optim.AdamW``.

    Args:
        params: parameters, or dicts of parameter groups
        lr: learning rate, a number
        betas: decay of the two moments a step, numbers in [0, 1); betas[0] ** 2 < betas[1]
        eps: added to the root
        weight_decay: decoupled; 0 by default, as in ``torch.optim.Adam``. lr * weight_decay must be below 1

    State of a table: ``exp_avg`` and ``exp_avg_sq`` [N, D] in float32 (float64 for float64), ``last_step`` int32 [N], and with
    weight decay ``last_decay`` float64 [N].

    Raises:
        ValueError: an option out of range, or a gradient that does not fit its parameter
        TypeError: lr or betas are tensors, or a parameter's dtype is not float32, float64, bfloat16 or float16
        IndexError: a row of a gradient is not in the table
        RuntimeError: a gradient that is sparse in another way than in its rows
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def _check(self, options):
        super()._check(options)
        if not options["eps"] >= 0:
            raise ValueError(f"RowAdam: expected eps of at least 0, got {options['eps']}")
        if len(options["betas"]) != 2:
            raise ValueError(f"RowAdam: expected betas as two numbers, got {options['betas']}")
        for i, beta in enumerate(options["betas"]):
            if isinstance(beta, torch.Tensor):
                raise TypeError(f"RowAdam: expected betas[{i}] as a number, got a tensor")
            if not 0 <= beta < 1:
                raise ValueError(f"RowAdam: expected betas[{i}] in [0, 1), got {beta}")

        if options["betas"][0] ** 2 >= options["betas"][1] and options["betas"][0] > 0:
            raise ValueError(f"RowAdam: expected betas[0] ** 2 < betas[1], got {options['betas']}")

    def _step_rows(self, group, param, state, rows, values):
        state["step"] = state.get("step", 0) + 1
        if "last_step" not in state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self._row_state(param, param.shape)
            state["last_step"] = self._row_state(param, param.shape[:1], torch.int32)
        decay, last_decay = self._add_decay(group, param, state)
        beta1, beta2 = group["betas"]
        torch.ops.xsoftmax.row_adam_(param, rows, values, state["exp_avg"], state["exp_avg_sq"], state["last_step"], last_decay,
                                     step=state["step"], lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"], decay=decay)

    def _step_dense(self, group, params, grads, fused):
        steps, first, second = dense_steps(self, params, "exp_avg", "exp_avg_sq")
        beta1, beta2 = group["betas"]
        torch_adamw.adamw(params, grads, first, second, [], steps, fused=fused, amsgrad=False, beta1=beta1, beta2=beta2,
                          lr=float(group["lr"]), weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)

    def _flush_rows(self, group, param, state):
        beta1, beta2 = group["betas"]
        torch.ops.xsoftmax.row_adam_flush_(
            param, state["exp_avg"], state["exp_avg_sq"], state["last_step"], state.get("last_decay"), step=state["step"],
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"], decay=state.get("decay", 0.0))
