from typing import Optional

import torch
from torch import Tensor

from .. import _hooks


def settle(table: Optional[Tensor]) -> None:
    """Brings every row of a class table up to date if a row optimizer owes it steps (the catch-up of lazy updates); a look-up otherwise.

    The losses call it before they read a whole table. Call it, or the optimizer's ``flush``, before a table is read by other means. The table's version stays
    as it is: a loss that waits for its backward pass goes on, with the rows as they are then. The steps that rows still owe are forgotten with the optimizer's
    state. The function compiles and scripts. torch.export leaves it out, so call it before an export.

    Args:
        table: the parameter [N, D] or [N], or an alias of its memory (``.data``, ``.detach()``). None: nothing happens.
    """
    if table is None:
        return
    raised = False
    if not torch.jit.is_scripting():
        if torch.compiler.is_exporting():
            return  # an exported program may not write to its parameters
        raised = torch.compiler.is_compiling()
        if not raised and _hooks.deferred:
            _hooks.run_deferred()
    with torch.no_grad():  # torch.compile gives a copy to an operator that writes to a parameter while gradients are recorded
        torch.ops.xsoftmax.settle_(table, raised)
