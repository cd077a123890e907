"""benchmarks/common: the finished runs of a study, and the search for learning rates."""

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import ROOT

import xsoftmax as xs


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"common.{name}")


@pytest.fixture
def examples(common, tmp_path):
    module = common("example_runs")

    def make(data, *options):
        parser = module.make_parser("", "language_model", epochs=4, search_epochs=1)
        args = parser.parse_args(["--data", str(data), "--out", str(tmp_path), *options])
        args.options = []
        return module.ExampleRuns("language_model", args, [], lambda run: run["cost"])

    return make


def write_text(folder, text):
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (folder / f"ptb.{split}.txt").write_text(text * 100)


def test_a_learning_rate_at_an_end_of_the_range_is_marked(common):
    shown_rate = common("records").shown_rate
    assert [shown_rate(rate, (.1, .3, .03))
            for rate in (.03, .1, .3)] == ["0.03 (lowest)", "0.1", "0.3 (highest)"]
    assert shown_rate(.004, [.004]) == "0.004"


def test_finished_runs_are_those_of_the_same_options(common, tmp_path):
    Runs = common("runs").Runs
    path = tmp_path / "runs.jsonl"
    Runs(path, ["ptb", "0123"], 1).add("exact", {"cost": 1})
    with open(path, "a") as file:
        file.write('{"run": "torn')
    again = Runs(path, ["ptb", "0123"], 1)
    assert again.get("exact") == {"cost": 1} and path.read_text().endswith("torn")
    assert Runs(path, ["ptb", "4567"], 1).get("exact") is None
    again.add("midx", {"cost": 2})
    assert Runs(path, ["ptb", "0123"], 1).get("midx") == {"cost": 2}
    for number, text in ((1, "{}\n"), (2, '{"run": "a", "options": []}\nnot JSON\n')):
        path.write_text(text)
        with pytest.raises(SystemExit, match=f"runs.jsonl, line {number}: expected "):
            Runs(path, ["ptb", "0123"], 1)


def test_a_run_has_the_commit_at_its_start(common, examples, tmp_path, monkeypatch):
    write_text(tmp_path / "ptb", "a b c\n")
    module, now = common("example_runs"), ["before"]

    def run_program(command, **_):
        now[0] = "after"
        folder = Path(command[command.index("--output") + 1])
        (folder / "history.json").write_text('{"runs": [{"cost": 1}]}')
        return 0

    monkeypatch.setattr(module, "commit", lambda: now[0])
    monkeypatch.setattr(module, "run_program", run_program)
    one = examples(tmp_path / "ptb")
    assert one.train("exact", [], 0.1, 1) == {"cost": 1}
    assert one.runs.about()["commit"] == ["before"]
    assert not list(tmp_path.glob("exact*"))  # the checkpoint of a finished run is not kept


def test_no_training_begins_after_ctrl_c(common, examples, tmp_path, monkeypatch):
    write_text(tmp_path / "ptb", "a b c\n")
    begun = []

    def run_program(command, **_):
        begun.append(command)
        raise KeyboardInterrupt  # as after a program that Ctrl-C has ended

    monkeypatch.setattr(common("example_runs"), "run_program", run_program)
    one = examples(tmp_path / "ptb", "--jobs", "1", "--rates", "0.1")
    with pytest.raises(KeyboardInterrupt):
        one.map([("exact", [], 0.1, 1, seed) for seed in (1, 2, 3)])
    assert one.stopped.is_set()
    count = len(begun)
    with pytest.raises(KeyboardInterrupt):
        one.train("exact", [], 0.1, 1, 4)
    assert len(begun) == count


def test_a_program_that_ctrl_c_ends_raises_it(common):
    run_program = common("processes").run_program
    assert run_program([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    for end in ("raise SystemExit(130)", "import os; os.kill(os.getpid(), 2)"):
        default = "import signal; signal.signal(2, signal.SIG_DFL); "
        with pytest.raises(KeyboardInterrupt):
            run_program([sys.executable, "-c", default + end])


def test_other_data_of_the_same_name_has_its_own_runs(examples, tmp_path):
    folders, found = [tmp_path / "one", tmp_path / "two"], []
    for folder, text in zip(folders, ("a b c\n", "a b d\n")):
        write_text(folder / "ptb", text)
        *options, fingerprint = examples(folder / "ptb").runs.options
        assert options[:2] == ["--data", "ptb"]
        found.append(fingerprint)
    assert len(set(found)) == 2


def test_data_has_the_same_runs_by_any_path(examples, tmp_path, monkeypatch):
    write_text(tmp_path / "ptb", "a b c\n")
    options = examples(tmp_path / "ptb").runs.options
    monkeypatch.chdir(tmp_path)
    for path in ("ptb", "./ptb", f"../{tmp_path.name}/ptb"):
        assert examples(path).runs.options == options


def test_the_best_settings_of_short_trainings_are_trained_to_the_end(common):
    long_trainings = common("runs").long_trainings
    short, long, trained = {1: .3, 2: .5, 3: .4, 4: .1}, {1: .8, 2: .7, 3: .9, 4: 1.0}, []

    def train(setting, epochs):
        trained.append((setting, epochs))
        return {"valid": {2: short, 9: long}[epochs][setting]}

    found = long_trainings([1, 2, 3, 4], train, 2, 2, 9)
    assert list(found.items()) == [(3, {"valid": .9}), (2, {"valid": .7})]
    assert trained == [(1, 2), (2, 2), (3, 2), (4, 2), (2, 9), (3, 9)]
    trained.clear()
    assert list(long_trainings([1, 2], train, 2, 2, 9)) == [1, 2] and trained == [(1, 9), (2, 9)]


def test_epochs_are_chosen_with_the_learning_rate(common):
    choose_setting = importlib.import_module("sampled_labels").choose_setting
    valid = {(.1, 1): .3, (.2, 1): .5, (.4, 1): .4, (.2, 5): .7, (.4, 5): .8, (.2, 20): .9,
             (.4, 20): .6}
    args = argparse.Namespace(lr=[.1, .2, .4], finalists=2, search_epochs=1, epochs=[20, 5])
    assert choose_setting(lambda *setting: {"valid": valid[setting]}, args) == (.2, 20, [.2, .4])
    valid[.4, 5] = .95
    assert choose_setting(lambda *setting: {"valid": valid[setting]}, args) == (.4, 5, [.4, .2])


def test_step_times_include_refreshes_and_balancing(common, monkeypatch):
    module, done = common("example_runs"), []

    def share(work, every):
        work()
        done.append(every)
        return 1 / every

    monkeypatch.setattr(module, "share", share)
    sampler = xs.samplers.MidxSampler(30, 4, 2, codewords=4)
    tree = xs.BeamTreeLoss(4, xs.LabelTree.balanced(30), num_candidates=2, num_noises=2,
                           balance_every=50)
    for loss, expected in ((xs.LinearCrossEntropyLoss(4, 30), []),
                           (xs.SampledSoftmaxLoss(4, 30, sampler=sampler), [100]), (tree, [50])):
        run = SimpleNamespace(loss=loss, args=SimpleNamespace(refresh_every=100))
        assert module.upkeep(run) == sum(1 / every for every in expected) and done == expected
        done.clear()


def test_a_checksum_is_that_of_names_and_contents(common, tmp_path):
    checksum, found = common("files").checksum, set()
    for name, text in (("a", "1"), ("a", "2"), ("b", "2")):
        folder = tmp_path / (name + text)
        (folder / "in").mkdir(parents=True)
        (folder / "in" / name).write_text(text)
        assert checksum(folder) == checksum(str(folder))
        found |= {checksum(folder), checksum(folder / "in" / name)}
    assert len(found) == 5  # two files have the same content


# Give the costs of long trainings by rate, in the order in which they should be run.
@pytest.mark.parametrize("long, best", [
    ({.008: 30, .004: 20, .002: 10, .001: 15}, .002),
    ({.008: 30, .004: 40, .016: 35}, .008),
    ({.008: 30, .004: 40, .016: 20, .032: 25}, .016),
    ({.008: None, .004: None, .002: 20, .001: 30}, .002),
])  # yapf: disable
def test_long_trainings_go_on_from_the_best_rate_of_short_ones(monkeypatch, examples, tmp_path,
                                                               long, best):
    short, trained = {.001: 90, .002: 60, .004: 40, .008: 30, .016: 35, .032: 80}, []

    def train(name, method, lr, epochs, seed=1):
        trained.append((lr, epochs, seed))
        cost = {1: short, 4: long}[epochs][lr]
        return {"failed": "diverged"} if cost is None else {"cost": cost}

    write_text(tmp_path / "ptb", "a b c\n")
    rates = map(str, (.001, .002, .004, .008, .016, .032))
    one = examples(tmp_path / "ptb", "--seeds", "2", "--rates", *rates)
    monkeypatch.setattr(one, "train", train)
    [(name, lr, runs)] = one.long_runs({"exact": []})
    assert (name, lr, runs) == ("exact", best, [{"cost": long[best]}] * 2)
    assert trained == [*((lr, 1, 1) for lr in short), *((lr, 4, 1) for lr in long),
                       (best, 4, 2)]  # fmt: skip
