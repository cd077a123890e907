import torch
from torch import Tensor


def reset_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Rows of a parameter that stand for something else from now on: ``table[rows] = values``, and what row optimizers keep for them is as before their first
    gradient.

    They owe nothing of the steps before; what the other rows owe stays, which writing to the parameter by other means would drop. All row optimizers that have
    taken a step for the parameter are found by it, of C++ as well. Of other optimizers nothing is reset; a gradient that waits for a step stays as it is.

    Args:
        table: the parameter, [N, ...].
        rows: int64 [R] in [0, N).
        values: [R, ...], of the table's dtype.

    Raises:
        TypeError, ValueError, IndexError: dtypes, shapes or rows that do not fit the table; nothing changes then
    """
    with torch.no_grad():
        torch.ops.xsoftmax.reset_rows_(table, rows, values)
