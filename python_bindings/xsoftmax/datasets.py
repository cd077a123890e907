"""Files of examples for extreme multi-label classification."""

import contextlib
import gzip
import shutil
import sys
import tempfile
import zlib
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Iterator, Optional, Tuple, TYPE_CHECKING, Union

import torch

from ._public import public_names
from ._sparse import checked, csr_matrix

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["read_examples", "read_sparse"]
__dir__ = public_names(__all__)

PathName = Union[str, "PathLike[str]"]


def read_examples(path: PathName, labels: Optional[PathName] = None) -> Tuple["scipy.sparse.csr_matrix", "scipy.sparse.csr_matrix"]:
    """Examples and their labels as CSR matrices (X float32 [n, D], Y float32 [n, L] of ones).

    Args:
        path: a text file in the format of the extreme classification repository: a header ``examples features labels``, then a line for each
            example, its labels joined by commas, a space and ``feature:value`` pairs, all ids from 0, features rising; compressed by gzip where it ends
            in ``.gz``. Or, where it ends in ``.npz``, X as scipy.sparse.save_npz writes it. ``-``: such text from standard input, compressed or not.
        labels: Y, beside an X in ``.npz``.

    Raises:
        FileNotFoundError: there is no such file. IsADirectoryError: it is a folder. ValueError: file, line and text of what is wrong.
    """
    if str(path).endswith(".npz"):
        if labels is None:
            raise ValueError(f"read_examples: expected labels beside {path}, got None")
        X, Y = read_sparse(path).astype("float32", copy=False), read_sparse(labels).astype("float32", copy=False)
        Y.eliminate_zeros()
        Y.data[:] = 1
        if X.shape[0] != Y.shape[0]:
            raise ValueError(f"read_examples: expected as many rows in {path} and {labels}, got {X.shape[0]} and {Y.shape[0]}")
        return X, Y
    if labels is not None:
        raise ValueError(f"read_examples: expected labels beside a .npz file alone, got {labels} beside {path}")
    if fspath(path) != "-" and not Path(path).exists():
        raise FileNotFoundError(f"read_examples: there is no file {path}")
    if Path(path).is_dir():
        raise IsADirectoryError(f"read_examples: expected a file, got the folder {path}")
    with _plain_text(path) as plain:
        try:
            offsets, features, values, label_offsets, ids, num_features, num_labels = torch.ops.xsoftmax.read_examples(plain)
        except ValueError as error:  # it names the file
            raise ValueError(str(error).replace(plain, fspath(path))) from None
    n = len(offsets) - 1
    return csr_matrix(offsets, features, values, (n, num_features)), csr_matrix(label_offsets, ids, torch.ones(len(ids)), (n, num_labels))


@contextlib.contextmanager
def _plain_text(path: PathName) -> Iterator[str]:
    """The name of a file with the text, which may be a temporary one."""
    name = fspath(path)
    if name != "-" and not name.endswith(".gz"):
        yield name
        return
    with contextlib.ExitStack() as stack:
        source: Any = sys.stdin.buffer if name == "-" else stack.enter_context(open(name, "rb"))
        compressed = name != "-" or source.peek(2)[:2] == b"\x1f\x8b"
        plain = stack.enter_context(tempfile.NamedTemporaryFile(prefix="xsoftmax-", suffix=".txt"))
        try:
            shutil.copyfileobj(gzip.GzipFile(fileobj=source) if compressed else source, plain, 1 << 20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"read_examples: expected {name} as text compressed by gzip, got another file ({error})") from error
        plain.flush()
        yield plain.name


def read_sparse(path: PathName) -> "scipy.sparse.csr_matrix":
    """What scipy.sparse.save_npz wrote, as CSR.

    Raises:
        FileNotFoundError: there is no such file. ValueError: it holds something else.
    """
    import scipy.sparse as sp

    try:
        matrix = sp.load_npz(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"read_sparse: there is no file {path}") from None
    except Exception as error:  # zip's, numpy's and scipy's own, which advise to load what nobody checks
        raise ValueError(f"read_sparse: expected {path} as scipy.sparse.save_npz writes it, got another file") from error
    return checked("read_sparse", str(path), matrix)
