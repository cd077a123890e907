"""xs.metrics: values by hand, equality with a loop over the definitions, and errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xsoftmax as xs

scipy_sparse = pytest.importorskip("scipy.sparse")

METRICS = [xs.metrics.precision_at_k, xs.metrics.recall_at_k, xs.metrics.ndcg_at_k]


def naive(predictions: list[list[int]], truth: list[list[int]], k: int) -> list[float]:
    """Returns precision, recall and NDCG, computed query by query."""
    sums, queries = [0.0, 0.0, 0.0], 0
    for row, right in zip(predictions, map(set, truth)):
        if not right:
            continue
        hits = [place for place, item in enumerate(row[:k], 1) if item in right]
        ideal = sum(1 / math.log2(place + 1) for place in range(1, min(len(right), k) + 1))
        for i, value in enumerate((len(hits) / k, len(hits) / len(right),
                                   sum(1 / math.log2(place + 1) for place in hits) / ideal)):
            sums[i] += value
        queries += 1
    return [value / queries for value in sums]


def test_metrics_equal_values_by_hand():
    predictions = torch.tensor([[3, 1, 2, 0], [5, 6, -1, -1], [0, 1, 2, 3]])
    truth = [[1, 0, 9], [6], []]  # the last query has no right class and is skipped
    assert xs.metrics.precision_at_k(predictions, truth, 2) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert xs.metrics.precision_at_k(predictions, truth, 4) == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert xs.metrics.recall_at_k(predictions, truth, 2) == pytest.approx((1 / 3 + 1) / 2)
    second = 1 / math.log2(3)
    assert xs.metrics.ndcg_at_k(predictions, truth, 2) == pytest.approx(
        (second / (1 + second) + second) / 2)
    fourth = 1 / math.log2(5)
    assert xs.metrics.ndcg_at_k(predictions, truth, 4) == pytest.approx(
        ((second + fourth) / (1 + second + 1 / 2) + second) / 2)


def test_a_perfect_ranking_is_worth_one():
    truth = [[4, 2], [0, 1, 2, 3, 4], [7]]
    predictions = torch.tensor([[2, 4, 0, 1], [4, 3, 2, 1], [7, 0, 1, 2]])
    assert xs.metrics.ndcg_at_k(predictions, truth, 4) == pytest.approx(1)
    assert xs.metrics.precision_at_k(predictions, truth, 1) == 1
    assert xs.metrics.recall_at_k(predictions[:1], truth[:1], 4) == 1


@st.composite
def rankings(draw):
    classes = draw(st.integers(1, 12))
    width = draw(st.integers(1, classes))
    queries = draw(st.integers(1, 6))
    row = st.permutations(range(classes)).map(lambda order: order[:width])
    missing = st.integers(0, width)
    rows = draw(st.lists(st.tuples(row, missing), min_size=queries, max_size=queries))
    predictions = [part[:width - gone] + [-1] * gone for part, gone in rows]
    truth = draw(
        st.lists(st.lists(st.integers(0, classes + 2), max_size=6), min_size=queries,
                 max_size=queries))
    # at least one query has a right class
    truth[draw(st.integers(0, queries - 1))].append(draw(st.integers(0, classes - 1)))
    return predictions, truth, draw(st.integers(1, width)), classes + 3


@given(rankings())
@settings(max_examples=200)
def test_metrics_equal_a_loop_for_every_format_of_truth(case):
    predictions, truth, k, classes = case
    expected = naive(predictions, truth, k)
    matrix = scipy_sparse.lil_matrix((len(truth), classes))
    for row, right in enumerate(truth):
        matrix[row, right] = 1.0
    tensors = [torch.tensor(right, dtype=torch.int32) for right in truth]
    for form in (truth, tensors, matrix.tocsr(), scipy_sparse.csr_array(matrix)):
        found = [metric(torch.tensor(predictions), form, k) for metric in METRICS]
        assert found == pytest.approx(expected)


def test_truth_may_be_one_class_per_query():
    predictions = torch.randint(0, 50, (40, 1),
                                generator=torch.Generator().manual_seed(0)) + torch.arange(10) * 50
    truth = torch.arange(40) * 12
    for metric, expected in zip(
            METRICS, naive(predictions.tolist(), [[item] for item in truth.tolist()], 10)):
        assert metric(predictions, truth, 10) == pytest.approx(expected)


def test_stored_zeros_are_not_right_classes():
    matrix = scipy_sparse.csr_matrix(([1.0, 0.0], [0, 1], [0, 2]), shape=(1, 3))
    assert xs.metrics.recall_at_k(torch.tensor([[1]]), matrix, 1) == 0
    assert xs.metrics.recall_at_k(torch.tensor([[0]]), matrix, 1) == 1


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([[0]], [[0]
                  ], 1), TypeError, "predictions as a tensor or a scipy sparse matrix, got list"),
        ((torch.zeros(1, 1), [[0]], 1), TypeError, "int64, got torch.float32"),
        ((torch.tensor([[0]]), [[0]], 0), ValueError, "k of at least 1, got 0"),
        ((torch.tensor([[0]]), [[0]], 1.0), TypeError, "k of type int, got float"),
        ((torch.tensor([[0]]), [[0]], 2), ValueError, r"\[Q, 2 or more\], got \[1, 1\]"),
        ((torch.tensor([0]), [[0]], 1), ValueError, r"got \[1\]"),
        ((torch.tensor([[-2]]), [[0]], 1), ValueError, "-1 .none. or more, got -2"),
        ((torch.tensor([[0], [1]]), [[0]], 1), ValueError, "truth for 2 queries, as many as "
         "predictions has, got 1"),
        ((torch.tensor([[0]]), [[-3]], 1), ValueError, "0 or more in truth, got -3"),
        ((torch.tensor([[0]]), [[0.5]], 1), TypeError, r"integer dtype in truth\[0\], got "
         r"torch.float32"),
        ((torch.tensor([[0]]), [["a"]], 1), TypeError, r"class ids in truth\[0\]"),
        ((torch.tensor([[0]]), [[[0]]], 1), ValueError, r"truth\[0\] with one dimension"),
        ((torch.tensor([[0]]), torch.zeros(1), 1), TypeError, "truth of dtype int64, got "
         "torch.float32"),
        ((torch.tensor([[0]]), torch.zeros(
            1, 1, dtype=torch.int64), 1), ValueError, r"truth of shape \[Q\], got \[1, 1\]"),
        ((torch.tensor([[0]]), {0: 0}, 1), TypeError, "got dict"),
        ((torch.tensor([[0]]), scipy_sparse.csc_matrix(
            [[1.0]]).toarray(), 1), TypeError, "scipy sparse matrix, got ndarray"),
        ((torch.tensor([[4, 4, 1]]), [[0]], 3), ValueError, "different predictions for a query, "
         "got 4 twice in row 0"),
        ((torch.tensor([[0], [1]]), [[0], [1 << 62]], 1), ValueError, "below 2.63 / 2 queries, got "
         "4611686018427387904"),
        ((torch.tensor([[0]]), [[]], 1), ValueError, "a query for which a class is right, got none "
         "of 1"),
        ((torch.empty(0, 1, dtype=torch.int64), [], 1), ValueError, "got none of 0"),
    ],
)
def test_errors_name_what_was_expected(metric, arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        metric(*arguments)
    assert str(caught.value).startswith(metric.__name__ + ": ")


@pytest.mark.parametrize("metric", METRICS)
def test_swapped_truth_and_scores_are_refused(metric):
    scores, right = (scipy_sparse.csr_matrix(rows) for rows in ([[0.9, 0.2, 0.0], [0.0, 0.1, 0.7]],
                                                                [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]))
    assert metric(scores, right, 1) > 0
    with pytest.raises(ValueError,
                       match="got predictions of 1 alone.*are they the other way round"):
        metric(right, scores, 1)


def test_sparse_scores_are_ranked():
    scores = scipy_sparse.csr_matrix(([0.1, 0.9, 0.5, 0.3], [4, 2, 0, 1], [0, 3, 4, 4]),
                                     shape=(3, 5))
    truth = [[2, 4], [0], [1]]
    ids = torch.tensor([[2, 0, 4], [1, -1, -1], [-1, -1, -1]])
    for metric in METRICS:
        for k in (1, 2, 3):
            assert metric(scores, truth, k) == metric(ids, truth, k)


def test_propensity_and_psp_equal_values_by_hand():
    """PSP is 1 if the rarest right classes are first."""
    counts = torch.tensor([1000, 100, 3, 0])
    found = xs.metrics.propensity(counts, 5000)
    c = (math.log(5000) - 1) * 2.5**0.55
    torch.testing.assert_close(
        found,
        torch.tensor([1 / (1 + c * (n + 1.5)**-0.55) for n in (1000, 100, 3, 0)],
                     dtype=torch.float64))
    gain = 1 / found
    truth = [[0, 2], [1], [3, 1, 0], []]
    predictions = torch.tensor([[2, 1], [0, 1], [3, 0], [0, 1]])
    right = gain[2] + gain[1] + gain[3] + gain[0]
    best = gain[2] + gain[0] + gain[1] + gain[3] + gain[1]
    assert xs.metrics.psp_at_k(predictions, truth, 2, found) == pytest.approx(float(right / best))
    assert xs.metrics.psp_at_k(predictions, truth, 1, found) == pytest.approx(
        float((gain[2] + gain[3]) / (gain[2] + gain[1] + gain[3])))
    assert xs.metrics.psp_at_k(torch.tensor([[2, 0], [1, 0], [3, 1], [0, 1]]), truth, 2,
                               found) == pytest.approx(1)
    same = torch.ones(4, dtype=torch.float64)
    assert xs.metrics.psp_at_k(predictions, truth, 1,
                               same) == xs.metrics.precision_at_k(predictions, truth, 1)
    for bad, error, message in (((torch.ones(3)), ValueError, "shape"), (torch.zeros(4), ValueError,
                                                                         r"in \(0, 1\], got 0"),
                                ([1.0], TypeError, "list")):
        with pytest.raises(error, match=message):
            xs.metrics.psp_at_k(predictions, truth, 1, bad)
    for arguments in ((counts, 2), (-counts, 5000), (counts.view(2, 2), 5000),
                      (torch.tensor([math.inf]), 5000), (counts, 5000, 0.5, -3.0)):
        with pytest.raises(ValueError, match="propensity: expected"):
            xs.metrics.propensity(*arguments)


def test_coverage_is_the_share_of_targets_among_candidates():
    candidates = torch.tensor([[1, 2, -1], [3, 4, 5], [0, -1, -1], [7, 8, 9]])
    assert xs.metrics.coverage(candidates, torch.tensor([2, 2, 0, -1])) == pytest.approx(2 / 3)
    assert xs.metrics.coverage(torch.tensor([1, 2]), torch.tensor([2, 2, 0, 1])) == 0.75
    assert xs.metrics.coverage(candidates.view(2, 2, 3), torch.tensor([[2, 2], [0, 5]]),
                               ignore_index=5) == pytest.approx(2 / 3)


@pytest.mark.parametrize("candidates, target, error, message", [
    ([1], torch.tensor([1]), TypeError, "coverage: expected candidates as an int64 tensor, got "
     "list"),
    (torch.zeros(2, 3).long(), torch.tensor([1]), ValueError, r"got \[2, 3\] and \[1\]"),
    (torch.zeros(3).long(), torch.tensor([-1]), ValueError, "expected a target of 0 or more, got "
     "none"),
])
def test_coverage_refuses_wrong_arguments(candidates, target, error, message):
    with pytest.raises(error, match=message):
        xs.metrics.coverage(candidates, target)
