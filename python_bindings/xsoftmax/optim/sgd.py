import torch
from torch.optim import sgd as torch_sgd

from ._base import RowOptimizer


class RowSGD(RowOptimizer):
    r"""Stochastic gradient descent whose step costs the rows that have a gradient, not all rows of the table.

    In dense terms, for a parameter with row-sparse gradients::

        param  = param * (1 - lr * weight_decay)
        buffer = momentum * buffer + (1 - dampening) * grad         # the first step of a parameter: buffer = grad
        param  = param - lr * (grad + momentum * buffer if nesterov else buffer)

    Rows without a gradient go on moving by their momentum and decaying. That is owed, and applied when the row next has a gradient
    or by :meth:`flush`, after which every row is where dense ``torch.optim.SGD`` would have it to rounding, provided that gradients
    did not depend on parameters and lr was constant: momentum is made up with the lr of the day (call :meth:`flush` before large
    changes of lr), weight decay with the lr of each step that passed.

    Differs from ``torch.optim.SGD`` in weight decay, which is decoupled (a factor on the parameter, outside the momentum buffer),
    not a term of the gradient. Parameters with dense gradients are updated as by ``torch.optim.SGD``, its weight decay included.

    Args:
        params: parameters, or dicts of parameter groups
        lr: learning rate, a number
        momentum: factor of the buffer [N, D] (0: none is kept)
        dampening: damps the gradient's share in the buffer
        weight_decay: decoupled and lazy; lr * weight_decay must be below 1
        nesterov: look ahead along the buffer; needs a momentum and no dampening
        maximize: ascend

    State of a table: ``momentum_buffer`` [N, D] in float32 (float64 for float64), ``last_step`` int32 [N], and with weight decay
    ``last_decay`` float64 [N].

    Raises:
        ValueError: an option out of range, or a gradient that does not fit its parameter
        TypeError: lr is a tensor, or a parameter's dtype is not float32, float64, bfloat16 or float16
        IndexError: a row of a gradient is not in the table
        RuntimeError: a gradient that is sparse in another way than in its rows
    """

    def __init__(self, params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, *, maximize=False):
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
                                      maximize=maximize))

    def _check(self, options):
        super()._check(options)
        if not options["momentum"] >= 0:
            raise ValueError(f"RowSGD: expected momentum of at least 0, got {options['momentum']}")
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError(f"RowSGD: expected a momentum and no dampening for nesterov, got momentum {options['momentum']} and "
                             f"dampening {options['dampening']}")

    def _step_rows(self, group, param, state, rows, values):
        state["step"] = state.get("step", 0) + 1
        first = group["momentum"] != 0 and "momentum_buffer" not in state
        if first:
            state["momentum_buffer"] = self._row_state(param, param.shape)
            state["last_step"] = self._row_state(param, param.shape[:1], torch.int32)
        decay, last_decay = self._add_decay(group, param, state)
        torch.ops.xsoftmax.row_sgd_(
            param, rows, values, state.get("momentum_buffer"), state.get("last_step"), last_decay, step=state["step"],
            lr=float(group["lr"]), momentum=group["momentum"], dampening=0.0 if first else group["dampening"],
            nesterov=group["nesterov"], maximize=group["maximize"], decay=decay)

    def _step_dense(self, group, params, grads, fused):
        buffers = [self.state[param].get("momentum_buffer") for param in params]
        if group["momentum"] != 0 and any(buffer is None for buffer in buffers):
            fused = None  # the fused kernel takes all buffers as new or none
        torch_sgd.sgd(params, grads, buffers, fused=fused, weight_decay=group["weight_decay"], momentum=group["momentum"],
                      lr=float(group["lr"]), dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"])
        if group["momentum"] != 0:
            for param, buffer in zip(params, buffers):
                self.state[param]["momentum_buffer"] = buffer

    def _flush_rows(self, group, param, state):
        if "momentum_buffer" not in state:
            return super()._flush_rows(group, param, state)
        torch.ops.xsoftmax.row_sgd_flush_(
            param, state["momentum_buffer"], state["last_step"], state.get("last_decay"), step=state["step"], lr=float(group["lr"]),
            momentum=group["momentum"], nesterov=group["nesterov"], decay=state.get("decay", 0.0))
