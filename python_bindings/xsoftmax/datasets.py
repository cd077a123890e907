"""Readers for data files of extreme multi-label classification."""

import contextlib
import gzip
import shutil
import sys
import tempfile
import zlib
from os import PathLike, fspath
from typing import Any, Iterator, Optional, Tuple, TYPE_CHECKING, Union

import torch

from ._core.checks import check_bool
from ._core.files import open_regular
from ._core.public import public_names
from ._core.sparse import canonical, csr_matrix

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["read_examples", "read_sparse"]
__dir__ = public_names(__all__)

PathName = Union[str, "PathLike[str]"]


def read_examples(
    path: PathName, labels: Optional[PathName] = None
) -> Tuple["scipy.sparse.csr_matrix", "scipy.sparse.csr_matrix"]:
    """Reads examples and their labels from files.

    Args:
        path: one of

            - a text file in the format of the Extreme Classification Repository: a header
              ``examples features labels``, then one line per example with its labels joined by
              commas, a space, and ``feature:value`` pairs. All ids start at 0, and features are in
              increasing order. A name that ends in ``.gz`` is decompressed.
            - a ``.npz`` file with X, written by scipy.sparse.save_npz.
            - ``-``: the text format from standard input, plain or compressed with gzip. This is the
              only way to read from a pipe.

        labels: the ``.npz`` file with Y; required if X is in a ``.npz`` file.

    Returns:
        CSR matrices X float32 [n, D] and Y float32 [n, L], whose values are all 1.

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: the path is a folder.
        ValueError: the file is malformed (the message gives file, line and text), is a pipe or a
            device, or has a value that is not finite in float32.
    """
    if str(path).endswith(".npz"):
        if labels is None:
            raise ValueError(f"read_examples: expected labels beside {path}, got None")
        X, Y = read_matrix("read_examples", path), read_matrix("read_examples", labels, "labels")
        if X.shape[0] != Y.shape[0]:
            raise ValueError(f"read_examples: expected as many rows in {path} and {labels}, got "
                             f"{X.shape[0]} and {Y.shape[0]}")
        return X, Y
    if labels is not None:
        raise ValueError(f"read_examples: expected labels beside a .npz file alone, got {labels} "
                         f"beside {path}")
    if fspath(path) != "-":
        open_regular("read_examples", path).close()
    with _open_text(path) as text_path:
        try:
            (offsets, features, values, label_offsets, ids, num_features,
             num_labels) = torch.ops.xsoftmax.read_examples(text_path)
        except ValueError as error:  # the message names the plain file, which may be temporary
            raise ValueError(str(error).replace(text_path, fspath(path))) from None
    n = len(offsets) - 1
    return csr_matrix(offsets, features, values,
                      (n, num_features)), csr_matrix(label_offsets, ids, torch.ones(len(ids)),
                                                     (n, num_labels))


@contextlib.contextmanager
def _open_text(path: PathName) -> Iterator[str]:
    """Yields the name of an uncompressed file with the text, which may be a temporary file."""
    name = fspath(path)
    if name != "-" and not name.endswith(".gz"):
        yield name
        return
    with contextlib.ExitStack() as stack:
        source: Any = sys.stdin.buffer if name == "-" else stack.enter_context(
            open_regular("read_examples", name))
        compressed = name != "-" or source.peek(2)[:2] == b"\x1f\x8b"
        text_file = stack.enter_context(
            tempfile.NamedTemporaryFile(prefix="xsoftmax-", suffix=".txt"))
        try:
            shutil.copyfileobj(
                gzip.GzipFile(fileobj=source) if compressed else source, text_file, 1 << 20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"read_examples: expected {name} as text compressed by gzip, got "
                             f"another file ({error})") from error
        text_file.flush()
        yield text_file.name


def read_sparse(path: PathName, *, scores: bool = False) -> "scipy.sparse.csr_matrix":
    """Reads a sparse matrix written by scipy.sparse.save_npz.

    Args:
        path: the ``.npz`` file.
        scores: read predictions, such as those of :meth:`xsoftmax.XRLinear.predict`: the dtype, the
            order of entries within a row, and stored zeros are preserved.

    Returns:
        CSR in canonical form: float32, columns in increasing order, duplicates summed, no stored
        zeros (except as described for ``scores``).

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: the path is a folder.
        ValueError: the file has other contents, or a value that is not finite in float32 (for
            scores: NaN).
    """
    return read_matrix("read_sparse", path,
                       "scores" if check_bool("read_sparse", "scores", scores) else "features")


def read_matrix(owner: str, path: PathName, kind: str = "features") -> "scipy.sparse.csr_matrix":
    """Reads a .npz file as one of the kinds of :func:`xsoftmax._core.sparse.canonical`."""
    import scipy.sparse as sp

    with open_regular(owner, path) as file:
        try:
            matrix = sp.load_npz(file)
        except MemoryError:
            raise MemoryError(f"{owner}: {path} asks for more memory than there is") from None
        # zip, numpy and scipy raise many types, and their messages may advise allow_pickle=True
        except Exception as error:
            raise ValueError(f"{owner}: expected {path} as scipy.sparse.save_npz writes it, got "
                             "another file") from error
    try:
        return canonical(owner, str(path), matrix, kind)
    except TypeError as error:  # the contents of the file are wrong, not the type of an argument
        raise ValueError(str(error)) from error
