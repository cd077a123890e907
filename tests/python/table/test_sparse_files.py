"""Files of sparse matrices: values survive saving; malformed files, changed bytes and pipes are
refused."""

import contextlib
import os
import signal
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparse_checks import CONTAINERS, MODEL, X, Y, saved
from xsoftmax.datasets import read_examples, read_sparse


def test_predictions_of_files_keep_their_order_and_their_zeros(tmp_path):
    logs = MODEL.predict(X, 5, transform="log-l3-hinge")
    assert logs.data.max(
    ) < 1e-30, "logs of scores in (0, 1], the best of which are stored as 2^-126"
    logs.data[logs.indptr[:-1]] = 0.0
    found = read_sparse(saved(tmp_path, logs), scores=True)
    assert np.array_equal(found.indices, logs.indices) and np.array_equal(found.data, logs.data)
    with pytest.raises(TypeError, match="read_sparse: expected scores of type bool"):
        read_sparse(tmp_path / "0.npz", scores=1)


class Stuck(Exception):
    pass


@contextlib.contextmanager
def within(seconds):
    def stop(*_):
        raise Stuck

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.txt.gz", "pipe.npz"])
def test_a_pipe_is_refused_without_waiting(tmp_path, name):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    sp.save_npz(tmp_path / "y.npz", Y)
    labels = tmp_path / "y.npz" if name.endswith(".npz") else None
    calls = [
        lambda: read_examples(pipe, labels), lambda: read_sparse(pipe),
        lambda: torch.ops.xsoftmax.read_examples(str(pipe))
    ]
    for call in calls:
        with within(10), pytest.raises(ValueError, match="as a file, got a (FIFO|device)"):
            call()
    if sys.platform.startswith("linux"):
        with within(10), pytest.raises(ValueError, match="as a file, got a (FIFO|device)"):
            read_sparse("/dev/zero")
    for call, error in ((lambda: read_sparse(tmp_path), IsADirectoryError),
                        (lambda: read_sparse(tmp_path / "none"), FileNotFoundError)):
        with pytest.raises(error, match="read_sparse: "):
            call()


def arrays_of(matrix):
    kept = {
        "format": np.array(matrix.format.encode()), "shape": np.array(matrix.shape),
        "data": matrix.data
    }
    names = {"coo": ("row", "col"), "dia": ("offsets",)}.get(matrix.format, ("indices", "indptr"))
    return {**kept, **{name: getattr(matrix, name) for name in names}}


def spoilt(random, arrays):
    """Changes the arrays of a .npz in one to three places."""
    arrays = {name: np.array(part) for name, part in arrays.items()}
    far = [-1, 0, 1, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 10**6]
    for _ in range(random.integers(1, 4)):
        name = random.choice([name for name in arrays if name != "format"])
        part = arrays[name]
        change = random.integers(7)
        if change == 0 and part.size:  # change one number
            part = part.astype(np.int64) if part.dtype.kind == "i" else part
            part.flat[random.integers(
                part.size)] = random.choice(far) if part.dtype.kind == "i" else random.choice(
                    [np.nan, np.inf, 0, 1e30])
        elif change == 1:
            part = part[:random.integers(len(part) + 1)]
        elif change == 2 and part.size:
            part = part[random.permutation(len(part))]
        elif change == 3:
            part = part.astype(
                random.choice(["f8", "i8", "u1", "u8", "i2", "f2", "c8", "?", "S3", ">i4"]))
        elif change == 4:
            part = part.reshape(random.choice([1, -1]), *part.shape[::random.choice([1, -1])])
        elif change == 5 and name == "indptr":
            part = np.r_[0, np.full(max(len(part) - 2, 0), 10**6), 0]
        elif change == 6:
            arrays["format"] = np.array(
                random.choice([b"csr", b"csc", b"bsr", b"coo", b"dia", b"lil", b"none"]))
        if name == "shape":  # large sizes need much memory, which is not an error
            part = np.where(np.abs(part.astype(np.int64, casting="unsafe")) > 10**6, 10**6,
                            part) if part.dtype.kind in "iu" else part
        arrays[name] = part
    return arrays


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("container", [*CONTAINERS[:8], *CONTAINERS[-2:]],
                         ids=lambda container: container.__name__)
def test_malformed_files(container, tmp_path):
    """Randomly changed parts give a sound matrix or a ValueError, never a crash or an index outside
    the shape."""
    random = np.random.default_rng(CONTAINERS.index(container))
    source = arrays_of(container(X[:8, :6]))
    path, labels = tmp_path / "x.npz", saved(tmp_path, Y[:8])
    refused = 0
    for _ in range(250):
        np.savez(path, **spoilt(random, source))
        try:
            found = [read_examples(path, labels)[0], read_examples(labels, path)[1]]
        except ValueError as error:
            assert "x.npz" in str(error)
            refused += 1
            continue
        for part in found:
            assert part.ndim == 2 and part.indptr[0] == 0 and (np.diff(
                part.indptr) >= 0).all() and part.indptr[-1] == len(part.data) == len(part.indices)
            assert part.nnz == 0 or (0 <= part.indices.min() and part.indices.max() < part.shape[1])
            assert np.isfinite(part.data).all() and part.has_canonical_format and (
                part.data != 0).all() and part.dtype == np.float32
    assert 20 < refused < 250


@pytest.mark.filterwarnings("ignore")
def test_files_with_changed_bytes(tmp_path):
    random = np.random.default_rng(0)
    sound, path = saved(tmp_path, X[:8]).read_bytes(), tmp_path / "x.npz"
    for _ in range(150):
        text = bytearray(sound[:random.integers(1, len(sound))] if random.random() < 0.2 else sound)
        for _ in range(random.integers(1, 5)):
            text[random.integers(len(text))] = random.integers(256)
        path.write_bytes(text)
        with contextlib.suppress(ValueError, MemoryError):
            read_sparse(path).check_format(full_check=True)
