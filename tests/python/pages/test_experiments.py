"""benchmarks/experiments.py: each study runs with a budget of seconds, on texts and tables that the
tests write."""

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documents import ROOT

DOCS = ROOT / "docs/experiments"
RIVALS = ROOT / "tests/python/shared/rivals"


@pytest.fixture
def experiments(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("experiments")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from PIL import Image

    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    words = ["".join(letters) for letters in itertools.product("abcdefghijk", repeat=3)]

    def text(count):
        lines = [" ".join(chance.choices(words, k=20)) for _ in range(count)]
        return "\n".join(lines) + "\n"

    (folder / "ptb").mkdir()
    for split, count in (("train", 200), ("valid", 50), ("test", 50)):
        (folder / f"ptb/ptb.{split}.txt").write_text(text(count))
    (folder / "novels").mkdir()
    for number in range(20):
        (folder / f"novels/{number}.txt").write_text(text(60))
    (folder / "amazon_beauty").mkdir()
    users = [
        f"{user} " + " ".join(map(str, chance.sample(range(1, 400), 8))) for user in range(200)
    ]
    (folder / "amazon_beauty/Beauty.txt").write_text("\n".join(users) + "\n")
    # the items of a user, and the words and labels of a document, have a topic in common
    (folder / "gowalla").mkdir()
    for split, count in (("train", 8), ("valid", 1), ("test", 2)):
        users = [
            " ".join(map(str, [user, *chance.sample(range(user % 20, 400, 20), count)]))
            for user in range(200)
        ]
        (folder / f"gowalla/{split}.txt").write_text("\n".join(users) + "\n")
    (folder / "delicious").mkdir()
    documents = [
        sorted([
            *chance.sample(range(i % 20, 500, 20), 10),
            *chance.sample(range(500 + i % 20, 560, 20), 2)
        ]) for i in range(400)
    ]
    rows = ["{" + ",".join(f"{index} 1" for index in row) + "}" for row in documents]
    (folder / "delicious/delicious.arff").write_text("@data\n" + "\n".join(rows) + "\n")
    for character in range(24):
        part = ("images_background", "images_evaluation")[character % 2]
        (folder / f"omniglot/{part}/{character}").mkdir(parents=True)
        for drawing in range(4):
            Image.frombytes("L", (16, 16), chance.randbytes(256)).save(
                folder / f"omniglot/{part}/{character}/{drawing}.png")
    return folder


def run(data, tmp_path, *arguments):
    return subprocess.run([
        sys.executable,
        str(ROOT / "benchmarks/experiments.py"), *arguments, "--data",
        str(data), "--out",
        str(tmp_path / "out"), "--records",
        str(tmp_path)
    ], capture_output=True, text=True)


LANGUAGE = "--rates .004 --only "
CASES = {
    "cane_classes.gaussians": "--gaussians 60 --lr .01 --seeds 1 --only softmax 'CANE 5v5'",
    "cane_classes.delicious": "--lr .01 --seeds 1 --only softmax 'CANE 5v5'",
    "cane_classes.aloi_like": "--lr .03 --seeds 1 --only softmax 'CANE 9v1'",
    "cane_classes.omniglot": "--lr .01 --seeds 1 --only softmax 'CANE 9v1'",
    "cane_classes.time": "--gaussians 60 120 --repeats 1",
    "cane_classes.sgd": "--lr 30 --seeds 1 --only softmax 'CANE 1v9, edges as in the paper'",
    "cane_words.routed": LANGUAGE + "'60 of 3 subsets'", "cane_words.ptb": LANGUAGE +
    "'CANE-40, half of them noises'", "cane_words.novels": LANGUAGE + "NCE-60",
    "midx_words.ptb": LANGUAGE + "'20 private midx, ranking'", "midx_words.transformer": LANGUAGE +
    "'20 private rff, ranking'", "midx_words.novels": LANGUAGE + "'20 private unigram, ranking'",
    "midx_words.novels_transformer": LANGUAGE + "'20 private lsh, ranking'",
    "midx_distance.untrained": "--draws 2 --codebook-steps 2",
    "midx_distance.trained": "--draws 2 --codebook-steps 2", "midx_learnable.ptb": LANGUAGE +
    "'20 private midx_learnable'", "midx_ablation.ptb": LANGUAGE + "'20 midx, 8 codewords' '5 lsh'",
    "midx_ablation.time": "--classes 500 --repeats 1 --queries 20",
    "midx_items.beauty": "--rates .004 --only '64 private midx_pq'",
    "midx_items.gowalla": "--rates .004 --seeds 1 --only '64 private lsh'",
    "midx_items.gru": "--rates .004 --seeds 2 --only '64 private midx'",
    "midx_items.gru_gowalla": "--rates .004 --seeds 1 --only '64 private uniform'",
    "midx_labels.delicious": "--samples 5 --lr .01 --seeds 1 --only full uniform",
    "midx_labels.generated": "--scale .01 --samples 5 --lr .01 --seeds 2 --only full midx",
    "pecos_ablation.settings": "--seeds 1", "parallel_trees.threads": "--repeats 1 --scale .02"
}
RECORD = {"tables": [{"title": "", "columns": ["method", "step"], "rows": [["lsh", "7 ms"]]}]}


@pytest.mark.slow
@pytest.mark.parametrize("record", CASES)
def test_a_study_makes_its_record(record, data, tmp_path, experiments):
    name, _, part = record.partition(".")
    done = run(data, tmp_path, name, "--parts", part, "--budget", "0.1", "--more", CASES[record])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / f"{record}.json").read_text())
    commands = " ".join(command for one in experiments.STUDIES[name].parts if one.name == part
                        for command in one.commands)
    scaled = "{e:" in commands or "{n:" in commands
    assert "study" not in found and ("budget" in found) == scaled
    rows = [row for one in found["tables"] for row in one["rows"]]
    assert len(rows) >= 2
    assert all(
        re.search(r"\d", " ".join(row[1:])) and "smaller --lr" not in " ".join(row) for row in rows)
    if name in ("cane_words", "midx_words", "midx_items"):
        assert re.match(r"\S+: \d.* to train, ", found["tables"][0]["title"])
    if record == "cane_classes.time":
        for one in found["tables"]:
            steps = [float(row[1].removesuffix(" ms")) for row in one["rows"]]
            assert one["rows"][0][0] == "PyTorch"
            rounded = 0.005  # half of the last digit
            for step, row in zip(steps, one["rows"]):
                low, high = (step - rounded) / (steps[0] + rounded), (step + rounded) / (steps[0] -
                                                                                         rounded)
                assert low - rounded <= float(row[2]) <= high + rounded
    if "--time " in commands:
        assert "step" in found["tables"][0]["columns"] and "time" in found["plot"]["x"]
    assert (tmp_path / f"{record}.svg").read_text().startswith("<?xml")


def run_with_rivals(data, tmp_path, names, *arguments):
    """Runs a study with interpreters that find the libraries of tests/python/shared/rivals."""
    for name in names:
        python = tmp_path / f"rivals/{name}/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={RIVALS} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
    done = run(data, tmp_path, *arguments, "--rivals", str(tmp_path / "rivals"))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_trees_of_vowpal_wabbit_are_trained_by_its_own_interpreter(data, tmp_path):
    trees = ["VW recall tree", "VW LOMTree", "VW filter tree"]
    run_with_rivals(
        data, tmp_path, ["vw"], "cane_classes", "--parts", "gaussians", "--budget", "0.1", "--more",
        f"--gaussians 60 --lr .01 --seeds 1 --vw-epochs 1 --finalists 1 --only {shlex.join(trees)}")
    found = json.loads((tmp_path / "cane_classes.gaussians.json").read_text())
    rows = found["tables"][0]["rows"]
    assert [row[0] for row in rows] == trees and all(float(row[2]) > 90 for row in rows)
    assert found["against"].endswith("Vowpal Wabbit 1.2")


@pytest.mark.slow
def test_linear_models_are_compared_with_libpecos_and_omikuji(data, tmp_path):
    run_with_rivals(data, tmp_path, ["pecos", "omikuji"], "pecos_linear", "--more",
                    "--repeats 1 --trees 2")
    found = json.loads((tmp_path / "pecos_linear.three_sets.json").read_text())
    value = {one["figure"]: one["value"] for one in found["figures"]}
    for name in ("delicious", "gowalla", "novels"):
        sides = found["results"][name]
        assert {
            f"{one}{kind}"
            for one in ("libpecos", "xsoftmax")
            for kind in ("", " tfn+man", " 2 trees")
        } <= sides.keys()
        for rival in ("libpecos", "omikuji"):
            assert value[f"{name}: {rival}'s P@1 - ours, points"] == pytest.approx(
                sides[rival]["P@1"] - sides["xsoftmax"]["P@1"])
        assert value[f"{name}: training / libpecos"] == pytest.approx(
            sides["xsoftmax"]["seconds"]["train"] / sides["libpecos"]["seconds"]["train"])
    # The labels of a document have the topic of its words, which frequent labels have not.
    precise = found["results"]["delicious"]
    assert min(precise["libpecos"]["P@1"], precise["xsoftmax"]["P@1"]) > 40
    assert precise["omikuji"]["P@1"] < 20


def test_every_part_has_a_case_or_needs_another_library(experiments):
    parts = {
        f"{name}.{part.name}"
        for name, study in experiments.STUDIES.items()
        for part in study.parts if not part.needs
    }
    assert parts == set(CASES)


def test_pages_show_the_record_of_every_part(experiments):
    shown = {
        record
        for page in DOCS.glob("*.md")
        for record in re.findall(r"^```\{record\} (\S+)\.json$", page.read_text(), re.M)
    }
    parts = {
        f"{name}.{part.name}"
        for name, study in experiments.STUDIES.items()
        for part in study.parts
    }
    assert parts <= shown
    plotted = {
        record
        for record in parts if "plot" in json.loads((DOCS / f"{record}.json").read_text())
    }
    assert plotted == parts
    assert all((DOCS / f"{record}.svg").exists() for record in plotted)


def test_plots_of_linear_models_show_the_figures_of_their_tables(experiments):
    record = json.loads((DOCS / "pecos_linear.three_sets.json").read_text())
    value = {one["figure"]: one["value"] for one in record["figures"]}
    sets = list(record["results"])
    curves = importlib.import_module("extreme_labels").against_libpecos(record["results"])
    for side, name in (("xsoftmax", ""), ("xsoftmax tfn+man", ", TFN+MAN")):
        points = [(value[f"{one}: training{name} / libpecos"],
                   -value[f"{one}: libpecos's P@1 - ours, points{name}"]) for one in sets]
        assert curves[side] == [pytest.approx(point) for point in points]
    assert {name: [list(point) for point in points]
            for name, points in curves.items()} == record["plot"]["curves"]

    record = json.loads((DOCS / "pecos_ablation.settings.json").read_text())
    shown = {
        tuple(row[:2]): float(row[6].split()[0])
        for one in record["tables"]
        for row in one["rows"]
    }
    curves = importlib.import_module("xr_linear_settings").by_children(record["figures"])
    default = shown["gowalla", "T = 1, B = 16 (default)"]
    assert curves["gowalla, T = 3"] == [
        (count, pytest.approx(shown["gowalla", f"T = 3, B = {count}"] / default, rel=2e-3))
        for count in (32, 8, 2)
    ]  # fmt: skip
    assert {name: [list(point) for point in points]
            for name, points in curves.items()} == record["plot"]["curves"]


def test_missing_data_is_named(tmp_path):
    done = run(tmp_path / "nowhere", tmp_path, "midx_items")
    assert done.returncode == 1
    assert done.stdout.count("left out, since") == 4 and "amazon_beauty/Beauty.txt" in done.stdout
    assert not list(tmp_path.glob("*.json"))


def test_files_that_a_data_set_lacks_are_named(tmp_path):
    (tmp_path / "gowalla").mkdir()
    (tmp_path / "gowalla/train.txt").write_text("0 1 2\n")
    done = run(tmp_path, tmp_path, "midx_items", "--parts", "gowalla")
    assert done.returncode == 1
    assert "has no gowalla/valid.txt, gowalla/test.txt" in done.stdout


def test_a_part_that_fails_does_not_end_the_study(experiments, monkeypatch, tmp_path, capsys):
    records, made = tmp_path / "records", []

    def call(command):
        made.append(command)
        if len(made) == 1:
            raise experiments.Failed("exit 7")
        (records / "midx_ablation.time.json").write_text(json.dumps(RECORD))

    (tmp_path / "ptb").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb/ptb.{split}.txt").write_text("a b\n")
    monkeypatch.setattr(experiments, "call", call)
    monkeypatch.setattr(sys, "argv", [
        "experiments.py", "midx_ablation", "--data",
        str(tmp_path), "--records",
        str(records), "--out",
        str(tmp_path / "out")
    ])
    with pytest.raises(SystemExit) as ended:
        experiments.main()
    assert ended.value.code == 1 and len(made) == 2
    printed = capsys.readouterr().out
    assert "midx_ablation.ptb: exit 7" in printed and "midx_ablation.time.json" in printed
    assert "| lsh    | 7 ms |" in printed


def take_sigint():
    """Lets a new process end by Ctrl-C, which those in the background of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_a_study_that_ctrl_c_ends_goes_on_from_there(data, tmp_path):
    """The signal goes to all processes, as from a terminal."""
    arguments = [
        "midx_items", "--parts", "beauty", "--budget", "0.1", "--more",
        "--seeds 1 --rates .004 --only '64 private uniform'"
    ]
    study = subprocess.Popen([
        sys.executable,
        str(ROOT / "benchmarks/experiments.py"), *arguments, "--data",
        str(data), "--records",
        str(tmp_path)
    ], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                             preexec_fn=take_sigint)
    kept = tmp_path / "runs/midx_items.beauty.jsonl"
    deadline = time.monotonic() + 300
    while not kept.is_file() or not kept.read_text().endswith("\n"):
        assert study.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(study.pid, signal.SIGINT)
    _, errors = study.communicate(timeout=300)
    assert study.returncode == 1
    assert errors.splitlines()[-1] == "interrupted: the same command goes on from here"
    assert "Traceback" not in errors
    before, record = kept.read_text(), tmp_path / "midx_items.beauty.json"
    assert not record.exists()
    done = run(data, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert kept.read_text().startswith(before) and len(kept.read_text()) > len(before)
    names = [json.loads(line)["run"] for line in kept.read_text().splitlines()]
    assert len(names) == len(set(names)) == json.loads(record.read_text())["runs"]["count"]


def test_other_data_or_epochs_have_another_folder(tmp_path, experiments):
    args = argparse.Namespace(data=tmp_path)
    part = experiments.Part("a", 1, ("train.py --data {delicious} --epochs {n:9}", "b.py --lr 1"))
    (tmp_path / "delicious").mkdir()
    file, found = tmp_path / "delicious/delicious.arff", set()
    for text, scale in (("1", 1), ("2", 1), ("2", 0.5)):
        file.write_text(text)
        found.add(experiments.folder_of(part, scale, args))
    assert len(found) == 3
    file.write_text("1")
    again = dataclasses.replace(part, commands=(part.commands[0], "b.py --lr 2"))
    assert experiments.folder_of(again, 1, args) in found
    changed = dataclasses.replace(part, commands=("train.py --data {delicious}", part.commands[1]))
    assert experiments.folder_of(changed, 1, args) not in found


def test_studies_are_listed_and_wrong_names_refused(experiments, tmp_path):
    listed = run(tmp_path, tmp_path).stdout
    assert all(re.search(rf"^{name} +[\d.]+ hours", listed, re.M) for name in experiments.STUDIES)
    assert "invalid choice" in run(tmp_path, tmp_path, "midx").stderr
    assert "--parts: expected some of beauty, gowalla, gru, gru_gowalla, got x" in run(
        tmp_path, tmp_path, "midx_items", "--parts", "x").stderr
    assert "--budget: expected minutes above 0" in run(tmp_path, tmp_path, "midx_items", "--budget",
                                                       "0").stderr


def test_records_need_a_folder(experiments, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv",
                        ["experiments.py", "midx_distance", "--records",
                         str(tmp_path / "file")])
    with pytest.raises(SystemExit):
        experiments.main()
    assert "--records: expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
def test_rivals_that_are_not_there_are_named(experiments, monkeypatch, tmp_path, capsys, there):
    def call(command):
        assert ("--vw-python" in command) == there
        (tmp_path / "cane_classes.gaussians.json").write_text(json.dumps(RECORD))

    if there:
        (tmp_path / "rivals/vw/bin").mkdir(parents=True)
        (tmp_path / "rivals/vw/bin/python").touch()
    monkeypatch.setattr(experiments, "call", call)
    monkeypatch.setattr(sys, "argv", [
        "experiments.py", "cane_classes", "--parts", "gaussians", "--rivals",
        str(tmp_path / "rivals"), "--budget", "30", "--records",
        str(tmp_path)
    ])
    experiments.main()
    assert ("gaussians: without vw, since " in capsys.readouterr().out) != there
    found = json.loads((tmp_path / "cane_classes.gaussians.json").read_text())
    assert found["study"] == ("make experiments NAME=cane_classes PARTS=gaussians " +
                              "RIVALS=FOLDER " * there + "BUDGET=30")
    assert found["budget"] == ("30 minutes: 0.1 of the study's epochs" +
                               "; other libraries with all of theirs" * there)


def test_the_command_of_a_record_repeats_it(experiments, monkeypatch, tmp_path):
    argv = ["midx_words", "--parts", "ptb", "--budget", "60", "--data", str(tmp_path / "data")]
    (tmp_path / "data/ptb").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (tmp_path / f"data/ptb/ptb.{split}.txt").touch()
    record = tmp_path / "records/midx_words.ptb.json"

    def call(given):
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps(RECORD))

    monkeypatch.setattr(experiments, "call", call)
    monkeypatch.setattr(
        sys, "argv",
        ["experiments.py", *argv, "--records",
         str(record.parent), "--out",
         str(tmp_path / "out")])
    experiments.main()
    found = json.loads(record.read_text())
    assert found["study"] == "make experiments NAME=midx_words PARTS=ptb DATA=FOLDER BUDGET=60"
    assert found["budget"] == "60 minutes: 0.1 of the study's epochs"
    assert found["question"] == experiments.STUDIES["midx_words"].question


def test_budgets_of_records_are_those_of_their_commands(experiments):
    shortened = []
    for path in DOCS.glob("*.json"):
        record = json.loads(path.read_text())
        if budget := re.search(r"BUDGET=([\d.]+)", record.get("study", "")):
            name, part = path.stem.split(".")
            minutes = {one.name: one.minutes for one in experiments.STUDIES[name].parts}
            parts = re.search(r"PARTS=(\w+)", record["study"])
            whole = minutes[part] if parts else sum(minutes.values())
            scale = re.search(r": ([\d.]+) of", record["budget"])
            assert f"{float(budget[1]) / whole:.2g}" == scale[1], path.name
            shortened.append(path.stem)
    assert "cane_words.ptb" in shortened


def test_numbers_are_scaled(experiments):
    words = experiments.split_command(
        "train.py --epochs {e:20} --search {n:3} --rows {n:300} '{out} a'", 0.01, {"out": "here"})
    assert words == "train.py --epochs 0.2 --search 1 --rows 3".split() + ["here a"]


def test_the_split_of_novels_is_listed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    split_files = importlib.import_module("examples.language_model.data").split_files
    listed = [line.split() for line in (DOCS / "novels.txt").read_text().splitlines()]
    root = Path("novels")
    found = split_files([root / name for _, name in listed], root, 20)
    assert {(split, file.name)
            for split, files in found.items()
            for file in files} == {tuple(line)
                                   for line in listed}
