"""Sparse matrices of every format, for the tests."""

import scipy.sparse as sp

from xr_linear_checks import problem, small

FORMATS = ["csr", "csc", "bsr", "coo", "lil", "dok", "dia"]
CONTAINERS = [getattr(sp, f"{name}_{kind}") for name in FORMATS for kind in ("matrix", "array")]
X, Y = problem(rows=60, features=20, labels=12)
MODEL = small(X, Y)


def saved(folder, matrix):
    path = folder / f"{len(list(folder.iterdir()))}.npz"
    sp.save_npz(path, matrix)
    return path
