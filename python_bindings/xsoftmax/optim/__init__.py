"""Optimizers for tables with row-sparse gradients: a step costs the rows that have a gradient, not
all rows."""

from .._core.public import public_names
from .adagrad import RowAdagrad
from .adam import RowAdam
from .reset_rows import reset_rows
from .catch_up import catch_up
from .sgd import RowSGD

__all__ = ["RowAdagrad", "RowAdam", "RowSGD", "reset_rows", "catch_up"]
__dir__ = public_names(__all__)
