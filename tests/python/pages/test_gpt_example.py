"""The GPT example on a small generated text."""

import json
import random

import pytest
import torch

from example_checks import check_resume, run, run_ranks
from ranks import needs_gloo

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from examples.gpt import data, report, train
from examples.gpt.model import GPT

SMALL = [
    "--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "4",
    "--head", "8", "--samples", "16", "--midx-head", "8", "--midx-samples", "4", "--codewords", "4",
    "--threads", "1", "--no-compile", "--lr", "0.02"
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of texts whose words predict the next one."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("text")
    names = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(60)]
    for i in range(40):
        begins = [rng.randrange(60) for _ in range(20)]
        lines = [" ".join(names[(at + j) % 60] for j in range(8)) for at in begins]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


def history_of(folder):
    return json.loads((folder / "history.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_loss_learns_in_turns(text, tmp_path, precision, capsys):
    assert run(train, "--data", text, "--loss", "plain", "exact", "sampled", "midx", "--epochs",
               "6", "--eval-epochs", "3", "--output", tmp_path, "--precision", precision,
               "--z-loss", "1e-4", "--softcap", "20", *SMALL) == 0
    runs = {entry["loss"]: entry for entry in history_of(tmp_path)["runs"]}
    assert list(runs) == ["plain", "exact", "sampled", "midx"]
    for entry in runs.values():
        first, last = (point["valid_loss"] for point in entry["points"])
        # Each of the 60 words has one successor, except at the end of a line: 1/9 log 60 = 0.45.
        assert 0.4 < last < min(first, 1.6)
        assert 0.4 < entry["test_loss"] < 1.6
    # These two differ in rounding alone.
    tolerance = 1e-3 if precision == "float32" else 2e-2
    assert runs["plain"]["test_loss"] == pytest.approx(runs["exact"]["test_loss"], rel=tolerance)
    printed = [line for line in capsys.readouterr().out.splitlines() if "valid loss" in line]
    assert [line.partition(":")[0] for line in printed[:8]] == [*runs] * 2
    assert (tmp_path / "loss.png").stat().st_size > 5000
    assert (tmp_path / "table.md").read_text().count("\n") == 6


def test_a_table_of_16_bits_learns(text, tmp_path):
    assert run(train, "--data", text, "--loss", "sampled", "--epochs", "6", "--output", tmp_path,
               "--table-dtype", "bfloat16", *SMALL) == 0
    assert 0.4 < history_of(tmp_path)["runs"][0]["test_loss"] < 1.6


@pytest.mark.parametrize("loss", ["plain", "midx"])
def test_a_resumed_run_is_the_same(text, tmp_path, monkeypatch, loss):
    arguments = ["--data", text, "--loss", loss, "--epochs", "1", "--output", tmp_path, *SMALL]
    check_resume(train, arguments, tmp_path, monkeypatch)


def test_a_larger_budget_goes_on_and_a_finished_run_writes_its_files(text, tmp_path):
    arguments = [
        "--data", text, "--loss", "plain", "sampled", "--schedule", "constant", "--checkpoint",
        tmp_path / "run.pt", *SMALL
    ]
    assert run(train, *arguments, "--epochs", "1", "--output", tmp_path / "one") == 0
    more = [*arguments, "--epochs", "2", "--resume", "--output"]
    assert run(train, *more, tmp_path / "two") == 0
    runs = history_of(tmp_path / "two")["runs"]
    assert [entry["epochs"] for entry in runs] == [2, 2] and all(map(report.points_of, runs))
    assert run(train, *more, tmp_path / "three") == 0
    assert history_of(tmp_path / "three")["runs"] == runs


@pytest.mark.slow
@needs_gloo
def test_two_ranks_train(text, tmp_path):
    arguments = ["--data", text, "--epochs", "6", *SMALL]
    run_ranks(train, tmp_path, *arguments, "--loss", "plain", "sampled", "--table", "replicated",
              "--output", tmp_path / "two")
    assert run(train, *arguments, "--loss", "plain", "--output", tmp_path / "one") == 0
    one, (two,
          sampled) = history_of(tmp_path / "one")["runs"][0], history_of(tmp_path / "two")["runs"]
    assert two["steps"] == one["steps"]
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=2e-2)
    assert 0.4 < sampled["test_loss"] < 1.6


def test_byte_pairs_are_those_of_the_tokenizer(text, tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    trained = data.load_byte_pairs(str(text), 300, path, None)
    again = data.load_byte_pairs(str(text), 7, path, None)
    assert trained.num_tokens == again.num_tokens == 300 and trained.unit == "byte pairs"
    from tokenizers import Tokenizer
    coder = Tokenizer.from_file(str(path))
    for split in ("train", "valid", "test"):
        assert torch.equal(getattr(trained, split), getattr(again, split))
        decoded = coder.decode(getattr(trained, split).tolist())
        assert len(decoded.split()) > 100 and decoded.split()[0] in (text / "0.txt").read_text() + (
            "".join(file.read_text() for file in text.glob("*.txt")))
    assert torch.equal(trained.counts, torch.bincount(trained.train, minlength=300))
    limited = data.load_byte_pairs(str(text), 300, path, 500)
    assert len(limited.train) == 500 and len(limited.valid) == len(limited.test) == 50


def test_a_position_sees_no_later_one():
    model = GPT(20, 16, 2, 2, 8, sparse=False)
    for block in model.body.blocks:  # they begin as the identity
        torch.nn.init.normal_(block.attention_out.weight)
        torch.nn.init.normal_(block.feed_forward_out.weight)
    ids = torch.randint(20, (3, 8))
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 20
    hidden, other = model(ids), model(changed)
    torch.testing.assert_close(hidden[:, :5], other[:, :5])
    assert not torch.allclose(hidden[:, 5:], other[:, 5:])
    # Positions count: the same token at other places has another state.
    same = model(torch.full((1, 8), 3))
    swapped = model(ids.flip(1)).flip(1)
    assert not torch.allclose(swapped, hidden) and same.shape == (1, 8, 16)


def test_windows_are_the_same_for_all_losses_and_cover_an_epoch():
    ids = torch.arange(101)
    windows, others = (data.Windows(ids, 10, seed=3) for _ in range(2))
    seen = []
    for step in range(2):
        inputs, targets = windows.batch(step, 5, slice(None))
        assert torch.equal(inputs + 1, targets) and torch.equal(
            inputs,
            others.batch(step, 5, slice(None))[0])
        seen.append(inputs[:, 0])
    assert sorted(torch.cat(seen).tolist()) == list(range(0, 100, 10))
    assert not torch.equal(windows.batch(2, 5, slice(None))[0][:, 0], seen[0])
    parts = [windows.batch(2, 5, part)[0] for part in (slice(0, 2), slice(2, 5))]
    assert torch.equal(torch.cat(parts), windows.batch(2, 5, slice(None))[0])


@pytest.mark.parametrize("arguments, message", [
    (["--width", "18", "--heads", "4"], "--width: expected a multiple of 2 * --heads, 8, got 18"),
    (["--head", "70", "--samples", "100"], "--loss sampled: expected at most"),
    (["--context", "4000"], "expected more than one batch of 4 x 4000 tokens"),
    (["--loss", "cce", "--z-loss", "1e-4"], "cce"),
    (["--loss", "midx", "--codewords", "2000"], "--loss midx: MidxSampler: expected codewords"),
    (["--tokenizer", "tokens.json"], "--tokenizer: expected --tokens byte_pairs, got words"),
    (["--tokens", "byte_pairs", "--tokenizer", __file__
      ], "--tokenizer: expected a file of the package tokenizers"),
    (["--loss", "plain", "--table-dtype", "bfloat16"], "expected --loss sampled or midx"),
])
def test_options_that_cannot_be_met_are_named(text, tmp_path, capsys, arguments, message):
    assert run(train, "--data", text, "--output", tmp_path, *SMALL, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("goal, seconds", [(5.0, 10.0), (4.5, 15.0), (4.0, 20.0), (3.9, None)])
def test_time_to_a_loss_is_interpolated(goal, seconds):
    curve = [{"seconds": 10.0, "loss": 5.0}, {"seconds": 20.0, "loss": 4.0}]
    assert report.seconds_to_reach(curve, goal) == seconds
