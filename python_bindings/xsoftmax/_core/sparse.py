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
        indptr, indices, data = _arrays_of_rows(matrix)
        offsets, columns, values = tensor_of(_index(indptr)).long(), tensor_of(
            _index(indices)), tensor_of(_number(data))
        tensors = torch.ops.xsoftmax.canonical_rows(offsets, columns, values, matrix.shape[1], kind)
    except (ValueError, IndexError) as error:
        raise _named(owner, argument, str(error)) from error
    return _assembled(matrix, (indptr, indices, data), tensors, kind)


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
        raise _named(owner, argument, "expected parts as arrays, got data without a dtype")
    if dtype.kind not in "fiub":
        raise TypeError(f"{owner}: expected {argument} of numbers, got dtype {dtype}")


def _assembled(matrix: Any, parts: Tuple[np.ndarray, ...], tensors: Any,
               kind: str) -> "scipy.sparse.csr_matrix":
    """Builds the result of `canonical` from the operator's tensors, or from the parts if they are
    canonical already."""
    import scipy.sparse as sp

    if tensors:
        offsets, columns, data = (part.numpy() for part in tensors)
        narrow = max(len(columns), matrix.shape[1]) < 2**31
        indptr, indices = (part.astype(np.int32 if narrow else np.int64, copy=False)
                           for part in (offsets, columns))
    else:
        indptr, indices, data = parts
        if kind == "labels":
            ones = data.dtype == np.float32 and (len(data) == 0 or data.min() == data.max() == 1)
            data = data if ones else np.ones(len(data), np.float32)
        elif kind == "scores":
            data = _number(data)
        else:
            data = data.astype(np.float32, copy=False)
        before = (matrix.indptr, matrix.indices, matrix.data) if matrix.format == "csr" else ()
        if before and all(map(operator.is_, before, (indptr, indices, data))):
            return matrix
    kind_of = sp.csr_array if isinstance(matrix, sp.sparray) else sp.csr_matrix
    result = kind_of((data, indices, indptr), shape=matrix.shape, copy=False)
    if kind != "scores":
        result.has_canonical_format = True
    return result


def _arrays_of_rows(matrix: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the result of :func:`_rows_of`. Raises ValueError if parts of a matrix are not
    arrays."""
    try:
        return _rows_of(matrix)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"expected parts as arrays, got others: {error}") from error


def _rows_of(matrix: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns indptr, indices and data of the rows of a matrix of any format. Those of CSR are not
    checked."""
    import scipy.sparse as sp

    shape = matrix.shape
    if matrix.format == "csr":
        return _trimmed(matrix.indptr, matrix.indices, _array(matrix.data), shape[0])
    if matrix.format in ("csc", "bsr"):
        _array(matrix.data, 3 if matrix.format == "bsr" else 1)
        high, wide = matrix.blocksize if matrix.format == "bsr" else (1, 1)
        if min(high, wide) < 1 or shape[0] % high or shape[1] % wide:
            raise ValueError(f"expected blocks that divide the shape {list(shape)}, got "
                             f"{[high, wide]}")
        lists, width = (shape[0] // high,
                        shape[1] // wide) if matrix.format == "bsr" else shape[::-1]
        indptr, indices, data = _trimmed(matrix.indptr, matrix.indices, matrix.data, lists)
        _check_lists(indptr, indices, width)
        make = sp.bsr_matrix if matrix.format == "bsr" else sp.csc_matrix
        rows = make((_number(data), indices, indptr), shape=shape).tocsr()
        if matrix.format == "bsr":
            rows.eliminate_zeros()  # zeros inside blocks
        return rows.indptr, rows.indices, rows.data
    row, column, data = _coordinates(matrix)
    for name, index, size in (("rows", row, shape[0]), ("columns", column, shape[1])):
        if len(index) != len(data):
            raise ValueError(f"expected as many {name} as values, got {len(index)} and {len(data)}")
        if len(index) and not (0 <= index.min() and index.max() < size):
            raise ValueError(f"expected {name} in [0, {size}), got {index.min()} to {index.max()}")
    rows = sp.coo_matrix((_number(data), (row, column)), shape=shape).tocsr()
    return rows.indptr, rows.indices, rows.data


def _coordinates(matrix: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns row, column and value of each entry of a COO, DOK, LIL or DIA matrix, unchecked."""
    if matrix.format == "coo":
        return _index(matrix.row), _index(matrix.col), _array(matrix.data)
    if matrix.format == "dok":
        keys, count = list(matrix.keys()), len(matrix.keys())
        row, column = (_from_objects((key[axis] for key in keys), np.int64, count)
                       for axis in (0, 1))
        return row, column, _from_objects(matrix.values(), matrix.dtype, count)
    if matrix.format == "lil":
        counts = [
            _from_objects(map(len, lists), np.int64, len(lists))
            for lists in (_array(matrix.rows), _array(matrix.data))
        ]
        if not np.array_equal(counts[0], counts[1]):
            raise ValueError("expected as many columns as values in each row, got others")
        count = int(counts[0].sum())
        column, data = (_from_objects(itertools.chain.from_iterable(lists), dtype, count)
                        for lists, dtype in ((matrix.rows, np.int64), (matrix.data, matrix.dtype)))
        return np.repeat(np.arange(len(counts[0])), counts[0]), column, data
    offsets, data = _index(matrix.offsets), _array(matrix.data, 2)
    if len(offsets) != len(data):
        raise ValueError(f"expected as many offsets as diagonals, got {len(offsets)} and "
                         f"{len(data)}")
    # Other diagonals lie outside of the matrix.
    inside = (offsets > -matrix.shape[0]) & (offsets < matrix.shape[1])
    offsets, data = offsets[inside], data[inside, :matrix.shape[1]]
    diagonal, column = data.nonzero()
    row = column - offsets[diagonal]
    there = (row >= 0) & (row < matrix.shape[0])
    return row[there], column[there], data[diagonal[there], column[there]]


def _from_objects(values: Iterable[Any], dtype: Any, count: int) -> np.ndarray:
    """Returns Python numbers as an array."""
    try:
        return np.fromiter(values, dtype, count)
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        raise ValueError(f"expected numbers of {np.dtype(dtype)}, got others: {error}") from error


def _trimmed(indptr: Any, indices: Any, data: Any,
             lists: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the parts of a matrix of `lists` rows or columns, without unused entries after the
    last one."""
    if len(_index(indptr)) != lists + 1:
        raise ValueError(f"expected {lists + 1} offsets, got {len(indptr)}")
    count = int(indptr[-1])
    if not 0 <= count <= min(len(_index(indices)), len(data)):
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


def _named(owner: str, argument: str, reason: str) -> ValueError:
    """Returns the error for inconsistent parts of a matrix, naming the caller and its argument."""
    reason = reason.removeprefix("canonical_rows: ").removeprefix("expected ")
    if reason.startswith("values "):
        return ValueError(f"{owner}: expected {argument} {reason.removeprefix('values ')}")
    return ValueError(f"{owner}: expected {argument} as a sound sparse matrix, got one whose parts "
                      f"contradict each other (expected {reason})")


def _array(part: Any, dimensions: int = 1) -> np.ndarray:
    if not isinstance(part, np.ndarray) or part.ndim != dimensions:
        raise ValueError(f"expected parts as arrays of {dimensions} dimensions, got "
                         f"{type(part).__name__} of shape {list(np.shape(part))}")
    return part


def _index(part: Any) -> np.ndarray:
    """Returns indices as int32 or int64."""
    if _array(part).dtype.kind not in "iu":
        raise ValueError(f"expected indices of an integer dtype, got {part.dtype}")
    return part if part.dtype in (np.int32, np.int64) else part.astype(np.int64)


def _number(data: np.ndarray) -> np.ndarray:
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
        indptr, indices, data = _arrays_of_rows(matrix)
        with np.errstate(over="ignore"):
            return tensor_of(_index(indptr)), tensor_of(_index(indices)), tensor_of(
                data.astype(np.float32, copy=False))
    except ValueError as error:
        raise _named(owner, argument, str(error)) from error


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
