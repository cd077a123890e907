"""A small problem and model for the tests of hierarchical linear models."""

import numpy as np
import scipy.sparse as sp
import torch

import xsoftmax as xs


def problem(rows=300, features=60, labels=40, seed=0):
    """Returns examples X, sums of the centres of their one to three labels Y, with unit rows."""
    random = np.random.default_rng(seed)
    centres = sp.random(labels, features, 0.15, random_state=random).toarray() + 1e-3
    Y = np.zeros((rows, labels), bool)
    for i in range(rows):
        Y[i, random.choice(labels, random.integers(1, 4), replace=False)] = True
    X = Y @ centres + 0.05 * sp.random(rows, features, 0.2, random_state=random).toarray()
    X[X < 0.02] = 0
    X /= np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-9)
    return sp.csr_matrix(X.astype(np.float32)), sp.csr_matrix(Y.astype(np.float32))


def small(X, Y, **options):
    return xs.XRLinear.train(X, Y, arity=3, max_leaf_size=5,
                             generator=torch.Generator().manual_seed(0), **options)


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def layer_margins(model, X):
    """Yields (first_child, margins [n, nodes] in float64) of each layer, from dense weights."""
    X = np.hstack([X.toarray().astype(np.float64), np.full((X.shape[0], 1), model.bias)])
    for depth in range(model.depth):
        first_child, chunk, feature, more, child, value = (part.numpy()
                                                           for part in model.model.layer(depth))
        weight = np.zeros((first_child[-1], X.shape[1]))
        entry = 0
        for p in range(len(first_child) - 1):
            for row in range(chunk[p], chunk[p + 1]):
                for entry in range(entry, entry + int(more[row]) + 1):
                    weight[first_child[p] + child[entry], feature[row]] = value[entry]
                entry += 1
        yield first_child, X @ weight.T


def parts(model):
    return [part for depth in range(model.depth)
            for part in model.model.layer(depth)] + [model.model.labels()]
