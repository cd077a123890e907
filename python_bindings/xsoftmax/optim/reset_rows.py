import torch
from torch import Tensor


def reset_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Assigns new values to rows of a parameter, ``table[rows] = values``, and resets the state of
    row optimizers for them to that before the first gradient.

    Use it for rows that are reused for something else. Pending updates of these rows are discarded,
    and those of other rows are kept; writing to the parameter by other means would discard them
    all. All row optimizers that have taken a step for the parameter are found, including those of
    C++. State of other optimizers and gradients are not reset. An error changes nothing.

    Args:
        table: the parameter, [N, ...].
        rows: int64 [R] in [0, N).
        values: [R, ...], in the dtype of the table.

    Raises:
        ValueError: the shape of rows or values does not fit.
        TypeError: rows are not int64, or the dtype of values differs from the table's.
        IndexError: a row is not in [0, N).
    """
    with torch.no_grad():
        torch.ops.xsoftmax.reset_rows_(table, rows, values)
