"""Readers for data files of extreme multi-label classification."""

import contextlib
import gzip
import io
import re
import shutil
import sys
import tempfile
import zlib
from os import PathLike, fspath
from typing import Any, Iterator, List, Optional, Sequence, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch

from ._core.checks import check_bool, check_count
from ._core.files import open_regular
from ._core.public import public_names
from ._core.sparse import canonical, csr_matrix

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["read_annif", "read_examples", "read_libsvm", "read_sparse"]
__dir__ = public_names(__all__)

PathName = Union[str, "PathLike[str]"]

_URI = re.compile("<[^<>\\s]+>")


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
            raise ValueError(f"read_examples: expected labels for {path}, got None")
        X, Y = read_matrix("read_examples", path), read_matrix("read_examples", labels, "labels")
        if X.shape[0] != Y.shape[0]:
            raise ValueError(f"read_examples: expected as many rows in {path} and {labels}, got "
                             f"{X.shape[0]} and {Y.shape[0]}")
        return X, Y
    if labels is not None:
        raise ValueError(f"read_examples: expected labels only for a .npz file, got {labels} "
                         f"for {path}")
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


def read_libsvm(
    path: PathName, *, classes: Optional[Sequence[float]] = None,
    num_features: Optional[int] = None, zero_based: Optional[bool] = None
) -> Tuple["scipy.sparse.csr_matrix", "scipy.sparse.csr_matrix", np.ndarray]:
    """Reads a file of classes in the format of LIBSVM, such as Sector or ALOI, with
    ``sklearn.datasets.load_svmlight_file``: per line a class, or several joined by commas, and
    ``feature:value`` pairs.

    Args:
        path: a text file; a name that ends in ``.gz`` or ``.bz2`` is decompressed.
        classes: the classes, in the order of the columns of Y, such as those that this function
            returned for the training file. None: those of the file, in increasing order.
        num_features: the number of features of X, since a test file may lack the last ones. None:
            the largest in the file.
        zero_based: whether features are counted from 0. None: True if the file has a feature 0.
            Pass the value of the training file for its test file, which may lack feature 0.

    Returns:
        CSR matrices X float32 [n, D] and Y float32 [n, L], whose values are all 1, and the classes
        float64 [L].

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is malformed; it has a class that is not one of ``classes``; or it has
            more features than ``num_features``.
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        raise ImportError("read_libsvm: expected scikit-learn to be installed: pip install "
                          "scikit-learn") from error
    if classes is not None and (np.asarray(classes).ndim != 1
                                or np.asarray(classes).dtype.kind not in "iuf"):
        raise TypeError("read_libsvm: expected classes as a list of numbers, got "
                        f"{type(classes).__name__}")
    if zero_based is not None:
        check_bool("read_libsvm", "zero_based", zero_based)
    if num_features is not None:
        check_count("read_libsvm", "num_features", num_features, 1)
    open_regular("read_libsvm", path).close()
    try:
        X, found = load_svmlight_file(fspath(path), n_features=num_features, multilabel=True,
                                      zero_based="auto" if zero_based is None else zero_based)
    except (ValueError, OverflowError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"read_libsvm: expected {fspath(path)} in the format of LIBSVM: "
                         f"{error}") from error
    labels = np.array([label for row in found for label in row], np.float64)
    kinds = np.unique(labels) if classes is None else np.asarray(classes, np.float64)
    rows = np.repeat(np.arange(len(found)), [len(row) for row in found])
    Y = _label_matrix("read_libsvm", path, rows, labels, kinds, len(found))
    return canonical("read_libsvm", fspath(path), X), Y, kinds


def read_annif(
    path: PathName, *, subjects: Optional[Sequence[str]] = None
) -> Tuple[List[str], "scipy.sparse.csr_matrix", List[str]]:
    """Reads a corpus of short texts in the format of Annif: per line a text, a tab, and the URIs of
    its subjects in angle brackets, separated by spaces. Empty lines are skipped.

    ``sklearn.feature_extraction.text.TfidfVectorizer`` makes X of the texts.

    Args:
        path: a text file in UTF-8; a name that ends in ``.gz`` is decompressed.
        subjects: the URIs, in the order of the columns of Y, such as those that this function
            returned for the training file. None: those of the file, in alphabetical order.

    Returns:
        The texts; Y, CSR float32 [n, L], whose values are all 1; and the URIs of the L subjects.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line is malformed, or has a subject that is not one of ``subjects``. The
            message gives file, line and text.
    """
    texts: List[str] = []
    rows: List[int] = []
    uris: List[str] = []
    with open_regular("read_annif", path) as file:
        lines = gzip.GzipFile(fileobj=file) if fspath(path).endswith(".gz") else file
        try:
            for number, line in enumerate(io.TextIOWrapper(lines, "utf-8-sig"), 1):
                if not line.strip():
                    continue
                text, tab, ends = line.rstrip("\n").partition("\t")
                found = ends.split()
                if not tab or not all(_URI.fullmatch(uri) for uri in found):
                    raise ValueError(f"read_annif: expected a text, a tab and <URI>s in "
                                     f"{fspath(path)}, line {number}, got {line[:80]!r}")
                rows += [len(texts)] * len(found)
                texts.append(text)
                uris += [uri[1:-1] for uri in found]
        except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"read_annif: expected {fspath(path)} as text in UTF-8, got another "
                             f"file ({error})") from error
    if subjects is not None and (isinstance(subjects, str) or not isinstance(subjects, Sequence)):
        raise TypeError("read_annif: expected subjects as a list of URIs, got "
                        f"{type(subjects).__name__}")
    kinds = sorted(set(uris)) if subjects is None else list(subjects)
    Y = _label_matrix("read_annif", path, np.array(rows, np.int64), np.array(uris, object),
                      np.array(kinds, object), len(texts))
    return texts, Y, kinds


def _label_matrix(owner: str, path: PathName, rows: np.ndarray, labels: np.ndarray,
                  kinds: np.ndarray, count: int) -> "scipy.sparse.csr_matrix":
    """Returns the pairs of rows and labels, each a column of the kinds."""
    import scipy.sparse as sp

    column = {kind: i for i, kind in enumerate(kinds)}
    if len(column) != len(kinds):
        raise ValueError(f"{owner}: expected different labels, got one of them twice")
    for label, row in zip(labels, rows):
        if label not in column:
            raise ValueError(f"{owner}: expected labels out of {len(kinds)}, got {label} in "
                             f"example {row + 1} of {fspath(path)}")
    pairs = sp.csr_matrix((np.ones(len(rows), np.float32),
                           (rows, np.array([column[label] for label in labels], np.int64))),
                          shape=(count, len(kinds)))
    return canonical(owner, fspath(path), pairs, "labels")


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
