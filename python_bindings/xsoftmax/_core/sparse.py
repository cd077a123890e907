"""Conversion between scipy sparse matrices and the tensors that operators take.

Every matrix from a caller or a file goes through :func:`canonical`, which validates offsets and
indices before compiled code of scipy uses them to access memory. scipy's own
`check_format(full_check=True)` checks indices only if the last offset is not 0.
"""

import copy
import itertools
import operator
from functools import lru_cache
from typing import Any, Iterable, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import scipy.sparse

Matrix = Union["scipy.sparse.spmatrix", "scipy.sparse.sparray"]

_FLOAT32 = np.dtype(np.float32)
_INDEX_DTYPES = np.dtype(np.int32), np.dtype(np.int64)
_LIMIT = 2**31 - 1  # operators take fewer rows, and fewer labels (columns)
_HINTS = {
    "features": "scipy.sparse.csr_matrix(x) makes one of an array",
    "labels": "sklearn.preprocessing.MultiLabelBinarizer(sparse_output=True).fit_transform(labels) "
    "makes one of lists of labels, scipy.sparse.csr_matrix(y) of an array",
}


def canonical(owner: str, argument: str, matrix: Any,
              kind: str = "features") -> "scipy.sparse.csr_matrix":
    """Returns a scipy sparse matrix of any format as CSR in canonical form.

    Canonical form means two dimensions, valid offsets, columns in range and ascending in each row,
    duplicate entries summed, no stored zeros, and int32 indices, or int64 where int32 is too small.
    A matrix in this form is returned as it is. The caller's data are never written to.

    DIA and BSR have no stored zeros: zeros of their blocks and diagonals are not entries, whatever
    the kind is.

    Args:
        owner, argument: named in errors.
        matrix: a scipy sparse matrix or array.
        kind: "features": finite float32 values. "labels": the non-zeros are (row, label) pairs, and
            all values become 1, float32. "weights": finite float32 values; stored zeros are kept.
            "scores": scores of a ranking, in their dtype, not NaN; stored zeros are kept, since 0
            is the best score of some transforms, and entries keep their order in the row.

    Raises:
        TypeError: the matrix is not a scipy sparse matrix of real numbers.
        ValueError: it has another number of dimensions; its parts contradict each other; a value is
            not finite, also after a conversion to float32; it has more rows, or labels, than
            operators take.
    """
    _check_matrix(owner, argument, matrix, kind)
    if matrix.shape[0] >= _LIMIT or (kind == "labels" and matrix.shape[1] >= _LIMIT):
        raise ValueError(f"{owner}: expected {argument} with fewer than 2^31 - 1 "
                         f"{'rows and labels' if kind == 'labels' else 'rows'}, "
                         f"got shape {list(matrix.shape)}")
    try:
        indptr, indices, data = _read_rows(matrix)
        offsets, columns, values = tensor_of(_as_index(indptr)).long(), tensor_of(
            _as_index(indices)), tensor_of(_as_float(data))
        tensors = torch.ops.xsoftmax.canonical_rows(offsets, columns, values, matrix.shape[1], kind)
    except (ValueError, IndexError) as error:
        raise _make_error(owner, argument, str(error)) from error
    return _assemble(matrix, (indptr, indices, data), tensors, kind)


def _check_matrix(owner: str, argument: str, matrix: Any, kind: str) -> None:
    """Raises unless a matrix is sparse and of real numbers, with two dimensions."""
    import scipy.sparse as sp

    if not sp.issparse(matrix):
        hint = f": {_HINTS[kind]}" if kind in _HINTS else ""
        raise TypeError(f"{owner}: expected {argument} as a scipy sparse matrix, got "
                        f"{type(matrix).__name__}{hint}")
    if matrix.ndim != 2:
        raise ValueError(f"{owner}: expected {argument} of two dimensions, got shape "
                         f"{list(matrix.shape)}: "
                         "a row of an array keeps both where it is taken by x[[i]]")
    dtype = getattr(matrix, "dtype", None)  # usually that of `data`, which may be any object
    if not isinstance(dtype, np.dtype):
        raise _make_error(owner, argument, "expected parts as arrays, got data without a dtype")
    if dtype.kind not in "fiub":
        raise TypeError(f"{owner}: expected {argument} of numbers, got dtype {dtype}")


def _assemble(matrix: Any, parts: Tuple[np.ndarray, ...], tensors: Any,
              kind: str) -> "scipy.sparse.csr_matrix":
    """Builds the result of `canonical` from the operator's tensors, or from the parts if they are
    canonical already."""
    import scipy.sparse as sp

    if tensors:
        offsets, columns, data = (part.numpy() for part in tensors)
        fits_int32 = max(len(columns), matrix.shape[1]) < 2**31
        indptr, indices = (part.astype(np.int32 if fits_int32 else np.int64, copy=False)
                           for part in (offsets, columns))
    else:
        indptr, indices, data = parts
        if kind == "labels":
            is_all_ones = data.dtype == np.float32 and (len(data) == 0
                                                        or data.min() == data.max() == 1)
            data = data if is_all_ones else np.ones(len(data), np.float32)
        elif kind == "scores":
            data = _as_float(data)
        else:
            data = data.astype(np.float32, copy=False)
        arrays = (matrix.indptr, matrix.indices, matrix.data) if matrix.format == "csr" else ()
        if arrays and all(map(operator.is_, arrays, (indptr, indices, data))):
            return matrix
    matrix_class = sp.csr_array if isinstance(matrix, sp.sparray) else sp.csr_matrix
    result = matrix_class((data, indices, indptr), shape=matrix.shape, copy=False)
    if kind != "scores":
        result.has_canonical_format = True
    return result


def _read_rows(matrix: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the result of :func:`_convert_rows`. Raises ValueError if parts of a matrix are not
    arrays."""
    try:
        return _convert_rows(matrix)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"expected parts as arrays, got others: {error}") from error


def _convert_rows(matrix: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns indptr, indices and data of the rows of a matrix of any format. Those of CSR are not
    checked."""
    import scipy.sparse as sp

    shape = matrix.shape
    if matrix.format == "csr":
        return _trim(matrix.indptr, matrix.indices, _check_array(matrix.data), shape[0])
    if matrix.format in ("csc", "bsr"):
        _check_array(matrix.data, 3 if matrix.format == "bsr" else 1)
        block_rows, block_columns = matrix.blocksize if matrix.format == "bsr" else (1, 1)
        if min(block_rows, block_columns) < 1 or shape[0] % block_rows or shape[1] % block_columns:
            raise ValueError(f"expected blocks that divide the shape {list(shape)}, got "
                             f"{[block_rows, block_columns]}")
        lists, width = (shape[0] // block_rows,
                        shape[1] // block_columns) if matrix.format == "bsr" else shape[::-1]
        indptr, indices, data = _trim(matrix.indptr, matrix.indices, matrix.data, lists)
        _check_lists(indptr, indices, width)
        matrix_class = sp.bsr_matrix if matrix.format == "bsr" else sp.csc_matrix
        rows = matrix_class((_as_float(data), indices, indptr), shape=shape).tocsr()
        if matrix.format == "bsr":
            rows.eliminate_zeros()  # zeros inside blocks
        return rows.indptr, rows.indices, rows.data
    row, column, data = _read_coordinates(matrix)
    for name, index, size in (("rows", row, shape[0]), ("columns", column, shape[1])):
        if len(index) != len(data):
            raise ValueError(f"expected as many {name} as values, got {len(index)} and {len(data)}")
        if len(index) and not (0 <= index.min() and index.max() < size):
            raise ValueError(f"expected {name} in [0, {size}), got {index.min()} to {index.max()}")
    rows = sp.coo_matrix((_as_float(data), (row, column)), shape=shape).tocsr()
    return rows.indptr, rows.indices, rows.data


def _read_coordinates(matrix: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns row, column and value of each entry of a COO, DOK, LIL or DIA matrix, unchecked."""
    if matrix.format == "coo":
        return _as_index(matrix.row), _as_index(matrix.col), _check_array(matrix.data)
    if matrix.format == "dok":
        keys, count = list(matrix.keys()), len(matrix.keys())
        row, column = (_convert_objects((key[axis] for key in keys), np.int64, count)
                       for axis in (0, 1))
        return row, column, _convert_objects(matrix.values(), matrix.dtype, count)
    if matrix.format == "lil":
        counts = [
            _convert_objects(map(len, lists), np.int64, len(lists))
            for lists in (_check_array(matrix.rows), _check_array(matrix.data))
        ]
        if not np.array_equal(counts[0], counts[1]):
            raise ValueError("expected as many columns as values in each row, got others")
        count = int(counts[0].sum())
        column, data = (_convert_objects(itertools.chain.from_iterable(lists), dtype, count)
                        for lists, dtype in ((matrix.rows, np.int64), (matrix.data, matrix.dtype)))
        return np.repeat(np.arange(len(counts[0])), counts[0]), column, data
    offsets, data = _as_index(matrix.offsets), _check_array(matrix.data, 2)
    if len(offsets) != len(data):
        raise ValueError(f"expected as many offsets as diagonals, got {len(offsets)} and "
                         f"{len(data)}")
    # Other diagonals lie outside of the matrix.
    has_entries = (offsets > -matrix.shape[0]) & (offsets < matrix.shape[1])
    offsets, data = offsets[has_entries], data[has_entries, :matrix.shape[1]]
    diagonal, column = data.nonzero()
    row = column - offsets[diagonal]
    is_inside = (row >= 0) & (row < matrix.shape[0])
    return row[is_inside], column[is_inside], data[diagonal[is_inside], column[is_inside]]


def _convert_objects(values: Iterable[Any], dtype: Any, count: int) -> np.ndarray:
    """Returns Python numbers as an array."""
    try:
        return np.fromiter(values, dtype, count)
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        raise ValueError(f"expected numbers of {np.dtype(dtype)}, got others: {error}") from error


def _trim(indptr: Any, indices: Any, data: Any,
          lists: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the parts of a matrix of `lists` rows or columns, without unused entries after the
    last one."""
    if len(_as_index(indptr)) != lists + 1:
        raise ValueError(f"expected {lists + 1} offsets, got {len(indptr)}")
    count = int(indptr[-1])
    if not 0 <= count <= min(len(_as_index(indices)), len(data)):
        raise ValueError(f"expected offsets that end at most at {min(len(indices), len(data))}, "
                         f"the entries, got {count}")
    return indptr, indices if len(indices) == count else indices[:count], data if len(
        data) == count else data[:count]


def _check_lists(indptr: np.ndarray, indices: np.ndarray, width: int) -> None:
    if indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise ValueError("expected offsets that begin at 0 and never fall, got others")
    if len(indices) and not (0 <= indices.min() and indices.max() < width):
        raise ValueError(f"expected indices in [0, {width}), got {indices.min()} to "
                         f"{indices.max()}")


def _make_error(owner: str, argument: str, reason: str) -> ValueError:
    """Returns the error for inconsistent parts of a matrix, naming the caller and its argument."""
    reason = reason.removeprefix("canonical_rows: ").removeprefix("expected ")
    if reason.startswith("values "):
        return ValueError(f"{owner}: expected {argument} {reason.removeprefix('values ')}")
    return ValueError(f"{owner}: expected {argument} as a sound sparse matrix, got one whose parts "
                      f"contradict each other (expected {reason})")


def _check_array(part: Any, dimensions: int = 1) -> np.ndarray:
    if not isinstance(part, np.ndarray) or part.ndim != dimensions:
        raise ValueError(f"expected parts as arrays of {dimensions} dimensions, got "
                         f"{type(part).__name__} of shape {list(np.shape(part))}")
    return part


def _as_index(part: Any) -> np.ndarray:
    """Returns indices as int32 or int64."""
    if _check_array(part).dtype.kind not in "iu":
        raise ValueError(f"expected indices of an integer dtype, got {part.dtype}")
    return part if part.dtype in (np.int32, np.int64) else part.astype(np.int64)


def _as_float(data: np.ndarray) -> np.ndarray:
    """Returns values as float32 or float64, so that none underflows to 0 or overflows."""
    if data.dtype in (np.float32, np.float64):
        return data
    with np.errstate(over="ignore"):
        return data.astype(np.float32 if np.can_cast(data.dtype, np.float32) else np.float64)


def tensor_of(array: np.ndarray) -> Tensor:
    """Returns a read-only tensor that shares the memory of an array: torch.from_numpy without the
    warning for read-only arrays."""
    if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))


class _Memory:
    """Presents the memory of an array as writable to numpy. Nothing writes to it."""
    def __init__(self, array: np.ndarray) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self.array = array


def query_tensors(owner: str, argument: str, matrix: Any) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns offsets, columns and float32 values of a scipy sparse matrix, for an operator that
    canonicalises them itself."""
    # Fast path for the common case: a query takes only microseconds.
    if matrix.format == "csr" and len(matrix.shape) == 2:
        indptr, indices, data = matrix.indptr, matrix.indices, matrix.data
        if (isinstance(indptr, np.ndarray) and isinstance(indices, np.ndarray)
                and isinstance(data, np.ndarray) and indptr.ndim == indices.ndim == data.ndim == 1
                and data.dtype is _FLOAT32 and indptr.dtype in _INDEX_DTYPES
                and indices.dtype in _INDEX_DTYPES and len(indptr) == matrix.shape[0] + 1
                and indptr[-1] == len(indices) == len(data) and indptr.flags.carray
                and indices.flags.carray and data.flags.carray):
            return torch.from_numpy(indptr), torch.from_numpy(indices), torch.from_numpy(data)
    _check_matrix(owner, argument, matrix, "features")
    try:
        indptr, indices, data = _read_rows(matrix)
        with np.errstate(over="ignore"):
            return tensor_of(_as_index(indptr)), tensor_of(_as_index(indices)), tensor_of(
                data.astype(np.float32, copy=False))
    except ValueError as error:
        raise _make_error(owner, argument, str(error)) from error


def index_tensors(matrix: "scipy.sparse.csr_matrix",
                  owner: str = "xsoftmax") -> Tuple[Tensor, Tensor]:
    """Returns the offsets (int64) and indices (int32) of a CSR or CSC matrix.

    Raises:
        ValueError: the number of rows or columns exceeds int32.
    """
    if max(matrix.shape) > _LIMIT:
        raise ValueError(f"{owner}: expected a sparse matrix of at most 2^31 - 1 rows and columns, "
                         f"which operators take, got shape {list(matrix.shape)}")
    return tensor_of(matrix.indptr.astype(np.int64, copy=False)), tensor_of(
        matrix.indices.astype(np.int32, copy=False))


def sparse_tensors(matrix: "scipy.sparse.csr_matrix",
                   owner: str = "xsoftmax") -> Tuple[Tensor, Tensor, Tensor]:
    """Returns the offsets (int64), indices (int32) and values (float32) of a CSR or CSC matrix."""
    return (*index_tensors(matrix, owner), tensor_of(matrix.data.astype(np.float32, copy=False)))


def csr_matrix(offsets: Tensor, columns: Tensor, values: Tensor,
               shape: Tuple[int, int]) -> "scipy.sparse.csr_matrix":
    """Returns a scipy CSR matrix that shares the memory of an operator's tensors."""
    import scipy.sparse as sp

    if shape[0] != 1:
        return sp.csr_matrix((values.numpy(), columns.numpy(), offsets.numpy()), shape=shape,
                             copy=False)
    # A single query: validation in scipy's constructor would take as long as the search itself.
    matrix = copy.copy(_empty_row(shape[1]))
    matrix.indptr, matrix.indices, matrix.data = offsets.numpy().astype(
        np.int32), columns.numpy().astype(np.int32), values.numpy()
    return matrix


@lru_cache(maxsize=16)
def _empty_row(columns: int) -> "scipy.sparse.csr_matrix":
    import scipy.sparse as sp

    return sp.csr_matrix((1, columns), dtype=np.float32)
