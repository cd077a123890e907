"""Files of XRLinear: they hold the same model, are replaced atomically, and damage is detected."""

import os

import numpy as np
import pytest
import torch

import xsoftmax as xs
from xr_linear_checks import parts, problem, same, small


@pytest.fixture()
def saved(tmp_path):
    X, Y = problem()
    model = small(X, Y)
    model.save(tmp_path / "model")
    return X, model, tmp_path / "model"


def test_a_file_gives_the_same_model(saved):
    X, model, path = saved
    loaded = xs.XRLinear.load(path)
    assert same(parts(loaded),
                parts(model)) and loaded.stats == model.stats and repr(loaded) == repr(model)
    assert (loaded.predict(X) != model.predict(X)).nnz == 0
    # no temporary file is left
    assert sorted(os.listdir(path)) == ["model.bin", "notes.json"] and os.listdir(
        path.parent) == ["model"]
    logistic = small(*problem(), loss="logistic")
    logistic.save(path.parent / "other")
    assert xs.XRLinear.load(path.parent / "other").transform == "sigmoid"


def test_a_model_is_replaced_while_it_is_in_use(saved):
    X, model, path = saved
    loaded, before = xs.XRLinear.load(path), model.predict(X)
    other = small(*problem(seed=1))
    other.save(str(path) + "/")
    assert (loaded.predict(X) != before).nnz == 0  # the old file is still mapped
    assert same(parts(xs.XRLinear.load(path)), parts(other)) and os.listdir(
        path.parent) == ["model"]


def test_saving_does_not_replace_other_files(saved):
    _, model, path = saved
    (path.parent / "mine").mkdir()
    (path.parent / "mine" / "letter.txt").write_text("dear")
    for name in ("", "model.bin"):  # also if there is a model.bin of another program
        if name:
            (path.parent / "mine" / name).write_text("another model")
        with pytest.raises(ValueError, match="new folder or one with a model"):
            model.save(path.parent / "mine")
        assert (path.parent / "mine" / "letter.txt").read_text() == "dear"
    (path / "tokens.txt").write_text("a b")
    with pytest.raises(ValueError, match='which holds "tokens.txt" as well'):
        model.save(path)
    assert (path / "tokens.txt").read_text() == "a b" and same(parts(xs.XRLinear.load(path)),
                                                               parts(model))
    (path / "tokens.txt").unlink()
    (path.parent / "link").symlink_to(path)
    with pytest.raises(ValueError, match="something else"):
        model.save(path.parent / "link")
    (path.parent / "mine" / "model.bin").unlink()
    with pytest.raises(RuntimeError, match="cannot make a folder beside"):
        model.save(path.parent / "nowhere" / "model")
    with pytest.raises(FileNotFoundError, match="no model.bin"):
        xs.XRLinear.load(path.parent / "mine")


def test_damaged_files_are_refused(saved):
    """A file that is truncated, extended or has a flipped bit never loads as another model."""
    _, _, path = saved
    file = path / "model.bin"
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    cuts = [0, 1, 8, 63, 64, 200, len(whole) - 1, *random.integers(0, len(whole), 40)]
    for size in cuts:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged|expected .* as the file of a model"):
            xs.XRLinear.load(path)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="expected .* bytes, got"):
        xs.XRLinear.load(path)
    sections = 64 + 32 * (2 + 6 * 3)
    used = [*range(sections), *random.integers(sections, len(whole), 300)]
    refused = 0
    for at in used:
        broken = bytearray(whole)
        broken[at] ^= 1 << int(random.integers(8))
        file.write_bytes(broken)
        try:
            xs.XRLinear.load(path)
            assert at >= sections  # in the padding between sections
        except ValueError:
            refused += 1
    assert refused > 0.9 * len(used)


def file_checksum(data):
    """Returns the checksum of the file format, by its description."""
    def mix(lane, word):
        lane = ((lane ^ word) * 0x9E3779B97F4A7C15) % 2**64
        return lane ^ (lane >> 29)

    lanes, words = [1, 2, 3,
                    4], [int.from_bytes(data[i:i + 8], "little") for i in range(0, len(data), 8)]
    body = len(data) // 32 * 4
    for i in range(body):
        lanes[i % 4] = mix(lanes[i % 4], words[i])
    total = len(data)
    for word in lanes + words[body:]:
        total = mix(total, word)
    return total


def sections_of(data):
    """Returns (offset of the entry in the table of sections, begin, size) of each section."""
    count = 2 + 6 * int.from_bytes(data[12:16], "little")
    numbers = lambda at: (int.from_bytes(data[i:i + 8], "little") for i in (at, at + 8))
    return [(at, *numbers(at)) for at in range(64, 64 + 32 * count, 32)]


def seal(data, file):
    """Writes a file with correct checksums of the header and the table of sections."""
    data[56:64] = file_checksum(
        data[64:64 + 32 * (2 + 6 * int.from_bytes(data[12:16], "little"))]).to_bytes(8, "little")
    data[56:64] = file_checksum(data[:64]).to_bytes(8, "little")
    file.write_bytes(data)


def test_wrong_contents_with_right_checksums_give_no_invalid_predictions(saved):
    """Changed sections are refused, or the model predicts finite scores of valid labels."""
    X, _, path = saved
    file = path / "model.bin"
    whole = bytearray(file.read_bytes())
    random = np.random.default_rng(0)
    refused = answered = 0
    for entry, begin, size in sections_of(whole):
        for at in random.integers(begin, begin + size, 25):
            changed = bytearray(whole)
            changed[at] ^= 1 << int(random.integers(8))
            changed[entry + 24:entry + 32] = file_checksum(changed[begin:begin + size]).to_bytes(
                8, "little")
            seal(changed, file)
            try:
                model = xs.XRLinear.load(path)
            except ValueError as error:
                assert "checksum" not in str(error) and f'"{file}" is damaged' in str(error)
                refused += 1
                continue
            scores, labels = model.topk(X, 5, 5)
            assert not scores.isnan().any() and labels.max() < model.num_labels
            answered += 1
    assert refused > 100 and answered > 50


def test_wrong_sizes_and_offsets_with_right_checksums_are_refused(saved):
    _, _, path = saved
    file = path / "model.bin"
    whole = bytearray(file.read_bytes())
    seal(bytearray(whole), file)
    xs.XRLinear.load(path)  # the checksums of this test are right
    for at, value, message in ((64, 2**63, "a section of"), (64, 1, "a section of"),
                               (72, 2**62, "a section of"), (72, 3, "a section of 3 bytes"),
                               (80, 77, "dtype 77"), (8, 3, "version 2 of the format, got 3"),
                               (16, 2**62, "features in"), (24, 0x7FF0 << 48, "bias as"),
                               (32, int.from_bytes(b"l9-hinge", "little"), "transform as"),
                               (12, 10**6, "1 to 64 layers"), (12, 0, "1 to 64 layers")):
        changed = bytearray(whole)
        size = 4 if at in (8, 12) else 8
        changed[at:at + size] = value.to_bytes(size, "little")
        if at == 12:
            file.write_bytes(changed)
        else:
            seal(changed, file)
        with pytest.raises(ValueError, match=message):
            xs.XRLinear.load(path)


def test_notes_are_part_of_the_model(saved):
    """notes.json is a copy for readers: without it, or with another one, the model is the same."""
    _, model, path = saved
    model.notes["normalize"] = True
    model.save(path)
    for change in (lambda: (path / "notes.json").write_text("[[["), lambda:
                   (path / "notes.json").unlink()):
        change()
        loaded = xs.XRLinear.load(path)
        assert loaded.notes == model.notes and loaded.stats == model.stats
    loaded.model.save(str(path), "")  # as a C++ program does
    assert xs.XRLinear.load(path).notes == model.notes
    loaded.model.save(str(path), "of the second of May")
    assert xs.XRLinear.load(path).notes == {"text": "of the second of May"
                                            } == {"text": (path / "notes.json").read_text()}


def test_changing_returned_or_given_tensors_does_not_change_a_model(saved):
    """Validated or mapped tensors cannot be changed from outside."""
    X, model, path = saved
    for one in (model, xs.XRLinear.load(path)):
        want = one.topk(X, 3)
        for depth in range(one.depth):
            for part in one.model.layer(depth):
                part.fill_(127)
        one.model.labels().fill_(0)
        assert same(one.topk(X, 3), want)
    layers = [model.model.layer(depth) for depth in range(model.depth)]
    labels = model.model.labels()
    made = torch.classes.xsoftmax.XRLinear(model.num_features, model.bias, model.transform, labels,
                                           layers)
    want = made.predict(*(torch.from_numpy(part) for part in (X.indptr, X.indices, X.data)), None,
                        0, 3, 10, "", "", None)
    labels.fill_(0)
    layers[-1][4].fill_(255)
    assert same(
        want,
        made.predict(*(torch.from_numpy(part) for part in (X.indptr, X.indices, X.data)), None, 0,
                     3, 10, "", "", None))
