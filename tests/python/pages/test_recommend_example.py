"""The recommender example, run as in its README, on small generated sequences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xsoftmax as xs
from example_checks import check_resume, check_same_figures, run, run_file, run_ranks
from ranks import needs_gloo

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from examples.recommend import data, train

SMALL = [
    "--width", "16", "--batch-size", "16", "--samples", "16", "--max-length", "8", "--dropout",
    "0.1", "--threads", "1"
]


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    """A file of generated sequences that move between clusters."""
    path = tmp_path_factory.mktemp("sequences") / "sequences.txt"
    rows = data.generate(users=200, items=60, clusters=12)
    path.write_text("".join(" ".join(map(str, [user, *row])) + "\n"
                            for user, row in enumerate(rows)))
    return path


@pytest.mark.slow
def test_the_command_trains_and_writes_its_files(sequences, tmp_path):
    """Run as a user does: both losses learn, and all documented files are complete."""
    run_file(train, tmp_path, "--data", sequences, "--loss", "sampled", "exact", "--epochs", "12",
             "--eval-epochs", "4", "--output", tmp_path / "out", "--lr", "0.01", *SMALL)
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert [entry["loss"] for entry in history["runs"]] == ["sampled", "exact"]
    for entry in history["runs"]:
        assert len(entry["points"]) == 3 and entry["epochs"] == 12
        best = max(entry["points"], key=lambda point: point["valid_NDCG@10"])
        for figure in ("valid_NDCG@10", "valid_Recall@50", "test_NDCG@50", "test_Recall@10"):
            assert entry[figure] == best[figure]
        assert entry["valid_NDCG@10"] > 0.2  # 0.08 for a random order of the 60 items
        assert entry["test_NDCG@10"] > 0.2
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("\n") == 4 and f"{history['runs'][0]['test_NDCG@10']:.4f}" in table
    assert (tmp_path / "out" / "ndcg.png").stat().st_size > 5000


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("table, losses", [("split", ["sampled", "exact"]),
                                           ("replicated", ["exact"])])
def test_two_ranks_train_like_one_process(sequences, tmp_path, table, losses):
    """The last batch of an epoch has one sequence, so one rank has none.

    The sampled loss is not compared for replicated tables, whose ranks draw their own samples.
    """
    rows = sequences.read_text().splitlines(keepends=True)
    # without the user and the last two items; the last item in training has no target
    pieces = torch.tensor([-(-(len(row.split()) - 4) // 8) for row in rows]).cumsum(0)
    users = int((pieces % 16 == 1).nonzero().max()) + 1
    few = tmp_path / "few.txt"
    few.write_text("".join(rows[:users]))
    arguments = ["--data", few, "--loss", *losses, "--epochs", "2", *SMALL, "--dropout", "0"]
    assert len(
        data.Batches(data.load_dataset(str(few)).train, 16, 8, False, 0,
                     torch.device("cpu")).begin) % 16 == 1
    assert run(train, *arguments, "--output", tmp_path / "one") == 0
    printed, _ = run_ranks(train, tmp_path, *arguments, "--table", table, "--output",
                           tmp_path / "two")
    check_same_figures(tmp_path / "one", tmp_path / "two")
    assert printed.count("actions to train") == 1
    _, error = run_ranks(train, tmp_path, *arguments, "--output", tmp_path, status=1)
    assert "--table: expected replicated or split for 2 processes, got none" in error


@pytest.mark.slow
@needs_gloo
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no list of threads")
@pytest.mark.parametrize("table", ["split", "replicated"])
def test_the_process_group_ends_all_its_threads(sequences, tmp_path, table):
    """Such threads may abort the process at its end."""
    code = """if True:
        import os, pathlib, sys, torch
        from examples.recommend import train
        def names():
            threads = pathlib.Path("/proc/self/task").iterdir()
            return [(thread / "comm").read_text().strip() for thread in threads]
        end, seen = torch.distributed.destroy_process_group, []
        torch.distributed.destroy_process_group = lambda: (seen.extend(names()), end())
        assert train.main(sys.argv[1:]) == 0
        assert any("gloo" in name for name in seen), seen
        assert not any("gloo" in name for name in names()), names()
    """
    arguments = [
        "--data", sequences, "--loss", "sampled", "exact", "--epochs", "1", *SMALL, "--table",
        table, "--output", tmp_path
    ]
    alone = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0"
    }
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)],
                          cwd=Path(__file__).parents[3], env=os.environ | alone,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_batch_is_split_evenly_over_ranks():
    random = torch.Generator().manual_seed(0)
    for count, size in [(1, 2), (2, 2), (3, 4), (5, 4), (9, 3), (40, 4)]:
        lengths = torch.randint(1, 9, (count,), generator=random).sort().values
        items = torch.arange(int(lengths.sum()))
        parts = [
            data.part_of_batch(items, lengths, items + 100, rank, size) for rank in range(size)
        ]
        real = [part for part in parts if (part[2] >= 0).all()]
        assert len(real) == min(count, size) and all(
            len(of_rank) == 1 for _, of_rank, target in parts if (target == -100).any())
        for whole, pieces in zip((items, lengths, items + 100), zip(*real)):
            assert torch.equal(torch.cat(pieces), whole)
        assert all(len(part[0]) == part[1].sum() for part in parts)
        if count == 40:  # sorted by length, so by targets, not by sequences
            assert max(len(part[0]) for part in parts) - min(len(part[0]) for part in parts) <= 16


@pytest.mark.parametrize("model, sampler", [("sasrec", "unigram"), ("gru4rec", "midx")])
def test_resume_is_bit_for_bit(sequences, tmp_path, model, sampler, monkeypatch):
    """Interruptions within an epoch must restore its order."""
    check_resume(train, [
        "--data", sequences, "--model", model, "--sampler", sampler, "--epochs", "3", "--unordered",
        "--output", tmp_path / "out", *SMALL
    ], tmp_path, monkeypatch)


def test_patience_ends_training(sequences, tmp_path):
    arguments = [
        "--data", sequences, "--loss", "exact", "--lr", "1e-9", "--epochs", "50", "--patience", "2",
        "--output", tmp_path, *SMALL
    ]
    assert run(train, *arguments) == 0
    entry = json.loads((tmp_path / "history.json").read_text())["runs"][0]
    assert len(entry["points"]) < 10  # the learning rate is too small to improve
    values = [point["valid_NDCG@10"] for point in entry["points"]]
    assert values.index(max(values)) == len(values) - 3
    assert entry["best_epoch"] == len(values) - 2 and entry["test_NDCG@10"] is not None


@pytest.mark.parametrize("model", ["sasrec", "gru4rec"])
@pytest.mark.parametrize("options", [[], ["--rank-seen"], ["--heads", "2", "--untied", "--bias"]])
def test_evaluation_equals_a_full_ranking(tmp_path, model, options):
    """Metrics equal those of scoring all items, removing the seen ones, and sorting."""
    # a user may have seen half of all items, so fewer than 50 remain
    rows = data.generate(users=30, items=60, clusters=6)
    dataset = data.make("sequences", [row[:-3] for row in rows], [row[-3:-1] for row in rows],
                        [row[-1:] if i % 3 else [] for i, row in enumerate(rows)])
    args = train.parse_arguments([*SMALL, "--model", model, *options])
    torch.manual_seed(0)
    current = train.Run("exact", dataset, args)
    torch.nn.init.normal_(current.encoder.embedding.weight)
    with train.Interrupt() as interrupt:
        figures = current.exactly(current.measure, interrupt)
    assert set(figures) == set(current.TEST) - {"best_epoch"}
    for split, queries in (("valid", dataset.valid), ("test", dataset.test)):
        predictions, truth = [], []
        for known, right in zip(queries.known.split(), queries.truth.split()):
            if len(right) == 0:
                continue
            with torch.no_grad():
                items = known[-args.max_length:]
                scores = current.loss.linear(current.encoder(items, torch.tensor([len(items)]))[-1])
            order = [
                item for item in scores.argsort(descending=True).tolist()
                if args.rank_seen or item not in known.tolist()
            ]
            predictions.append((order + [-1] * 50)[:50])
            truth.append(right.tolist())
        for k in (10, 50):
            assert figures[f"{split}_NDCG@{k}"] == pytest.approx(
                xs.metrics.ndcg_at_k(torch.tensor(predictions), truth, k))
            assert figures[f"{split}_Recall@{k}"] == pytest.approx(
                xs.metrics.recall_at_k(torch.tensor(predictions), truth, k))


def test_unordered_histories_are_shuffled():
    """Files without an order may be sorted by item, so the last items say little of a user."""
    dataset = data.make("sequences", [list(range(40))] * 3, [[40]] * 3, [[41]] * 3)
    current = train.Run("exact", dataset, train.parse_arguments([*SMALL, "--unordered"]))
    for row in current.queries["valid"].known.split():
        assert row.sort().values.tolist() == list(range(40))
        assert row[-8:].tolist() != list(range(32, 40))


@pytest.mark.parametrize("model", ["sasrec", "gru4rec"])
def test_a_query_depends_only_on_earlier_items_of_its_user(model):
    """It does not see later items, other users or padding."""
    args = train.parse_arguments([*SMALL, "--model", model])
    encoder = train.build_encoder(args, 40, sparse=False).eval()
    items, lengths = torch.arange(40), torch.tensor([1, 2, 3, 4, 5, 8, 8, 7, 2])
    together = encoder(items, lengths)
    for row, hidden in zip(items.split(lengths.tolist()), together.split(lengths.tolist())):
        for end in range(1, len(row) + 1):
            torch.testing.assert_close(
                encoder(row[:end], torch.tensor([end]))[-1], hidden[end - 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("unordered", [False, True])
def test_batches_cover_every_target_once(unordered):
    """Each item except a user's first is a target, after at most `longest` items of the same user.

    The order changes with the epoch and can be restored.
    """
    rows = [[100 * user + place for place in range(length)]
            for user, length in enumerate([1, 2, 5, 9, 10, 30])]
    batches = data.Batches(data.Sequences.of(rows), batch_size=3, longest=4, unordered=unordered,
                           seed=1, device=torch.device("cpu"))
    epochs = []
    for epoch in range(2):
        pairs = []
        for i in range(len(batches)):
            items, lengths, targets = batches.get(epoch * len(batches) + i)
            assert len(items) == len(targets) == lengths.sum() and lengths.max() <= 4 and len(
                lengths) <= 3
            assert torch.equal(items // 100, targets // 100)
            for inside, after in zip(items.split(lengths.tolist()),
                                     targets.split(lengths.tolist())):
                assert torch.equal(inside[1:], after[:-1])
            pairs += list(zip(items.tolist(), targets.tolist()))
        assert len(pairs) == sum(len(row) - 1 for row in rows)
        if not unordered:
            assert sorted(pairs) == [(item, item + 1) for row in rows for item in row[:-1]]
        assert len({target for _, target in pairs}) == len(pairs)
        epochs.append(pairs)
    assert epochs[0] != epochs[1]
    again = data.Batches(data.Sequences.of(rows), batch_size=3, longest=4, unordered=unordered,
                         seed=1, device=torch.device("cpu"))
    items, _, targets = again.get(len(again) + 1)
    assert set(zip(items.tolist(), targets.tolist())) <= set(epochs[1])


def test_files_and_folders_are_split_into_train_valid_and_test(tmp_path):
    """In a file, the last item of a user is the test item and the one before validates.

    Items are sorted by their count in training.
    """
    load = data.load_dataset
    (tmp_path / "file.txt").write_text("7 5 3 3 8 9\n\n2 3 5 4 3\n")
    dataset = load(str(tmp_path / "file.txt"))
    assert dataset.items == [3, 5, 4, 8, 9] and dataset.counts.tolist() == [3, 2, 0, 0, 0]
    assert [row.tolist() for row in dataset.train.split()] == [[1, 0, 0], [0, 1]]
    assert [row.tolist() for row in dataset.valid.truth.split()] == [[3], [2]]
    assert [row.tolist() for row in dataset.test.known.split()] == [[1, 0, 0, 3], [0, 1, 2]]
    assert [row.tolist() for row in dataset.test.truth.split()] == [[4], [0]]

    for split, content in {"train": "0 5 6 6\n3 6\n", "valid": "3 7 5\n",
                           "test": "0 7\n3\n"}.items():
        (tmp_path / f"{split}.txt").write_text(content)
    dataset = load(str(tmp_path))
    assert dataset.items == [6, 5, 7] and dataset.counts.tolist() == [3, 1, 0]
    assert [row.tolist() for row in dataset.valid.known.split()] == [[1, 0, 0], [0]]
    assert [row.tolist() for row in dataset.valid.truth.split()] == [[], [2, 1]]
    assert [row.tolist() for row in dataset.test.known.split()] == [[1, 0, 0], [0, 2, 1]]
    assert [row.tolist() for row in dataset.test.truth.split()] == [[2], []]


@pytest.mark.parametrize(
    "content, message",
    [
        ("1 2 3 4\n5 6 7\n", "line 2: expected at least 3 items (one to train, one to validate and "
         "one to test) for user 5, got 2"),
        ("1 2 3 four\n", "line 1: expected numbers of 0 or more, got 'four'"),
        ("1 2 3 -4\n", "line 1: expected numbers of 0 or more, got '-4'"),
        ("1 2 3 4.5\n", "got '4.5'"),
        ("1 2 3 99999999999999999999\n", "line 1: expected numbers below 2^63, got "
         "'99999999999999999999'"),
        ("1 2 3 4\n1 5 6 7\n", "line 2: expected one line a user, got user 1 again"),
        ("\n\n", "expected lines `user item item ...`, got none"),
        ("1 2 3 4\n", "expected a user with at least two items in training, got none"),
    ],
)
def test_wrong_files_are_refused(tmp_path, capsys, content, message):
    path = tmp_path / "file.txt"
    path.write_text(content)
    assert run(train, "--data", path, "--output", tmp_path, *SMALL, "--loss", "exact") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train": "0 1 2\n", "valid": "0 1\n"}, "there is no test.txt"),
        ({"train": "0 1 2\n", "valid": "4 1\n", "test": "0 1\n"}, "valid.txt: expected users of "
         "train.txt, got user 4"),
        ({"train": "0 1 2\n", "valid": "0\n", "test": "0 1\n"}, "valid.txt: expected lines `user "
         "item item ...`, got none"),
        ({"train": "0\n", "valid": "0 1\n", "test": "0 1\n"}, "train.txt, line 1: expected at "
         "least 1 items"),
    ],
)
def test_wrong_folders_are_refused(tmp_path, capsys, files, message):
    for split, content in files.items():
        (tmp_path / f"{split}.txt").write_text(content)
    assert run(train, "--data", tmp_path, "--output", tmp_path / "out", *SMALL) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "no-such-file"], "neither a file nor a folder"),
        (["--samples", "5000"], "take fewer"),
        (["--heads", "3"], "expected a multiple of --heads 3, got 16"),
        (["--samples", "5", "5"], "a number for each of the 1 samplers, got 2"),
        (["--dropout", "1"], "less than 1"),
        (["--patience", "0"], "more than 0"),
    ],
)
def test_errors_name_the_option_to_change(sequences, tmp_path, capsys, arguments, message):
    assert run(train, "--data", sequences, "--output", tmp_path, *SMALL, *arguments) == 2
    assert message in capsys.readouterr().err


def test_resume_refuses_other_data(sequences, tmp_path, capsys):
    arguments = ["--epochs", "1", "--output", tmp_path, "--checkpoint", tmp_path / "c.pt", *SMALL]
    copy = tmp_path / "copy.txt"
    copy.write_text(sequences.read_text())
    assert run(train, "--data", copy, *arguments) == 0
    copy.write_text(copy.read_text() + "1000 1 2 3 4 5\n")
    assert run(train, "--data", copy, *arguments, "--resume") == 2
    assert "is not what the checkpoint was trained on" in capsys.readouterr().err
