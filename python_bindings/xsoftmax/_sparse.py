"""Compressed sparse matrices of scipy as the tensors that operators take, and back."""

from typing import Tuple

import numpy as np
import torch
from torch import Tensor


def index_tensors(matrix) -> Tuple[Tensor, Tensor]:
    """Of CSR or CSC: where each row or column begins (int64), and the indices (int32)."""
    return torch.from_numpy(matrix.indptr.astype(np.int64, copy=False)), torch.from_numpy(matrix.indices.astype(np.int32, copy=False))


def sparse_tensors(matrix) -> Tuple[Tensor, Tensor, Tensor]:
    """Those and the values (float32)."""
    return (*index_tensors(matrix), torch.from_numpy(matrix.data.astype(np.float32, copy=False)))


def csr_matrix(offsets: Tensor, columns: Tensor, values: Tensor, shape: Tuple[int, int]) -> "scipy.sparse.csr_matrix":  # noqa: F821
    import scipy.sparse as sp

    return sp.csr_matrix((values.numpy(), columns.numpy(), offsets.numpy()), shape=shape, copy=False)
