"""The example of a stream with new items, run as its README says, and the parts of its figure."""

import itertools
import json

import pytest
import torch

from example_checks import run, run_file

pytest.importorskip("tqdm")

from examples.recommend import data, stream
from examples.recommend.stream import Stream, expected_recall

SMALL = ["--width", "16", "--samples", "32", "--batch-size", "64", "--threads", "1"]


def arguments(*more):
    return stream.parse_arguments([*SMALL, *map(str, more)])


def test_the_command_leaves_its_files(tmp_path):
    """All learn: of 60 items that are ranked in random order, 10 have a Recall@10 of 0.17. Items that share rows cannot be told apart."""
    path = tmp_path / "sequences.txt"
    path.write_text("".join(" ".join(map(str, [user, *row])) + "\n" for user, row in enumerate(data.generate(users=500, items=60, clusters=12))))
    printed = run_file(stream, tmp_path, "--data", path, "--order", "random", "--pace", "20", "--capacity", "31", "--history", "1",
                       "--seeds", "1", "2", "--output", tmp_path / "out", *SMALL)
    runs = json.loads((tmp_path / "out" / "runs.json").read_text())["runs"]
    tables = [("id_table", 31), ("hashed", 31), ("full", 60)]
    assert [(one["seed"], one["rows of"], one["rows"]) for one in runs] == [(seed, *table) for seed in (1, 2) for table in tables]
    for of_table, hashed, full in (runs[:3], runs[3:]):
        assert full["Recall@10"] > of_table["Recall@10"] > hashed["Recall@10"] > 0.17
        assert full["Recall@10"] > 0.3
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in printed and table.count("\n") == 5 and "+-" in table


def test_users_begin_in_turn_and_act_at_their_pace():
    rows = [[10, 20, 30], [20, 40], [50]]
    made = Stream.of(rows, "file", 1.5, seed=0)
    assert made.raw.tolist() == [10, 20, 30, 40, 50]
    assert made.raw[made.items[made.order]].tolist() == [10, 20, 20, 50, 40, 30]  # at times 0, 1, 1.5, 2, 2.5, 3
    again, other = (Stream.of(rows * 20, "random", 1.5, seed).order for seed in (1, 2))
    assert torch.equal(again, Stream.of(rows * 20, "random", 1.5, 1).order) and not torch.equal(again, other)
    last = made.order[-1:]
    assert made.raw[made.before(last).items].tolist() == [10, 20] and made.raw[made.before(last, 1).items].tolist() == [20]


def test_recall_is_the_mean_over_the_orders_of_items_that_share_a_row(monkeypatch):
    """Against a count over all orders of ties: five rows with 1, 0, 3, 1, 2 items, of which the query has had one of row 2 and the one of row 3."""
    monkeypatch.setattr(stream, "PLACES", 3)
    items_of_row, had = torch.tensor([1, 0, 3, 1, 2]), torch.tensor([2, 3])
    scores = torch.tensor([[0.5, 9.0, 0.2, 0.4, 0.5], [0.1, 0.0, 0.2, 0.3, -torch.inf]])
    queries = torch.tensor([0, 0])
    for target in (0, 2, 4):
        found = expected_recall(scores, torch.tensor([target, target]), items_of_row, queries, had)
        for query, left_out in enumerate(([2, 3], [])):
            left = items_of_row - torch.bincount(torch.tensor(left_out, dtype=torch.int64), minlength=5)
            items = [(row, i) for row in range(5) for i in range(left[row])]
            hits = [(target, 0) in sorted(order, key=lambda one: -scores[query, one[0]])[:3] for order in itertools.permutations(items)]
            assert found[query].item() == pytest.approx(sum(hits) / len(hits)), (target, query)


def test_what_is_ranked_is_what_was_seen():
    """An item that comes up for the first time is not found, and one of 10 that were seen is found by any model; a user's first action is not asked for."""
    rows = [[1, 2, 3], [2, 1], [4, 1], [1, 99]]
    made = stream.follow("full", rows, arguments("--batch-size", "1", "--pace", "1", "--order", "file"), 0)
    # Times: 1 | 2, 2 | 3, 1, 4 | 1, 1 | 99: asked for are 2 (new), 3 (new), 1, 1, 99 (new).
    assert made["Recall@10"] == pytest.approx(2 / 5)
    assert made["rows"] == 5


def test_an_item_without_a_row_comes_last():
    """In a table for two items, of 13 that come up twice each: those that have a row are found, and the others share what is left of ten places."""
    args = arguments("--capacity", "3", "--admission", "1", "--eviction", "lfu")
    made = Stream.of([list(range(13)), list(range(13))], "file", 1, 0)
    table = stream.Ids(made.raw, 3, args)
    model = stream.Model(3, table.ignored, args)
    table.rows(torch.tensor([5, 6, 5, 6]))
    with torch.no_grad():
        model.loss.linear.bias[0] = 100.0  # the best score of all
    asked = torch.tensor([13 + 6, 13 + 7])
    seen = torch.ones(13, dtype=torch.bool)
    found = stream.rank(model, table, made, asked, seen, 10)
    # Before item 6 the user had 0 .. 5, so 6 comes first of 7; before item 7 both are had, so 6 items without a row have ten places.
    assert found.tolist() == [1.0, 1.0]
    found = stream.rank(model, table, made, torch.tensor([1, 2]), seen, 10)  # 5 and 6 first; eight places for the 10 and 9 others that were not had
    assert found.tolist() == pytest.approx([8 / 10, 8 / 9])


def test_hashing_spreads_ids_that_follow_one_another():
    rows = stream.Hashed(torch.empty(0), 100, arguments()).find(torch.arange(100_000) * 128)
    assert 0 <= rows.min() and rows.max() < 100
    counts = torch.bincount(rows, minlength=100).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square with 99 degrees: above by chance 1 in 10,000 times


def test_nothing_shows_through_before_it_is_asked_for():
    """The figures of the first half of a stream do not know the second."""
    rows = data.generate(users=60, items=40, clusters=8)
    for name in stream.ROWS:
        args = arguments("--capacity", "12", "--pace", "1e6", "--batch-size", "32")  # all first actions, then all second ones, ...
        whole = stream.follow(name, [row[:5] for row in rows], args, 0)
        changed = [row[:4] + [other[4]] for row, other in zip(rows, rows[1:] + rows[:1])]  # the same items
        assert whole["quarter 2"] == stream.follow(name, changed, args, 0)["quarter 2"], name


@pytest.mark.parametrize("given, message", [(["--data", "nowhere.txt"], "--data: expected a file, got nowhere.txt"), (["--capacity", "1"], "--capacity"),
                                            (["--admission", "0"], "--admission"),
                                            (["--batch-size", "1000000"], "--batch-size: expected at most a quarter of the")])
def test_errors_say_what_to_change(given, message, capsys, tmp_path):
    assert run(stream, *given, "--output", tmp_path) != 0
    assert message in capsys.readouterr().err


def test_a_stream_without_a_second_action_is_refused(tmp_path, capsys):
    path = tmp_path / "one.txt"
    path.write_text("1 5\n2 6\n")
    assert run(stream, "--data", path, "--output", tmp_path) == 2
    assert "expected a user with at least two items" in capsys.readouterr().err
