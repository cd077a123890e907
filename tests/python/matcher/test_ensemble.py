"""combine_predictions equals a loop over dictionaries."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse as sp

import xsoftmax as xs


def some(seed, rows=30, labels=50, entries=6):
    random = np.random.default_rng(seed)
    counts = random.integers(0, entries + 1, rows)
    counts[0] = 0
    indices = np.concatenate([random.permutation(labels)[:c] for c in counts])
    data = np.concatenate([-np.sort(-random.random(c)) for c in counts]).astype(np.float32)
    return sp.csr_matrix((data, indices, np.r_[0, np.cumsum(counts)]), shape=(rows, labels))


def lists(matrix):
    return [
        list(zip(matrix.indices[a:b].tolist(), matrix.data[a:b].tolist()))
        for a, b in zip(matrix.indptr, matrix.indptr[1:])
    ]


def naive(predictions, method, topk, weights):
    total = sum(weights)
    for rows in zip(*map(lists, predictions)):
        rows = [sorted(row, key=lambda pair: -pair[1]) for row in rows]
        longest, scores = max(max(map(len, rows)), 1), {}
        for model, row in enumerate(rows):
            share = weights[model] / total
            for rank, (label, score) in enumerate(row):
                value = {
                    "average": score, "rank": (longest - rank) / longest,
                    "softmax": math.exp(score) / sum(math.exp(s) for _, s in row)
                }.get(method, 0) * share
                scores[label] = scores.get(label, 0) + value
        if method == "round_robin":
            order = []
            for rank, row in itertools.product(range(longest), rows):
                if rank < len(row) and row[rank][0] not in order:
                    order.append(row[rank][0])
            yield order[:topk]
        else:
            yield sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:topk]


@pytest.mark.parametrize("method", ["average", "rank", "softmax", "round_robin"])
@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5]])
def test_each_method_equals_a_loop(method, weights):
    predictions = [some(seed) for seed in range(3)]
    if method == "round_robin" and weights is not None:
        with pytest.raises(ValueError, match="expected weights for 3 predictions and a mean"):
            xs.combine_predictions(predictions, method, weights=weights)
        return
    found = lists(xs.combine_predictions(predictions, method, 5, weights))
    for one, want in zip(found, naive(predictions, method, 5, weights or [1, 1, 1])):
        if method == "round_robin":
            assert [label for label, _ in one] == want
            assert all(a > b > 0
                       for a, b in zip([s for _, s in one] + [1.1], [s for _, s in one][1:]))
        else:
            np.testing.assert_allclose([s for _, s in one], [s for _, s in want], rtol=1e-5)
            ties = len({round(s, 5) for _, s in want}) < len(want)
            assert ties or [label for label, _ in one] == [label for label, _ in want]


def test_a_single_prediction_is_unchanged():
    one = some(0)
    assert lists(xs.combine_predictions([one], topk=50)) == lists(one)


@pytest.mark.parametrize("call, error, message", [
    (lambda: xs.combine_predictions([]), ValueError, "at least one"),
    (lambda: xs.combine_predictions([some(0), np.ones(3)]), TypeError, r"predictions\[1\] as a "
     r"scipy sparse matrix, got "
     r"ndarray"),
    (lambda: xs.combine_predictions([some(0), some(1, rows=3)]), ValueError, r"one shape, got "
     r"\[30, 50\] and \[3, "
     r"50\] at \[1\]"),
    (lambda: xs.combine_predictions([some(0)], "mean"), ValueError, "method as one of"),
    (lambda: xs.combine_predictions([some(0)], topk=0), ValueError, "topk of at least 1"),
    (lambda: xs.combine_predictions([some(0)], weights=[-1.0]), ValueError,
     "weights of at least 0"),
    (lambda: xs.combine_predictions([some(0) * np.inf]), ValueError, "finite scores"),
])
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_average_of_scores_below_zero_is_refused():
    """A label that a model does not predict has the score 0, which would be the best."""
    logs = sp.csr_matrix(np.array([[-1.0, -2.0, 0.0]]))
    with pytest.raises(ValueError, match='at least 0 for "average"'):
        xs.combine_predictions([logs, logs], "average")
    assert xs.combine_predictions([logs, logs], "softmax", 1).indices.tolist() == [0]
