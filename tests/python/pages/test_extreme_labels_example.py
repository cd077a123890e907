"""The extreme-label example, run as in its README, on a few texts."""

import json

import numpy as np
import pytest
import scipy.sparse as sp

from example_checks import run

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from examples.extreme_labels import data, train

SMALL = ["--width", "16", "--epochs", "1", "--threads", "1", "--max-leaf-size", "20"]


@pytest.fixture()
def texts(monkeypatch):
    """Replaces the documentation of a library with a few generated texts."""
    random = np.random.default_rng(0)
    topics = [[f"word{i}{j}" for j in "abcdef"] for i in range(40)]
    texts, labels = [], []
    for _ in range(600):
        some = random.choice(40, 2, replace=False)
        texts.append(" ".join(str(random.choice(topics[i])) for i in some for _ in range(5)))
        labels.append([f"label{i}" for i in sorted(some)])
    made = data.from_texts("few texts", [texts[:500], texts[500:]], [labels[:500], labels[500:]])
    monkeypatch.setattr(data, "standard_library", lambda *_: made)
    return made


@pytest.mark.parametrize("encoder", ["bag", "transformer", "huggingface", "none"])
def test_each_encoder_trains_models_and_writes_files(texts, encoder, tmp_path):
    if encoder == "huggingface":
        pytest.importorskip("transformers")
    assert run(train, *SMALL, "--encoder", encoder, "--output", tmp_path / "out") == 0
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    names = [row["model"] for row in history["models"]]
    assert names == ["linear"] + ([
        f"neural, {encoder}", "linear on [tf-idf, embedding]", "ensemble of the three"
    ] if encoder != "none" else [])
    assert history["models"][0]["precision"]["1"] > 0.5 and (tmp_path / "out" /
                                                             "latency.png").stat().st_size > 1000
    assert (tmp_path / "out" / "table.md").read_text().count("\n") == 2 + len(names)
    import xsoftmax as xs

    assert xs.XRLinear.load(tmp_path / "out" / "linear").num_labels == 40


def test_a_pretrained_encoder_is_loaded(texts, tmp_path):
    """Loads the encoder that another run saved, and keeps its weights without training."""
    pytest.importorskip("transformers")
    import torch

    small = [*SMALL, "--encoder", "huggingface", "--no-both", "--neural-negatives", "tfn"]
    assert run(train, *small, "--output", tmp_path / "first") == 0
    assert run(train, *small, "--epochs", 0, "--model", tmp_path / "first" / "encoder",
               "--encoder-lr", 1e-5, "--output", tmp_path / "second") == 0
    first, second = (torch.load(tmp_path / name / "neural.pt")["encoder"]
                     for name in ("first", "second"))
    assert len(first) > 10 and all(torch.equal(first[name], second[name]) for name in first)
    assert run(train, *small, "--epochs", 0, "--seed", 2, "--output", tmp_path / "third") == 0
    third = torch.load(tmp_path / "third" / "neural.pt")["encoder"]
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_prototypes_beat_untrained_weights(texts, tmp_path, capsys):
    """Without training, prototypes beat weights copied from parents; training the upper layers
    does not change the encoder."""
    precision = {}
    for init in ("parents", "prototypes"):
        assert run(train, *SMALL, "--width", 64, "--init", init, "--epochs", 0, "--no-both",
                   "--weight", 2, "--output", tmp_path / init) == 0
        rows = json.loads((tmp_path / init / "history.json").read_text())["models"]
        assert [row["model"] for row in rows] == ["linear", "neural, bag", "ensemble of the two"]
        precision[init] = rows[1]["precision"]["1"]
    assert precision["prototypes"] > 0.4 > 0.2 > precision["parents"]

    import torch

    def embedding(*options):
        assert run(train, *SMALL, "--init", "prototypes", "--no-both", *options, "--output",
                   tmp_path / "out") == 0
        return torch.load(tmp_path / "out" / "neural.pt")["encoder"]["embedding.weight"]

    upper, both = embedding("--epochs", 1, "--last-epochs",
                            0), embedding("--epochs", 1, "--last-epochs", 0.5, "--last-lr", 0.01)
    assert torch.equal(upper, embedding("--epochs", 0)) and not torch.equal(upper, both)
    assert "steps, loss" in capsys.readouterr().out


def test_texts_and_labels_of_functions_in_a_file(tmp_path):
    (tmp_path / "some.py").write_text(
        'def openFile(path):\n    """Opens it."""\n    return io.open(path, MODE)\n\n'
        'class A:\n    async def f(self): pass\n')
    assert list(data.functions(tmp_path / "some.py")) == [("openFile Opens it.",
                                                           ["MODE", "io", "open", "path"])]
    assert data.words("openFile HTTPServer snake_case x2") == [
        "open", "file", "http", "server", "snake", "case", "x", "2"
    ]
    (tmp_path / "bad.py").write_text("def (")
    assert list(data.functions(tmp_path / "bad.py")) == []


def test_npz_files_are_read_and_wrong_options_refused(tmp_path, capsys):
    X, Y = sp.random(60, 30, 0.3, format="csr", dtype=np.float32,
                     random_state=0), sp.random(60, 12, 0.2, format="csr", random_state=1)
    for part in ("train", "test"):
        sp.save_npz(tmp_path / f"set.{part}.x.npz", X)
        sp.save_npz(tmp_path / f"set.{part}.y.npz", Y)
    assert run(train, *SMALL, "--data", tmp_path / "set", "--output", tmp_path / "out") == 0
    for options, message in ((["--data", tmp_path / "none"], "--data: read_examples: there is no "
                              "file"), (["--data", tmp_path / "set", "--encoder", "transformer"],
                                        "--encoder transformer: expected texts"), ([
                                            "--data", tmp_path / "set", "--encoder", "transformer",
                                            "--init", "prototypes"
                                        ], "that tells texts apart")):
        assert run(train, *SMALL, *options, "--output", tmp_path / "out") == 2
        assert message in capsys.readouterr().err
    (tmp_path / "taken" / "linear_on_both").mkdir(parents=True)
    (tmp_path / "taken" / "linear_on_both" / "mine").touch()
    assert run(train, *SMALL, "--data", tmp_path / "set", "--output", tmp_path / "taken") == 2
    said = capsys.readouterr()
    assert "--output: XRLinear: expected path as a new folder or one with a model" in said.err
    assert "P@1" not in said.out
    sp.save_npz(tmp_path / "set.test.y.npz", Y[:, :5])
    assert run(train, *SMALL, "--data", tmp_path / "set", "--output", tmp_path / "out") == 2
    assert "of as many features and labels" in capsys.readouterr().err
