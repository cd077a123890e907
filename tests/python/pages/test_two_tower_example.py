"""The two-tower example, run as in its README, on small generated sequences."""

import json

import pytest
import torch

import xsoftmax as xs
from example_checks import run, run_file

pytest.importorskip("tqdm")

from examples.recommend import candidates, data, two_tower
from examples.recommend.towers import Pairs, Towers, rank

SMALL = [
    "--width", "16", "--batch-size", "64", "--negatives", "32", "--codewords", "4", "--threads", "1"
]


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    path = tmp_path_factory.mktemp("sequences") / "sequences.txt"
    rows = data.generate(users=300, items=60, clusters=12)
    path.write_text("".join(" ".join(map(str, [user, *row])) + "\n"
                            for user, row in enumerate(rows)))
    return path


@pytest.mark.slow
def test_the_command_trains_and_writes_its_files(sequences, tmp_path):
    """Each loss learns to use the last item: a random order has an NDCG@10 of about 0.08."""
    printed = run_file(two_tower, tmp_path, "--data", sequences, "--loss", *candidates.METHODS,
                       "--epochs", "3", "--evaluations", "1", "--seeds", "1", "2", "--lr", "0.02",
                       "--history", "1", "--output", tmp_path / "out", *SMALL)
    runs = json.loads((tmp_path / "out" / "runs.json").read_text())["runs"]
    assert [(one["seed"], one["loss"]) for one in runs] == [(seed, name) for seed in (1, 2)
                                                            for name in candidates.METHODS]
    assert all(one["test NDCG@10"] > 0.12 for one in runs)
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in printed and table.count("\n") == 2 + len(candidates.METHODS) and "+-" in table


@pytest.mark.slow
def test_learning_rate_and_evaluation_are_chosen_by_validation(sequences, tmp_path, monkeypatch):
    """Rates are compared on a seed that is not in the table, and the figures are those of the best
    evaluation, not the last."""
    ranked = []

    def counted(towers, queries, history):
        ranked.append((len(queries.known), rank(towers, queries, history)))
        return ranked[-1][1]

    monkeypatch.setattr(two_tower, "rank", counted)
    assert run(two_tower, "--data", sequences, "--loss", "refined", "--epochs", "8",
               "--evaluations", "4", "--validate", "200", "--lr", "1e-9", "0.05", "--seeds", "3",
               "--output", tmp_path, *SMALL) == 0
    found = json.loads((tmp_path / "runs.json").read_text())
    assert [one["lr"] for one in found["searched"]
            ] == [1e-9, 0.05] and [one["seed"] for one in found["searched"]] == [4, 4]
    (best,) = found["runs"]
    assert best["lr"] == 0.05 and best["seed"] == 3
    assert [users for users, _ in ranked] == [200, 200, 200, 200, 300] * 3
    assert best["valid NDCG@10"] == max(
        figures["NDCG@10"]
        for _, figures in ranked[10:14]) and best["test NDCG@10"] == ranked[14][1]["NDCG@10"]


def test_training_stops_at_the_limit_of_processor_time(sequences, tmp_path):
    assert run(two_tower, "--data", sequences, "--loss", "uniform", "--max-minutes", "0.01",
               "--evaluations", "2", "--output", tmp_path, *SMALL) == 0
    (found,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert 0.01 <= found["minutes"] < 0.02 and 0.005 <= found["best at minute"] <= found[
        "minutes"] and found["steps"] > 5


@pytest.mark.parametrize("unordered", [False, True])
def test_pairs_hold_the_items_before_the_target(unordered):
    rows = [[1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11]]
    found = {}
    for known, lengths, target in Pairs(data.Sequences.of(rows), unordered,
                                        3).batches(7,
                                                   torch.Generator().manual_seed(0)):
        found |= dict(
            zip(target.tolist(), [part.tolist() for part in known.split(lengths.tolist())]))
    if unordered:
        assert found.keys() == {1, 2, 3, 4, 5, 7, 8, 9, 10, 11}
        for target, known in found.items():
            others = next(row for row in rows if target in row)
            assert len(known) == min(3,
                                     len(others) - 1) == len(
                                         set(known)) and set(known) <= set(others) - {target}
    else:
        assert found == {
            2: [1], 3: [1, 2], 4: [1, 2, 3], 5: [2, 3, 4], 8: [7], 10: [9], 11: [9, 10]
        }


@pytest.fixture
def question():
    """Towers of 20 items, the item vectors, five user vectors, and target items."""
    torch.manual_seed(0)
    towers, target = Towers(20, 8), torch.tensor([3, 4, 3, 9, 17])
    return towers, torch.stack([towers.items(torch.tensor([i]))[0] for i in range(20)
                                ]), torch.nn.functional.normalize(torch.randn(5, 8), dim=1), target


def method(name, *arguments):
    rows = [list(range(20)), list(range(10)) * 3, [0, 0], [1], [2]]
    args = two_tower.parse_arguments(["--width", "8", "--temperature", "0.5", *arguments])
    return candidates.METHODS[name](data.make("rows", rows, [[]] * 5, [[]] * 5), args)


@pytest.mark.parametrize("name", ["full", "popularity", "midx"])
def test_with_all_items_as_candidates_the_loss_is_the_softmax(name, question):
    """If a sampler draws as many items as there are, each is drawn once and has weight 1."""
    towers, every, query, target = question
    value = method(name, "--negatives", "20", "--codewords", "2")(towers, query, target)
    torch.testing.assert_close(value,
                               torch.nn.functional.cross_entropy(query @ every.T / 0.5, target))


def test_uniform_candidates_are_not_corrected(question):
    """The loss is the cross entropy over the target and the sampled items (CCE-)."""
    towers, every, query, target = question
    loss = method("uniform", "--negatives", "6")
    random = torch.get_rng_state()
    (drawn,) = loss.sampler.sample(query, target)
    torch.set_rng_state(random)
    scores = query @ every.T / 0.5
    there = torch.zeros(5, 20,
                        dtype=torch.bool).index_fill_(1, drawn.ids,
                                                      True).scatter(1, target[:, None], True)
    assert not there.all() and len(drawn.ids) == 6
    torch.testing.assert_close(
        loss(towers, query, target),
        torch.nn.functional.cross_entropy(scores.masked_fill(~there, -torch.inf), target))


def test_midx_computes_all_item_vectors_only_for_refreshes(question, monkeypatch):
    towers, _, query, target = question
    loss, made = method("midx", "--negatives", "6", "--codewords", "2", "--refresh-every", "32"), []
    all_items = Towers.all_items
    monkeypatch.setattr(Towers, "all_items", lambda self: made.append(step) or all_items(self))
    for step in range(100):
        loss(towers, query, target)
    assert made == [0, 1, 2, 4, 8, 16, 32, 64, 96]


def test_ranking_excludes_known_items():
    torch.manual_seed(0)
    towers = Towers(12, 8)
    queries = data.Queries(data.Sequences.of([[0, 1], [2], [3, 4, 5]]),
                           data.Sequences.of([[7], [], [8, 3]]))
    found = rank(towers, queries, 30)
    every, wanted = towers.items(torch.arange(12)), [[7], [8, 3]]
    predictions = []
    for known in ([0, 1], [3, 4, 5]):
        scores = (
            towers.users(torch.tensor(known), torch.tensor([len(known)])) @ every.T)[0].detach()
        predictions.append([i for i in scores.argsort(descending=True).tolist()
                            if i not in known][:10] + known)
    predictions = torch.tensor([row[:10] for row in predictions])
    assert found["NDCG@10"] == pytest.approx(
        xs.metrics.ndcg_at_k(predictions, [torch.tensor(row) for row in wanted], 10))


@pytest.mark.parametrize("arguments, message", [(["--data", "nowhere.txt"], "nowhere.txt is "
                                                 "neither a file nor a "
                                                 "folder"), (["--epochs", "0"], "--epochs")])
def test_errors_name_the_option_to_change(arguments, message, capsys, tmp_path):
    assert run(two_tower, *arguments, "--output", tmp_path) != 0
    assert message in capsys.readouterr().err
