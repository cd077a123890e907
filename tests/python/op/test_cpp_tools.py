"""XRLinear training, label vectors, search and metrics give the same results in C++ and Python."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xsoftmax import label_vectors, metrics

PROGRAM = Path(
    os.environ.get(
        "XSOFTMAX_TOOLS_EXCHANGE",
        Path(__file__).parents[3] / "build" / "package" / "tests" / "cpp" / "tools_exchange"))
pytestmark = pytest.mark.skipif(not PROGRAM.exists(),
                                reason="tools_exchange is not built: make test")

EXAMPLES, FEATURES, LABELS, K = 90, 25, 40, 4
MODELS = {
    "defaults": {},
    "layers": {"max_leaf_size": 4, "arity": 3},
    "matcher aware": {"max_leaf_size": 4, "arity": 3, "negatives": ["tfn+man"]},
    "a scheme for each layer": {"max_leaf_size": 8, "arity": 8, "negatives": ["tfn", "man"]},
    "user negatives": {"max_leaf_size": 8, "arity": 8, "negatives": ["user+tfn"], "user": True},
    "logistic": {"max_leaf_size": 8, "arity": 8, "loss": "logistic", "threshold": 0.0, "bias": 0.5},
    "few weights": {"max_leaf_size": 8, "arity": 8, "max_weights": 2},
    "relevance": {"max_leaf_size": 8, "arity": 8, "relevance": True},
}


def examples():
    draws = np.random.default_rng(3)
    X = sp.random(EXAMPLES, FEATURES, 0.2, "csr", np.float32, random_state=4)
    X = label_vectors.unit_rows(sp.csr_matrix(np.round(X.toarray(), 3)))
    X.data = np.round(X.data, 4)  # numbers that a text file holds exactly
    Y = sp.csr_matrix((draws.random((EXAMPLES, LABELS)) < 0.06).astype(np.float32))
    return X, Y


def write(path, X, Y):
    lines = [f"{EXAMPLES} {FEATURES} {LABELS}"]
    for x, y in zip(X, Y):
        lines.append(",".join(map(str, y.indices)) + " " +
                     " ".join(f"{column}:{value:.6g}" for column, value in zip(x.indices, x.data)))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def exchange(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    write(folder / "examples.txt", *examples())
    X, Y = xs.datasets.read_examples(folder / "examples.txt")
    draws = torch.Generator().manual_seed(1)
    relevance = torch.rand(Y.nnz, generator=draws)
    user = sp.csr_matrix((torch.rand(EXAMPLES, LABELS, generator=draws)
                          < 0.05).numpy().astype(np.float32))
    models = []
    for number, options in enumerate(MODELS.values()):
        models.append(
            {name: value
             for name, value in options.items() if name not in ("user", "relevance")}
            | {"seed": number})
        if "relevance" in options:
            models[-1]["relevance"] = relevance
        if "user" in options:
            models[-1] |= {
                "user_offsets": torch.from_numpy(user.indptr).long(),
                "user_labels": torch.from_numpy(user.indices)
            }
    truth = torch.full((20, 5), -1)
    for row, count in zip(truth, torch.randint(0, 6, (20,), generator=draws)):
        row[:count] = torch.randint(LABELS, (int(count),), generator=draws)  # some twice
    given = {
        "examples": str(folder / "examples.txt"), "models": models, "k": K, "truth": truth,
        "predictions": torch.stack([torch.randperm(LABELS, generator=draws)[:7]
                                    for _ in range(20)]), "counts": torch.arange(LABELS),
        "weight": torch.randn(3000, 8, generator=draws), "bias": torch.randn(3000, generator=draws),
        "queries": torch.randn(300, 8, generator=draws),
        "exclude": torch.randint(-1, 3000, (300, 3), generator=draws)
    }
    given["predictions"][3, 5:] = -1
    torch.save(given, folder / "in")
    subprocess.run([str(PROGRAM), str(folder / "in"), str(folder / "out")], check=True)
    return given, torch.load(folder / "out",
                             weights_only=False), (X, Y,
                                                   sp.csr_matrix(
                                                       (relevance.numpy(), Y.indices, Y.indptr),
                                                       Y.shape), user)


@pytest.mark.parametrize("number, name", list(enumerate(MODELS)), ids=list(MODELS))
def test_trained_models_are_equal(exchange, number, name):
    _, out, (X, Y, relevance, user) = exchange
    options = dict(MODELS[name])
    if options.pop("relevance", False):
        options["relevance"] = relevance
    if options.pop("user", False):
        options["user_negatives"] = user
    if "threshold" in options:
        options["dtype"] = torch.float32
    if len(options.get("negatives", [])) == 1:
        options["negatives"] = options["negatives"][0]
    model = xs.XRLinear.train(X, Y, generator=torch.Generator().manual_seed(number), **options)
    torch.testing.assert_close(out[f"model.{number}.labels"], model.model.labels(), rtol=0, atol=0)
    found = {key for key in out if key.startswith(f"model.{number}.")}
    assert len(found) == 1 + 6 * model.depth
    for depth in range(model.depth):
        for part, tensor in enumerate(model.model.layer(depth)):
            torch.testing.assert_close(out[f"model.{number}.{depth}.{part}"], tensor, rtol=0,
                                       atol=0)


def test_label_vectors_are_equal(exchange):
    _, out, (X, Y, *_) = exchange
    for name, wanted in (("pii", label_vectors.pii(Y)), ("pifa", label_vectors.pifa(X, Y)),
                         ("unit_rows", label_vectors.unit_rows(X))):
        offsets, columns, values = (out[f"{name}.{part}"].numpy() for part in range(3))
        assert (offsets == wanted.indptr).all() and (columns == wanted.indices).all(), name
        np.testing.assert_allclose(values, wanted.data, rtol=2e-7, err_msg=name)


def test_metrics_are_equal(exchange):
    given, out, _ = exchange
    predictions, truth = given["predictions"], [row[row >= 0].tolist() for row in given["truth"]]
    weights = metrics.propensity(given["counts"], 1000)
    wanted = {
        name: getattr(metrics, name)(predictions, truth, K)
        for name in ("precision_at_k", "recall_at_k", "ndcg_at_k")
    }
    wanted |= {
        "psp_at_k": metrics.psp_at_k(predictions, truth, K, weights),
        "coverage": metrics.coverage(predictions, given["truth"][:, 0])
    }
    assert set(wanted) | {"propensity"} == set(
        metrics.__all__), "all metrics of Python are compared"
    for name, value in wanted.items():
        assert out[name].item() == pytest.approx(value, rel=1e-12), name
    torch.testing.assert_close(out["propensity"], weights, rtol=1e-12, atol=0)


def test_search_results_are_equal(exchange):
    given, out, _ = exchange
    loss = xs.LinearCrossEntropyLoss(8, 3000, bias=True)
    with torch.no_grad():
        loss.linear.weight.copy_(given["weight"])
        loss.linear.bias.copy_(given["bias"])
    queries = given["queries"]
    results = {
        "certified": loss.search(queries, 5), "cells": loss.search(queries, 5, max_cells=2),
        "excluded": loss.search(queries, 5, exclude=given["exclude"])
    }
    loss.search_index(queries)
    results["recall"] = loss.search(queries, 5, recall=0.8)
    for name, result in results.items():
        for field, wanted in enumerate(result):
            torch.testing.assert_close(out[f"found.{name}.{field}"], wanted, rtol=0, atol=0)
