"""The two-tower example, run as its README says, on small generated sequences."""

import json

import pytest
import torch

import xsoftmax as xs
from example_checks import run, run_file

pytest.importorskip("tqdm")

from examples.recommend import data, two_tower

SMALL = ["--width", "16", "--batch-size", "64", "--negatives", "32", "--threads", "1"]


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    path = tmp_path_factory.mktemp("sequences") / "sequences.txt"
    rows = data.generate(users=300, items=60, clusters=12)
    path.write_text("".join(" ".join(map(str, [user, *row])) + "\n" for user, row in enumerate(rows)))
    return path


def test_the_command_leaves_its_files(sequences, tmp_path):
    """Each loss learns that the last item says much: a random order has an NDCG@10 of about 0.08."""
    printed = run_file(two_tower, tmp_path, "--data", sequences, "--loss", *two_tower.LOSSES, "--epochs", "5", "--seeds", "1", "2", "--lr", "0.01", "--history", "1",
                       "--output", tmp_path / "out", *SMALL)
    runs = json.loads((tmp_path / "out" / "runs.json").read_text())["runs"]
    assert [(one["seed"], one["loss"]) for one in runs] == [(seed, name) for seed in (1, 2) for name in two_tower.LOSSES]
    assert all(one["test NDCG@10"] > 0.12 for one in runs)
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in printed and table.count("\n") == 2 + len(two_tower.LOSSES) and "+-" in table


@pytest.mark.parametrize("unordered", [False, True])
def test_pairs_hold_what_is_known_before(unordered):
    args = two_tower.parse_arguments(["--batch-size", "7", "--history", "3", *(["--unordered"] if unordered else [])])
    rows = [[1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11]]
    found = {}
    for known, lengths, target in two_tower.Pairs(data.Sequences.of(rows), args).batches(torch.Generator().manual_seed(0)):
        found |= {y: part for y, part in zip(target.tolist(), [part.tolist() for part in known.split(lengths.tolist())])}
    if unordered:
        assert found.keys() == {1, 2, 3, 4, 5, 7, 8, 9, 10, 11}
        for target, known in found.items():
            others = next(row for row in rows if target in row)
            assert len(known) == min(3, len(others) - 1) == len(set(known)) and set(known) <= set(others) - {target}
    else:
        assert found == {2: [1], 3: [1, 2], 4: [1, 2, 3], 5: [2, 3, 4], 8: [7], 10: [9], 11: [9, 10]}


def test_the_full_softmax_is_that_of_all_items():
    torch.manual_seed(0)
    towers, target = two_tower.Towers(20, 8), torch.tensor([3, 4])
    query = towers.users(torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
    vectors = torch.stack([towers.items(torch.tensor([i]))[0] for i in range(20)])
    torch.testing.assert_close(two_tower.softmax_of_all(towers, query, target, 0.5), torch.nn.functional.cross_entropy(query @ vectors.T / 0.5, target))


def test_ranking_leaves_out_what_a_user_has():
    torch.manual_seed(0)
    towers, args = two_tower.Towers(12, 8), two_tower.parse_arguments([])
    queries = data.Queries(data.Sequences.of([[0, 1], [2], [3, 4, 5]]), data.Sequences.of([[7], [], [8, 3]]))
    found = two_tower.rank(towers, queries, args)
    every, wanted = towers.items(torch.arange(12)), [[7], [8, 3]]
    predictions = []
    for known in ([0, 1], [3, 4, 5]):
        scores = (towers.users(torch.tensor(known), torch.tensor([len(known)])) @ every.T)[0].detach()
        predictions.append([i for i in scores.argsort(descending=True).tolist() if i not in known][:10] + known)
    predictions = torch.tensor([row[:10] for row in predictions])
    assert found["NDCG@10"] == pytest.approx(xs.metrics.ndcg_at_k(predictions, [torch.tensor(row) for row in wanted], 10))


@pytest.mark.parametrize("arguments, message", [(["--data", "nowhere.txt"], "nowhere.txt is neither a file nor a folder"), (["--epochs", "0"], "--epochs")])
def test_errors_say_what_to_change(arguments, message, capsys, tmp_path):
    assert run(two_tower, *arguments, "--output", tmp_path) != 0
    assert message in capsys.readouterr().err
