"""Compressed sparse matrices of scipy as the tensors that operators take, and back."""

import copy
from functools import lru_cache
from typing import Any, Tuple, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import scipy.sparse


def checked(owner: str, argument: str, matrix: Any) -> "scipy.sparse.csr_matrix":
    """A scipy sparse matrix as CSR whose indices are sound: operators and scipy's own routines read memory by them."""
    import scipy.sparse as sp

    if not sp.issparse(matrix):
        raise TypeError(f"{owner}: expected {argument} as a scipy sparse matrix, got {type(matrix).__name__}")
    if matrix.dtype.kind not in "fiub":
        raise TypeError(f"{owner}: expected {argument} of numbers, got dtype {matrix.dtype}")
    if matrix.format in ("csr", "csc", "bsr"):
        try:
            matrix.check_format(full_check=True)
        except ValueError as error:
            raise ValueError(f"{owner}: expected {argument} as a sound sparse matrix, got one whose parts contradict each other ({error})") from error
    rows = matrix.tocsr()
    if rows.dtype.kind == "f" and not np.isfinite(rows.data).all():
        at = int(np.flatnonzero(~np.isfinite(rows.data))[0])
        row = int(np.searchsorted(rows.indptr, at, side="right")) - 1
        raise ValueError(f"{owner}: expected {argument} with finite numbers, got {rows.data[at]} in row {row}, column {int(rows.indices[at])}")
    return rows


def index_tensors(matrix: "scipy.sparse.csr_matrix") -> Tuple[Tensor, Tensor]:
    """Of CSR or CSC: where each row or column begins (int64), and the indices (int32)."""
    return torch.from_numpy(matrix.indptr.astype(np.int64, copy=False)), torch.from_numpy(matrix.indices.astype(np.int32, copy=False))


def sparse_tensors(matrix: "scipy.sparse.csr_matrix") -> Tuple[Tensor, Tensor, Tensor]:
    """Those and the values (float32)."""
    return (*index_tensors(matrix), torch.from_numpy(matrix.data.astype(np.float32, copy=False)))


def csr_matrix(offsets: Tensor, columns: Tensor, values: Tensor, shape: Tuple[int, int]) -> "scipy.sparse.csr_matrix":
    import scipy.sparse as sp

    if shape[0] != 1:
        return sp.csr_matrix((values.numpy(), columns.numpy(), offsets.numpy()), shape=shape, copy=False)
    # The answer to one query: scipy's constructor takes as long to look at its parts as the search for them.
    matrix = copy.copy(_empty_row(shape[1]))
    matrix.indptr, matrix.indices, matrix.data = offsets.numpy().astype(np.int32), columns.numpy().astype(np.int32), values.numpy()
    return matrix


@lru_cache(maxsize=16)
def _empty_row(columns: int) -> "scipy.sparse.csr_matrix":
    import scipy.sparse as sp

    return sp.csr_matrix((1, columns), dtype=np.float32)
