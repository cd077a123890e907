import torch
from torch.optim import adagrad as torch_adagrad

from ._base import RowOptimizer, dense_steps


class RowAdagrad(RowOptimizer):
    r"""Adagrad whose step costs the rows that have a gradient, not all rows of the table.

    For the rows with a gradient, at step t of the parameter, as ``torch.optim.Adagrad``::

        grad  = grad + weight_decay * param
        sum   = sum + grad ** 2                           # row_wise: one number a row, sum + (grad ** 2).mean()
        param = param - lr / (1 + (t - 1) * lr_decay) * grad / (sum.sqrt() + eps)

    Without weight decay a row without a gradient stays where it is under Adagrad, so this equals the dense optimizer. With it,
    decay acts only in the steps in which a row has a gradient. Nothing is owed: :meth:`flush` does nothing. Parameters with dense
    gradients are updated as by ``torch.optim.Adagrad``.

    Args:
        params: parameters, or dicts of parameter groups
        lr: learning rate, a number
        lr_decay: of lr over the steps of a parameter
        weight_decay: added to the gradient, as in ``torch.optim.Adagrad``
        initial_accumulator_value: what ``sum`` starts from
        eps: added to the root
        row_wise: one accumulator a row, the mean of squares: [N] instead of [N, D] memory. Read at a parameter's first gradient;
            parameters with dense gradients ignore it

    State of a table: ``sum`` [N, D], or [N] with row_wise, in float32 (float64 for float64).

    Raises:
        ValueError: an option out of range, or a gradient that does not fit its parameter
        TypeError: lr is a tensor, or a parameter's dtype is not float32, float64, bfloat16 or float16
        IndexError: a row of a gradient is not in the table
        RuntimeError: a gradient that is sparse in another way than in its rows
    """

    def __init__(self, params, lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, *,
                 row_wise=False):
        super().__init__(params, dict(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay,
                                      initial_accumulator_value=initial_accumulator_value, eps=eps, row_wise=row_wise))

    def _check(self, options):
        super()._check(options)
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            if not options[name] >= 0:
                raise ValueError(f"RowAdagrad: expected {name} of at least 0, got {options[name]}")

    def _step_rows(self, group, param, state, rows, values):
        state["step"] = state.get("step", 0) + 1
        if "sum" not in state:
            shape = param.shape[:1] if group["row_wise"] else param.shape
            start = float(group["initial_accumulator_value"])
            state["sum"] = self._row_state(param, shape, fill=start)
        lr = float(group["lr"]) / (1 + (state["step"] - 1) * group["lr_decay"])
        torch.ops.xsoftmax.row_adagrad_(param, rows, values, state["sum"], lr=lr, weight_decay=group["weight_decay"],
                                        eps=group["eps"])

    def _step_dense(self, group, params, grads, fused):
        steps, sums = dense_steps(self, params, "sum", fill=group["initial_accumulator_value"])
        if params[0].device.type != "cpu":
            fused = None  # torch fuses Adagrad on CPU in all releases that this library supports, elsewhere in some
        torch_adagrad.adagrad(params, grads, sums, steps, fused=fused, lr=float(group["lr"]), lr_decay=group["lr_decay"],
                              weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)
