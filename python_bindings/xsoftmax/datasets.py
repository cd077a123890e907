"""Files of examples for extreme multi-label classification."""

import contextlib
import gzip
import shutil
import sys
import tempfile
import zlib
from os import PathLike, fspath
from typing import Any, Iterator, Optional, Tuple, TYPE_CHECKING, Union

import torch

from ._checks import check_bool
from ._files import open_regular
from ._public import public_names
from ._sparse import canonical, csr_matrix

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
            in ``.gz``. Or, where it ends in ``.npz``, X as scipy.sparse.save_npz writes it. ``-``: such text from standard input, compressed or not;
            pipes have no other name.
        labels: Y, beside an X in ``.npz``.

    Raises:
        FileNotFoundError: there is no such file. IsADirectoryError: it is a folder. ValueError: file, line and text of what is wrong; a pipe
            or a device; a number that is not finite in float32.
    """
    if str(path).endswith(".npz"):
        if labels is None:
            raise ValueError(f"read_examples: expected labels beside {path}, got None")
        X, Y = read_matrix("read_examples", path), read_matrix("read_examples", labels, "labels")
        if X.shape[0] != Y.shape[0]:
            raise ValueError(f"read_examples: expected as many rows in {path} and {labels}, got {X.shape[0]} and {Y.shape[0]}")
        return X, Y
    if labels is not None:
        raise ValueError(f"read_examples: expected labels beside a .npz file alone, got {labels} beside {path}")
    if fspath(path) != "-":
        open_regular("read_examples", path).close()
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
        source: Any = sys.stdin.buffer if name == "-" else stack.enter_context(open_regular("read_examples", name))
        compressed = name != "-" or source.peek(2)[:2] == b"\x1f\x8b"
        plain = stack.enter_context(tempfile.NamedTemporaryFile(prefix="xsoftmax-", suffix=".txt"))
        try:
            shutil.copyfileobj(gzip.GzipFile(fileobj=source) if compressed else source, plain, 1 << 20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"read_examples: expected {name} as text compressed by gzip, got another file ({error})") from error
        plain.flush()
        yield plain.name


def read_sparse(path: PathName, *, scores: bool = False) -> "scipy.sparse.csr_matrix":
    """What scipy.sparse.save_npz wrote, as CSR in canonical form: float32, columns that rise in each row, entries of one column summed, no stored zeros.

    Args:
        scores: predictions, such as those of :meth:`xsoftmax.XRLinear.predict`: they keep their dtype and the order of a row, and zeros count.

    Raises:
        FileNotFoundError: there is no such file. IsADirectoryError: it is a folder. ValueError: it holds something else, or a value that is not finite in
            float32 (NaN, among scores).
    """
    return read_matrix("read_sparse", path, "scores" if check_bool("read_sparse", "scores", scores) else "features")


def read_matrix(owner: str, path: PathName, kind: str = "features") -> "scipy.sparse.csr_matrix":
    """A .npz of one of the kinds of :func:`xsoftmax._sparse.canonical`."""
    import scipy.sparse as sp

    with open_regular(owner, path) as file:
        try:
            matrix = sp.load_npz(file)
        except MemoryError:
            raise MemoryError(f"{owner}: {path} asks for more memory than there is") from None
        except Exception as error:  # zip's, numpy's and scipy's own, which advise to load what nobody checks
            raise ValueError(f"{owner}: expected {path} as scipy.sparse.save_npz writes it, got another file") from error
    try:
        return canonical(owner, str(path), matrix, kind)
    except TypeError as error:  # of what the file holds, not of an argument
        raise ValueError(str(error)) from error
