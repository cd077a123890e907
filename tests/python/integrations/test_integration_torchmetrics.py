"""TorchMetrics classes, accumulated over batches, equal xs.metrics on all queries at once."""

import itertools

import pytest
import torch

import xsoftmax as xs

torchmetrics = pytest.importorskip(
    "torchmetrics", reason="torchmetrics is not installed: pip "
    "install xsoftmax[integrations]")

N, Q, K = 12, 9, 4


def batches():
    random = torch.Generator().manual_seed(0)
    predictions = torch.rand(Q, N, generator=random).argsort(1)[:, :6]
    truth = [
        torch.randperm(N, generator=random)[:count].tolist()
        for count in (1, 3, 0, 2, 5, 1, 0, 0, 4)
    ]
    return predictions, truth


def metrics():
    propensity = torch.linspace(0.1, 1, N)
    classes = xs.integrations.torchmetrics
    return {
        "precision_at_k": classes.PrecisionAtK(K), "recall_at_k": classes.RecallAtK(K),
        "ndcg_at_k": classes.NdcgAtK(K), "psp_at_k": classes.PspAtK(K, propensity)
    }, {"psp_at_k": (propensity,)}


def test_accumulated_batches_equal_the_whole():
    """Batches differ in size, and one has no hit."""
    predictions, truth = batches()
    each, more = metrics()
    collection = torchmetrics.MetricCollection(each)
    for part in (slice(0, 2), slice(2, 6), slice(6, 8), slice(8, 9)):
        collection.update(predictions[part], truth[part])
    for name, value in collection.compute().items():
        assert value.item() == pytest.approx(
            getattr(xs.metrics, name)(predictions, truth, K, *more.get(name, ())), rel=1e-12)
    collection.reset()
    collection.update(predictions[6:8], truth[6:8])
    assert all(value.isnan() for value in collection.compute().values())


def test_forward_returns_the_value_of_the_batch_and_states_merge():
    predictions, truth = batches()
    for name, metric in metrics()[0].items():
        more = metrics()[1].get(name, ())
        assert metric(predictions[:2], truth[:2]).item() == pytest.approx(
            getattr(xs.metrics, name)(predictions[:2], truth[:2], K, *more))
        other = metrics()[0][name]
        other.update(predictions[2:], truth[2:])
        metric.merge_state(other)
        assert metric.compute().item() == pytest.approx(
            getattr(xs.metrics, name)(predictions, truth, K, *more))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="PrecisionAtK: expected k"):
        xs.integrations.torchmetrics.PrecisionAtK(0)
    with pytest.raises(TypeError, match="precision_at_k: expected predictions of dtype int64"):
        xs.integrations.torchmetrics.PrecisionAtK(1).update(torch.ones(2, 3), [[1], [2]])


def of_collection():
    """Yields (name, metric, function of xs.metrics) for two k and two propensities."""
    classes = xs.integrations.torchmetrics
    for k in (1, K):
        for name in ("precision_at_k", "recall_at_k", "ndcg_at_k"):
            made = {
                "precision_at_k": classes.PrecisionAtK, "recall_at_k": classes.RecallAtK,
                "ndcg_at_k": classes.NdcgAtK
            }[name]
            yield f"{name} {k}", made(
                k), lambda *batch, name=name, k=k: getattr(xs.metrics, name)(*batch, k)
        for title, part in (("rising", torch.linspace(0.1, 1,
                                                      N)), ("falling", torch.linspace(1, 0.2, N))):
            yield f"psp {k} {title}", classes.PspAtK(
                k, part), lambda *batch, k=k, part=part: xs.metrics.psp_at_k(*batch, k, part)


@pytest.mark.parametrize("one, other", list(itertools.combinations(range(10), 2)))
def test_metrics_of_a_collection_do_not_share_states(one, other):
    """MetricCollection merges metrics whose states have equal names and, after the first batch,
    equal values, such as those of a batch without a hit."""
    pair = [list(of_collection())[i] for i in (one, other)]
    predictions, truth = batches()
    misses = [[N - 1 if N - 1 not in row else int(next(i for i in range(N) if i not in row))]
              for row in predictions.tolist()]
    collection = torchmetrics.MetricCollection({name: metric for name, metric, _ in pair})
    for right in (misses, truth):
        collection.update(predictions, right)
    for name, value in collection.compute().items():
        want = next(figure for title, _, figure in pair
                    if title == name)(torch.cat([predictions, predictions]), [*misses, *truth])
        assert value.item() == pytest.approx(want, rel=1e-12)


def test_an_invalid_propensity_is_refused_at_construction():
    for bad, error in ((torch.zeros(3), ValueError), ([0.5], TypeError), (torch.ones(2, 2),
                                                                          ValueError)):
        with pytest.raises(error, match="propensity"):
            xs.integrations.torchmetrics.PspAtK(1, bad)
