"""Optimizers for tables with row-sparse gradients: a step costs the rows that have a gradient, never all rows."""

from .._public import public_names
from .adagrad import RowAdagrad
from .adam import RowAdam
from .reset_rows import reset_rows
from .settle import settle
from .sgd import RowSGD

__all__ = ["RowAdagrad", "RowAdam", "RowSGD", "reset_rows", "settle"]
__dir__ = public_names(__all__)
