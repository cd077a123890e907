"""The example of a stream with new items, run as in its README, and the parts of its metric."""

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


@pytest.mark.slow
def test_the_command_trains_and_writes_its_files(tmp_path):
    """All tables learn: a random order of 60 items has a Recall@10 of 0.17. Hashed items that share
    a row cannot be distinguished."""
    path = tmp_path / "sequences.txt"
    path.write_text("".join(
        " ".join(map(str, [user, *row])) + "\n"
        for user, row in enumerate(data.generate(users=500, items=60, clusters=12))))
    printed = run_file(stream, tmp_path, "--data", path, "--order", "random", "--pace", "20",
                       "--capacity", "31", "--history", "1", "--seeds", "1", "2", "--output",
                       tmp_path / "out", *SMALL)
    runs = json.loads((tmp_path / "out" / "runs.json").read_text())["runs"]
    tables = [("id_table", 31), ("hashed", 31), ("full", 60)]
    assert [(one["seed"], one["table"], one["rows"])
            for one in runs] == [(seed, *table) for seed in (1, 2) for table in tables]
    for of_table, hashed, full in (runs[:3], runs[3:]):
        assert full["Recall@10"] > of_table["Recall@10"] > hashed["Recall@10"] > 0.17
        assert full["Recall@10"] > 0.3
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in printed and table.count("\n") == 5 and "+-" in table


def test_users_start_one_after_another_and_act_at_the_given_pace():
    rows = [[10, 20, 30], [20, 40], [50]]
    made = Stream.of(rows, "file", 1.5, seed=0)
    assert made.raw.tolist() == [10, 20, 30, 40, 50]
    # at times 0, 1, 1.5, 2, 2.5, 3
    assert made.raw[made.items[made.order]].tolist() == [10, 20, 20, 50, 40, 30]
    again, other = (Stream.of(rows * 20, "random", 1.5, seed).order for seed in (1, 2))
    assert torch.equal(again,
                       Stream.of(rows * 20, "random", 1.5,
                                 1).order) and not torch.equal(again, other)
    last = made.order[-1:]
    assert made.raw[made.before(last).items].tolist() == [10, 20] and made.raw[made.before(
        last, 1).items].tolist() == [20]


def test_recall_is_the_mean_over_orders_of_items_that_share_a_row(monkeypatch):
    """The expected recall equals a count over all orders of ties.

    Five rows have 1, 0, 3, 1, 2 items; the query has already had one of row 2 and that of row 3.
    """
    monkeypatch.setattr(stream, "PLACES", 3)
    items_of_row, had = torch.tensor([1, 0, 3, 1, 2]), torch.tensor([2, 3])
    scores = torch.tensor([[0.5, 9.0, 0.2, 0.4, 0.5], [0.1, 0.0, 0.2, 0.3, -torch.inf]])
    queries = torch.tensor([0, 0])
    for target in (0, 2, 4):
        found = expected_recall(scores, torch.tensor([target, target]), items_of_row, queries, had)
        for query, left_out in enumerate(([2, 3], [])):
            left = items_of_row - torch.bincount(torch.tensor(left_out, dtype=torch.int64),
                                                 minlength=5)
            items = [(row, i) for row in range(5) for i in range(left[row])]
            hits = [(target, 0) in sorted(order, key=lambda one: -scores[query, one[0]])[:3]
                    for order in itertools.permutations(items)]
            assert found[query].item() == pytest.approx(sum(hits) / len(hits)), (target, query)


def test_only_items_seen_before_are_ranked():
    """A new item is never found; with at most ten seen items, any model finds a seen one.

    The first action of a user is not evaluated.
    """
    rows = [[1, 2, 3], [2, 1], [4, 1], [1, 99]]
    made = stream.follow("full", rows,
                         arguments("--batch-size", "1", "--pace", "1", "--order", "file"), 0)
    # Times: 1 | 2, 2 | 3, 1, 4 | 1, 1 | 99. Evaluated: 2 (new), 3 (new), 1, 1, 99 (new).
    assert made["Recall@10"] == pytest.approx(2 / 5)
    assert made["rows"] == 5


def test_items_without_a_row_are_ranked_last():
    """Of 13 items, two have a row and are found; the others share the remaining places of ten."""
    args = arguments("--capacity", "3", "--admission", "1", "--eviction", "lfu")
    made = Stream.of([list(range(13)), list(range(13))], "file", 1, 0)
    table = stream.Ids(made.raw, 3, args)
    model = stream.Model(3, table.ignored, args)
    table.insert(torch.tensor([5, 6, 5, 6]))
    with torch.no_grad():
        model.loss.linear.bias[0] = 100.0  # the best score of all
    asked = torch.tensor([13 + 6, 13 + 7])
    seen = torch.ones(13, dtype=torch.bool)
    found = stream.rank(model, table, made, asked, seen, 10)
    # Before item 6 the user had items 0 to 5, so 6 is first of 7. Before item 7 the user had both
    # items with a row, so 6 items without one share ten places.
    assert found.tolist() == [1.0, 1.0]
    # 5 and 6 are first; eight places remain for 10 or 9 other items
    found = stream.rank(model, table, made, torch.tensor([1, 2]), seen, 10)
    assert found.tolist() == pytest.approx([8 / 10, 8 / 9])


def test_hashing_spreads_consecutive_ids_evenly():
    rows = stream.Hashed(torch.empty(0), 100, arguments()).find(torch.arange(100_000) * 128)
    assert 0 <= rows.min() and rows.max() < 100
    counts = torch.bincount(rows, minlength=100).double()
    # chi-square with 99 degrees of freedom: p < 1e-4
    assert ((counts - 1000)**2 / 1000).sum() < 160


def test_figures_do_not_depend_on_later_actions():
    """Figures of the first half of a stream stay the same if the second half changes."""
    rows = data.generate(users=60, items=40, clusters=8)
    for name in stream.ROWS:
        # all first actions, then all second ones, ...
        args = arguments("--capacity", "12", "--pace", "1e6", "--batch-size", "32")
        whole = stream.follow(name, [row[:5] for row in rows], args, 0)
        # the same items
        changed = [row[:4] + [other[4]] for row, other in zip(rows, rows[1:] + rows[:1])]
        assert whole["quarter 2"] == stream.follow(name, changed, args, 0)["quarter 2"], name


@pytest.mark.parametrize("given, message", [(["--data", "nowhere.txt"], "--data: expected a file, "
                                             "got nowhere.txt"),
                                            (["--capacity", "1"], "--capacity"),
                                            (["--admission", "0"], "--admission"),
                                            (["--batch-size", "1000000"], "--batch-size: expected "
                                             "at most a quarter of "
                                             "the")])
def test_errors_name_the_option_to_change(given, message, capsys, tmp_path):
    assert run(stream, *given, "--output", tmp_path) != 0
    assert message in capsys.readouterr().err


def test_a_stream_without_a_second_action_is_refused(tmp_path, capsys):
    path = tmp_path / "one.txt"
    path.write_text("1 5\n2 6\n")
    assert run(stream, "--data", path, "--output", tmp_path) == 2
    assert "expected a user with at least two items" in capsys.readouterr().err
