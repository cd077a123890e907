"""The command line, end to end on files."""

import gzip
import io
import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xsoftmax.tools.cli import main
from xsoftmax.datasets import read_sparse


@pytest.fixture()
def files(tmp_path):
    random = np.random.default_rng(0)
    Y = np.zeros((400, 30), bool)
    for i in range(400):
        Y[i, random.choice(30, 2, replace=False)] = True
    X = sp.csr_matrix((Y @ sp.random(30, 50, 0.2, random_state=1).toarray()).astype(np.float32) * 3)
    Y = sp.csr_matrix(Y.astype(np.float32))
    for name, rows in (("train", slice(0, 300)), ("test", slice(300, 400))):
        lines = [f"{rows.stop - rows.start} 50 30"]
        for i in range(rows.start, rows.stop):
            lines.append(",".join(map(str, Y[i].indices)) +
                         "".join(f" {j}:{v:.9g}" for j, v in zip(X[i].indices, X[i].data)))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
        sp.save_npz(tmp_path / f"{name}.x.npz", X[rows])
        sp.save_npz(tmp_path / f"{name}.y.npz", Y[rows])
    return tmp_path, X, Y


def test_train_predict_evaluate(files, capsys):
    path, X, Y = files
    train = ["--normalize", "--arity", "4", "--max-leaf-size", "6", "--quiet"]
    assert main(["train", f"{path}/train.txt", f"{path}/one", *train]) == 0
    assert main([
        "train", f"{path}/train.x.npz", "--labels", f"{path}/train.y.npz", f"{path}/two", *train,
        "--seed", "1", "--negatives", "tfn+man"
    ]) == 0
    assert main(["predict", f"{path}/test.txt", f"{path}/found.npz", f"{path}/one", "--topk",
                 "4"]) == 0
    assert main([
        "predict", f"{path}/test.x.npz", f"{path}/both.npz", f"{path}/one", f"{path}/two", "--topk",
        "4", "--ensemble", "rank"
    ]) == 0
    capsys.readouterr()
    assert main([
        "evaluate", f"{path}/test.txt", f"{path}/found.npz", "--train", f"{path}/train.txt", "-k",
        "1", "2"
    ]) == 0
    table = capsys.readouterr().out.split("\n")
    assert table[0].split() == ["k", "precision", "recall", "nDCG", "PSP"]
    queries = X[300:].multiply(1 / np.sqrt(X[300:].multiply(X[300:]).sum(1))).tocsr().astype(
        np.float32)
    model = xs.XRLinear.load(path / "one")
    assert model.notes == {"normalize": True}
    want = model.predict(queries, topk=4)
    np.testing.assert_allclose(read_sparse(path / "found.npz").toarray(), want.toarray(), atol=1e-5)
    figures = [
        metric(want, Y[300:], 1)
        for metric in (xs.metrics.precision_at_k, xs.metrics.recall_at_k, xs.metrics.ndcg_at_k)
    ]
    # fractions, as in the package
    np.testing.assert_allclose([float(figure) for figure in table[1].split()[1:4]], figures,
                               atol=6e-5)
    assert float(table[1].split()[1]) > 0.8
    assert read_sparse(path / "both.npz").shape == (100, 30)
    assert main([
        "evaluate", f"{path}/test.x.npz", "--labels", f"{path}/test.y.npz", f"{path}/both.npz",
        "--train", f"{path}/train.y.npz", "-k", "4"
    ]) == 0
    capsys.readouterr()
    assert main(["evaluate", f"{path}/test.txt", f"{path}/both.npz", "-k", "5"]) == 1
    assert "expected at least 5 predictions of a query, got 4 at most" in capsys.readouterr().err


def test_compressed_files_and_standard_input(files, capsys, monkeypatch):
    path = files[0]
    text = (path / "train.txt").read_bytes()
    (path / "train.txt.gz").write_bytes(gzip.compress(text))
    train = ["--arity", "4", "--max-leaf-size", "6", "--quiet"]
    assert main(["train", f"{path}/train.txt", f"{path}/plain", *train]) == 0
    assert main(["train", f"{path}/train.txt.gz", f"{path}/compressed", *train]) == 0
    for name, data in (("piped", text), ("piped compressed", gzip.compress(text))):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
        assert main(["train", "-", f"{path}/{name}", *train]) == 0
    for name in ("compressed", "piped", "piped compressed"):
        assert all(
            torch.equal(a, b)
            for a, b in zip(weights(path, "plain"), weights(path, name), strict=True))
    (path / "bad.txt.gz").write_bytes(gzip.compress(text)[:-30])
    (path / "wrong.txt.gz").write_bytes(gzip.compress(b"1 2 3\nnothing\n"))
    capsys.readouterr()
    for name, words in (("bad", "compressed by gzip"), ("wrong", "wrong.txt.gz")):
        assert main(["train", f"{path}/{name}.txt.gz", f"{path}/m", *train]) == 1
        assert words in capsys.readouterr().err


def weights(path, name):
    model = xs.XRLinear.load(path / name)
    return [part for layer in model._parts() for part in layer]


def test_a_model_is_replaced_only_if_requested(files, capsys):
    path = files[0]
    train = ["train", f"{path}/train.txt", f"{path}/model", "--quiet", "--max-leaf-size", "6"]
    assert main(train) == 0
    before = weights(path, "model")
    assert main([*train, "--bias", "0"]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert all(torch.equal(a, b) for a, b in zip(before, weights(path, "model"), strict=True))
    assert main([*train, "--bias", "0", "--force"]) == 0
    assert xs.XRLinear.load(path / "model").bias == 0


def test_a_model_of_scaled_examples_warns_of_other_queries(files):
    path, X, _ = files
    assert main(["train", f"{path}/train.txt", f"{path}/m", "--normalize", "--quiet"]) == 0
    model = xs.XRLinear.load(path / "m")
    for queries in (X[300:], X[300:].toarray()):
        for search in (model.predict, model.topk):
            with pytest.warns(UserWarning, match="scale the queries with label_vectors.unit_rows"):
                search(queries)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(xs.label_vectors.unit_rows(X[300:]))
        model.predict(X[:0])


def test_json_and_version(files, capsys):
    path = files[0]
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"xsoftmax {xs.__version__}\n"
    assert main([
        "train", f"{path}/train.txt", f"{path}/m", "--max-leaf-size", "6", "--normalize", "--json"
    ]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == 30
    assert main(["predict", f"{path}/test.txt", f"{path}/found.npz", f"{path}/m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 100
    assert main(["evaluate", f"{path}/test.txt", f"{path}/found.npz", "-k", "1", "3",
                 "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    truth = sp.load_npz(path / "test.y.npz")
    assert figures["precision"] == {
        str(k): xs.metrics.precision_at_k(read_sparse(path / "found.npz"), truth, k)
        for k in (1, 3)
    }


@pytest.mark.parametrize("command, message", [
    (["train", "{path}/none.txt", "{path}/m"], "train: read_examples: there is no file"),
    (["train", "{path}/train.x.npz", "{path}/m"], "train: --labels: expected the .npz with the "
     "labels of"),
    (["train", "{path}", "{path}/m"], "as a file, got a folder"),
    (["train", "{path}/empty.txt", "{path}/m"], "expected at least one example"),
    (["predict", "{path}/test.txt", "{path}/found.npz", "{path}/m", "--topk", "0"
      ], "--topk: expected at least 1, got 0"),
    (["train", "{path}/train.txt", "{path}"], "expected path as a new folder or one with a model"),
    (["train", "{path}/train.txt", "{path}/m", "--negatives", "hard"], "--negatives: expected tfn, "
     "man, or tfn+man, got hard"),
    (["train", "{path}/train.txt", "{path}/m", "--negatives", "user"], "--negatives: expected tfn, "
     "man, or tfn+man, got user"),
    (["predict", "{path}/test.txt", "{path}/found.txt", "{path}/m"], "name of a .npz"),
    (["predict", "{path}/test.txt", "{path}/found.npz", "{path}/m"], "found no model.bin"),
    (["evaluate", "{path}/test.txt", "{path}/train.y.npz"], r"predictions of shape [100, 30]"),
    (["evaluate", "{path}/none.npz", "--labels", "{path}/test.y.npz", "{path}/test.y.npz"
      ], "there is no file"),
    (["evaluate", "{path}/test.txt", "{path}/test.y.npz", "--train", "{path}/train.x.npz"
      ], "--train with 30 labels"),
])
def test_errors_are_one_line(files, capsys, command, message):
    (files[0] / "empty.txt").write_text("0 3 2\n")
    assert main([part.format(path=files[0])
                 for part in command] + (["--quiet"] if command[0] == "train" else [])) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.err.startswith(
        "xsoftmax ")


def test_without_scipy_the_error_names_the_extra(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    assert main(["train", f"{files[0]}/train.txt", f"{files[0]}/without", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("xsoftmax train: expected scipy, which is not installed")
    assert said.endswith("pip install xsoftmax[matcher]\n") and said.count("\n") == 1


def test_threads(files):
    before = torch.get_num_threads()
    try:
        assert main(
            ["train", f"{files[0]}/train.txt", f"{files[0]}/m", "--threads", "1", "--quiet"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_commands_of_the_page(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] /
            "docs/howto/many_labels.md").read_text().split("## On files")[1]
    text, commands = re.findall(r"```(?:text|sh)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("examples.txt").write_text(text)
    for command in commands.splitlines():
        program, *arguments = command.split()
        assert program == "xsoftmax" and main(arguments) == 0
    found, (_, Y) = read_sparse("found.npz"), xs.datasets.read_examples("examples.txt")
    assert found.shape == Y.shape == (4, 2) and xs.metrics.precision_at_k(found, Y, 1) == 1
    assert "precision" in capsys.readouterr().out.lower()
