"""The image example, run as in its README, on small drawn images."""

import json
import struct
import zlib

import pytest
import torch

from example_checks import check_resume, run, run_file

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from examples.image_classes import data, features, train
from examples.image_classes.model import VGG16

SMALL = ["--width", "2", "--size", "32", "--batch-size", "8", "--dropout", "0", "--threads", "1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twelve classes of ten images in two folders; a class is the position of a bar."""
    from PIL import Image, ImageDraw

    root = tmp_path_factory.mktemp("images")
    for label in range(12):
        folder = root / ("even" if label % 2 == 0 else "odd") / f"class{label:02d}"
        folder.mkdir(parents=True)
        for i in range(10):
            image = Image.new("L", (40, 30), 255)
            x, y = 5 + 10 * (label % 3) + i % 3, 4 + 7 * (label // 3) + i % 2
            ImageDraw.Draw(image).rectangle((x, y, x + 6, y + 3), fill=0)
            image.save(folder / f"{i}.png")
    (root / "notes.txt").write_text("no image")
    return root


@pytest.mark.slow
def test_the_command_trains_and_writes_its_files(images, tmp_path):
    """Run as a user does: all losses learn, and all documented files are complete."""
    run_file(train, tmp_path, "--data", images, "--loss", "exact", "cane", "hierarchical",
             "--epochs", "12", "--eval-epochs", "4", "--lr", "0.005", "--no-distortion",
             "--candidates", "4", "--arity", "3", "--output", tmp_path / "out", *SMALL)
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert [entry["loss"] for entry in history["runs"]] == ["exact", "cane", "hierarchical"]
    assert history["dataset"]["num_classes"] == 12 and history["dataset"]["images"] == {
        "train": 84, "valid": 12, "test": 24
    }
    for entry in history["runs"]:
        assert len(entry["points"]) == 3
        # a guess has 0.08 and 0.42
        assert entry["test_accuracy"] > 0.5 and entry["test_top5"] > 0.8
        assert (entry["test_coverage"] is not None) == (entry["loss"] == "cane")
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("\n") == 5 and f"{100 * history['runs'][0]['test_accuracy']:.2f} %" in table
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 5000


@pytest.mark.slow
def test_resume_is_bit_for_bit(images, tmp_path, monkeypatch):
    check_resume(train, [
        "--data", images, "--loss", "sampled", "--sampler", "uniform", "--samples", "5", "--epochs",
        "6", "--output", tmp_path / "out", *SMALL
    ], tmp_path, monkeypatch)


def test_features_of_a_trained_network_are_exported(images, tmp_path):
    assert run(train, "--data", images, "--epochs", "1", "--checkpoint", tmp_path / "run.pt",
               "--output", tmp_path, *SMALL) == 0
    assert features.main([
        "--checkpoint",
        str(tmp_path / "run.pt"), "--output",
        str(tmp_path / "features.pt"), "--copies", "2"
    ]) == 0
    found = torch.load(tmp_path / "features.pt", weights_only=True)
    assert {split: list(part["x"].shape)
            for split, part in found.items()
            } == {"train": [168, 128], "valid": [12, 128], "test": [24, 128]}
    assert found["train"]["y"].bincount().tolist() == [14] * 12


def test_glyphs_differ_by_class_and_are_reproducible():
    """Classes look different, test images are distorted, and the data is the same each time."""
    dataset = data.glyphs(32, max_classes=60)
    assert len(dataset.classes) == 60 and dataset.counts.min() >= 8
    first = [
        dataset.train.images[(dataset.train.labels == label).nonzero()[0, 0]] for label in range(60)
    ]
    assert len({image.numpy().tobytes()
                for image in first}) == 60 and all(image.max() > 200 for image in first)
    assert len(dataset.test) == len(
        dataset.train) and not torch.equal(dataset.test.images, dataset.train.images)
    assert dataset.fingerprint == data.glyphs(32, max_classes=60).fingerprint


def test_classes_are_sorted_by_number_of_images(images, tmp_path):
    """A head of frequent classes and the log-uniform sampler expect this order."""
    for name, count in (("a", 3), ("b", 9), ("c", 5), ("d", 9)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i}.png").write_bytes(
                (images / "odd" / "class01" / f"{i}.png").read_bytes())
    dataset = data.load_dataset(str(tmp_path), 32)
    assert dataset.classes == ["b", "d", "c", "a"] and dataset.counts.tolist() == sorted(
        dataset.counts.tolist(), reverse=True)


def test_distortion_moves_images_slightly():
    """The brightness stays about the same, and no two results are equal."""
    image = torch.zeros(64, 1, 32, 32)
    image[:, :, 12:20, 12:20] = 1.0
    torch.manual_seed(0)
    moved = data.distort(image)
    assert moved.shape == image.shape and moved.min() >= 0 and moved.max() <= 1.001
    assert (moved.flatten(1).sum(1) / 64 - 1).abs().max() < 0.6
    assert len({row.numpy().tobytes() for row in moved}) == 64


def test_vgg16_has_its_usual_layers():
    model = VGG16(width=2, batch_norm=False)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["features.0.weight"] == [2, 3, 3, 3
                                           ] and shapes["features.28.weight"] == [16, 16, 3, 3]
    assert shapes["classifier.0.weight"] == [128, 16 * 49
                                             ] and shapes["classifier.3.weight"] == [128, 128]
    assert sum(len(shape) == 4 for shape in shapes.values()) == 13
    assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 128)


@pytest.mark.parametrize("arguments, message", [
    (["--data", "/nowhere"], "--data: /nowhere is not a folder"),
    (["--data", "{images}/odd/class01"], "expected images of at least 2 classes, a folder each"),
    (["--noise", "midx"], "--noise midx: expected no --candidates-from beam"),
    (["--width", "0"], "--width: expected more than 0, got 0"),
    (["--data", "{broken}"], "is not an image"),
    (["--data", "{bomb}"], "is not an image"),
    (["--arity", "1"], "--arity: expected at least 2, got 1"),
    (["--lr", "inf"], "--lr: expected more than 0, got inf"),
    (["--seed", "99999999999999999999"], "--seed: expected an integer of 64 bits"),
    (["--device", "foo"], "--device: foo is not available"),
    (["--device", "meta"], "--device: meta is not available"),
    (["--beam", "9", "--candidates-from", "head"], "--beam: expected --candidates-from beam, got "
     "head"),
    (["--checkpoint", "/proc/nothing/run.pt"], "--checkpoint: nothing can be written to "
     "/proc/nothing"),
    (["--data", "{few}"], "expected at least 3 images of each class, to train, to validate and to "
     "test, found 2 of b"),
])
def test_errors_name_the_option_to_change(images, tmp_path, capsys, arguments, message):
    for name, count in (("a", 3), ("b", 2)):
        (tmp_path / "few" / name).mkdir(parents=True)
        (tmp_path / "broken" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "broken" / name / f"{i}.png").write_text("not a picture")
            if i < count:
                (tmp_path / "few" / name / f"{i}.png").write_text("not a picture")
    for name in "ab":
        (tmp_path / "bomb" / name).mkdir(parents=True)
        for i in range(3):  # a header that claims 60,000 x 60,000 pixels
            header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)
            (tmp_path / "bomb" / name /
             f"{i}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header +
                                     struct.pack(">I", zlib.crc32(header)))
    places = {"images": images, **{name: tmp_path / name for name in ("broken", "few", "bomb")}}
    assert run(train, *(argument.format(**places) for argument in arguments), "--output",
               tmp_path) == 2
    assert message in capsys.readouterr().err
