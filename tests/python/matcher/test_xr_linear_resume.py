"""Interrupted training of XRLinear goes on from its file."""

import numpy as np
import pytest
import torch

import xsoftmax as xs
from xr_linear_checks import parts, problem, same, small


class Stopped(Exception):
    pass


def stop_at(depth):
    def progress(layer, layers, done, total):
        if layer == depth:
            raise Stopped

    return progress


@pytest.mark.parametrize("negatives", ["tfn", "tfn+man"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_resumed_training_gives_the_model_of_an_uninterrupted_one(tmp_path, negatives, depth):
    X, Y = problem()
    want = small(X, Y, negatives=negatives)
    file = tmp_path / "training"
    with pytest.raises(Stopped):
        small(X, Y, negatives=negatives, resume=file, progress=stop_at(depth))
    assert file.exists()
    seen = []
    model = small(X, Y, negatives=negatives, resume=file,
                  progress=lambda layer, *_: seen.append(layer))
    assert same(parts(model), parts(want)) and min(seen) == depth
    assert [layer["weights"] for layer in model.stats] == [layer["weights"] for layer in want.stats]
    # all layers are finished: nothing is trained, and the generator is not used
    again = xs.XRLinear.train(X, Y, arity=3, max_leaf_size=5, negatives=negatives, resume=file,
                              progress=stop_at(2))
    assert same(parts(again), parts(want))


@pytest.mark.parametrize("change, words", [
    (dict(threshold=0.2), "got threshold=0.2, the file has 0.1"),
    (dict(negatives="tfn+man"), "got negatives=tfn.man, the file has tfn"),
    (dict(arity=4), "got tree=4 children and 5 labels of a leaf, the file has 3 children"),
    (dict(X=True), r"got X=\[300, 60\] \(digest \w+\), the file has \[300, 60\]"),
])
def test_another_training_is_refused(tmp_path, change, words):
    X, Y = problem()
    file = tmp_path / "training"
    small(X, Y, resume=file)
    changed = X * 2 if change.pop("X", False) else X
    options = dict(arity=3, max_leaf_size=5, resume=file) | change
    with pytest.raises(ValueError, match="XRLinear.train: .*" + words):
        xs.XRLinear.train(changed, Y, **options)


def test_other_files_are_refused(tmp_path):
    X, Y = problem()
    file = tmp_path / "training"
    small(X, Y, resume=file)
    flipped = bytearray(file.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for content in (b"text", b"", bytes(flipped)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="resume as a file that train wrote, got .*training"):
            small(X, Y, resume=file)
    small(X, Y, resume=tmp_path / "whole")
    broken = torch.load(tmp_path / "whole")
    for name, value in (("seed", "x"), ("parts", broken["state"]["parts"] * 2), ("tree", [])):
        torch.save({**broken, "state": {**broken["state"], name: value}}, file)
        with pytest.raises(ValueError, match="resume as a file that train wrote"):
            small(X, Y, resume=file)
    del broken["state"]["seed"]
    torch.save(broken, file)
    with pytest.raises(ValueError, match="resume as a file that train wrote"):
        small(X, Y, resume=file)
    torch.save({"kind": "another"}, file)
    with pytest.raises(ValueError, match="resume as a file that train wrote"):
        small(X, Y, resume=file)
    with pytest.raises(TypeError, match="XRLinear.train: expected resume as a path or None"):
        small(X, Y, resume=3)
    with pytest.raises(IsADirectoryError):
        small(X, Y, resume=tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        small(X, Y, resume=tmp_path / "none" / "training")


def test_a_kill_while_the_file_is_written_leaves_the_file_before(tmp_path, monkeypatch):
    X, Y = problem()
    file = tmp_path / "training"
    save, calls = torch.save, []

    def fails(content, name):
        calls.append(name)
        if len(calls) == 2:
            raise OSError("no space left")
        save(content, name)

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space left"):
        small(X, Y, resume=file)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["training"]
    assert same(parts(small(X, Y, resume=file)), parts(small(X, Y)))
    assert np.isfinite(small(X, Y, resume=file).predict(X).data).all()
