from typing import Optional

import torch
from torch import Tensor

from .._core import hooks


def catch_up(table: Optional[Tensor]) -> None:
    """Applies the pending updates of row optimizers to all rows of a class table (lazy updates).
    Without pending updates it is only a look-up.

    Losses call it before they read a whole table. Call it, or the optimizer's ``flush``, before a
    table is read by other means. The autograd version of the table is not incremented: a loss that
    has not run its backward pass yet uses the updated rows. Pending updates are discarded when the
    optimizer's state is discarded. The function compiles and scripts. torch.export omits it, so
    call it before an export.

    Args:
        table: the parameter [N, D] or [N], or an alias of its memory (``.data``, ``.detach()``).
            None: nothing happens.
    """
    if table is None:
        return
    raised = False
    if not torch.jit.is_scripting():
        if torch.compiler.is_exporting():
            return  # an exported program may not write to its parameters
        raised = torch.compiler.is_compiling()
        if not raised and hooks.deferred_work:
            hooks.run_deferred()
    # Under no_grad, because torch.compile passes a copy to operators that write to a parameter
    # while gradients are recorded.
    with torch.no_grad():
        torch.ops.xsoftmax.catch_up_(table, raised)
