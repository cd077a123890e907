"""to_faiss: the index of faiss finds the best classes of a table."""

import pytest
import torch

import xsoftmax as xs
from search_checks import expected, problem, recall


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_faiss_finds_the_best_classes(kind, bias):
    pytest.importorskip("faiss")
    query, weight, biases = problem(20, 8, 2000, bias=bias)
    loss = xs.LinearCrossEntropyLoss(8, 2000, bias=bias)
    with torch.no_grad():
        loss.linear.weight.copy_(weight)
        if bias:
            loss.linear.bias.copy_(biases)
    index = xs.to_faiss(loss, kind, lists=16)
    if kind == "ivf":
        index.nprobe = 16
    asked = torch.cat([query, torch.ones(20, 1)], 1) if bias else query
    _, ids = index.search(asked.numpy(), 5)
    assert recall(torch.from_numpy(ids),
                  expected(query, weight, biases, 5)[1]) >= (0.9 if kind == "hnsw" else 1)


def test_to_faiss_refuses_wrong_arguments(monkeypatch):
    loss = xs.LinearCrossEntropyLoss(8, 20)
    with pytest.raises(ValueError, match="kind"):
        xs.to_faiss(loss, "lsh")
    with pytest.raises(ValueError, match="neighbors of at least 2"):  # faiss would kill the process
        xs.to_faiss(loss, "hnsw", neighbors=1)
    with pytest.raises(TypeError, match="plain class table"):
        xs.to_faiss(torch.nn.Linear(2, 3))
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(ImportError, match="faiss-cpu"):
        xs.to_faiss(loss)
