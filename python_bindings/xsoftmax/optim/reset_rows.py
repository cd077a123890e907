import torch
from torch import Tensor


def reset_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Gives rows of a parameter new values, ``table[rows] = values``, and resets what row optimizers keep for them to its state before the first gradient.

    It is for rows that stand for something else from now on. The rows then owe no steps; what the other rows owe stays, which writing to the parameter by other
    means would drop. All row optimizers that have taken a step for the parameter are found by it, of C++ as well. Of other optimizers nothing is reset; a
    gradient that waits for a step stays as it is.

    Args:
        table: the parameter, [N, ...].
        rows: int64 [R] in [0, N).
        values: [R, ...], of the table's dtype.

    Raises:
        ValueError: rows or values of another shape; nothing changes then, as after the other errors.
        TypeError: rows are not int64, or values of another dtype than the table.
        IndexError: a row is not in [0, N).
    """
    with torch.no_grad():
        torch.ops.xsoftmax.reset_rows_(table, rows, values)
