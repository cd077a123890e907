"""The language model example, run as in its README, on a small generated text."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from example_checks import check_resume, check_same_figures, run, run_file, run_ranks
from ranks import needs_gloo

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from examples.language_model import compare_samplers, data, ngram, train
from examples.language_model.model import ENCODERS, Completer, script

SMALL = [
    "--width", "16", "--batch-size", "4", "--bptt", "8", "--head", "8", "--samples", "16",
    "--threads", "1"
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text whose words predict the next one, with names, numbers and symbols."""
    rng = random.Random(0)
    names = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(60)]
    lines = []
    for _ in range(150):
        at = rng.randrange(60)
        lines.append(" ".join(names[(at + i) % 60] for i in range(6)) + " = "
                     f"f({rng.randrange(100)}, "
                     "'été')")
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_command_trains_and_writes_its_files(text, tmp_path):
    """Run as a user does: both losses learn the text, and all documented files are complete."""
    run_file(train, tmp_path, "--data", text, "--loss", "sampled", "exact", "--epochs", "4",
             "--output", tmp_path / "out", "--dropout", "0.1", "--optimizer", "adam", "--lr",
             "0.01", *SMALL)
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert [entry["loss"] for entry in history["runs"]] == ["sampled", "exact"]
    for entry in history["runs"]:
        assert len(entry["points"]) == 4 and entry["epochs"] == 4
        assert entry["points"][-1]["valid_perplexity"] < min(entry["points"][0]["valid_perplexity"],
                                                             40)
        assert 1 < entry["test_perplexity"] < 40
    assert (tmp_path / "out" / "table.md").read_text().count("\n") == 4
    assert (tmp_path / "out" / "perplexity.png").stat().st_size > 5000
    # <eos> and three tokens
    assert torch.jit.load(tmp_path / "out" / "model.pt").encode("f ( 12").numel() == 4


@pytest.mark.slow
@needs_gloo
def test_two_ranks_train_like_one_process(text, tmp_path):
    """With a split table tied to the embedding, resumed from a checkpoint; columns of text do not
    divide evenly."""
    arguments = [
        "--data", text, "--dropout", "0", "--optimizer", "adam", "--lr", "0.01", *SMALL,
        "--batch-size", "5"
    ]
    assert run(train, *arguments, "--epochs", "2", "--output", tmp_path / "one") == 0
    ranks = [
        *arguments, "--table", "split", "--output", tmp_path / "two", "--checkpoint",
        tmp_path / "two.pt"
    ]
    run_ranks(train, tmp_path, *ranks, "--epochs", "1")
    printed, _ = run_ranks(train, tmp_path, *ranks, "--epochs", "2", "--resume")
    check_same_figures(tmp_path / "one", tmp_path / "two")
    # once for the second epoch and once in the table: only rank 0 prints
    assert printed.count("valid perplexity") == 2
    one, two = (torch.jit.load(tmp_path / name / "model.pt") for name in ("one", "two"))
    ids = torch.tensor([1, 5, 3, 2])
    torch.testing.assert_close(two(ids, 5), one(ids, 5), rtol=1e-3, atol=1e-3)
    assert run(train, *arguments, "--epochs", "2", "--output", tmp_path, "--checkpoint",
               tmp_path / "two.pt", "--resume") == 2


@pytest.mark.parametrize("kind", ["midx", "midx_learnable", "midx_learnable_pq"])
def test_codewords_are_trained_if_they_are_learnable(kind, text):
    args = train.parse_arguments([
        "--data",
        str(text), "--sampler", kind, "--codewords", "4", "--refresh-every", "100", *SMALL
    ])
    trained = train.Run("sampled", data.load_corpus(str(text)), args)
    trained.step()
    before = trained.loss.sampler.codewords1.detach().clone()
    trained.step()
    assert torch.equal(trained.loss.sampler.codewords1, before) == (kind == "midx")


def test_samplers_are_compared_on_a_trained_model(text, tmp_path, capsys):
    compare, checkpoint = compare_samplers.main, tmp_path / "run.pt"
    text = Path(shutil.copy(text, tmp_path / "text.txt"))
    assert run(train, "--data", text, "--epochs", "2", "--loss", "exact", "--output", tmp_path,
               "--checkpoint", checkpoint, *SMALL) == 0
    out = tmp_path / "samplers"
    options = [
        "--checkpoint",
        str(checkpoint), "--samples", "5", "--codewords", "8", "--draws", "4", "--output",
        str(out)
    ]
    assert compare(options) == 0
    table = (out / "samplers.md").read_text().splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in table[2:]
            ] == ["unigram", "uniform", "log_uniform", "midx", "midx_pq", "lsh", "sphere", "rff"]
    assert "gradient bias" in table[0] and (out / "samplers.png").stat().st_size > 5000
    capsys.readouterr()
    assert compare(["--checkpoint", str(text)
                    ]) == 2 and "is not a checkpoint" in capsys.readouterr().err
    assert compare([*options, "--samples", "500"
                    ]) == 2 and "no more than the" in capsys.readouterr().err
    assert compare([
        *options, "--head", "-1"
    ]) == 2 and "--head and --samples: expected 0 or more" in capsys.readouterr().err
    assert compare([*options, "--draws", "1"
                    ]) == 2 and "--draws: expected at least 2" in capsys.readouterr().err
    assert compare([*options, "--codewords", "2000"
                    ]) == 2 and "codewords of at most 1024" in capsys.readouterr().err
    text.write_text(text.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    assert compare(options) == 2 and "is not what " in capsys.readouterr().err


@pytest.mark.parametrize("model, optimizer, sampler", [("lstm", "adagrad", "unigram"),
                                                       ("transformer", "adam", "midx")])
def test_resume_is_bit_for_bit(text, tmp_path, model, optimizer, sampler, monkeypatch):
    check_resume(train, [
        "--data", text, "--model", model, "--optimizer", optimizer, "--sampler", sampler,
        "--epochs", "2", "--output", tmp_path / "out", *SMALL
    ], tmp_path, monkeypatch)


@pytest.mark.parametrize("options",
                         [["--candidates-from", "routed", "--subsets", "9"],
                          ["--candidates-from", "midx", "--noise", "midx", "--codewords", "4"],
                          ["--candidates-from", "bigram"], []],
                         ids=["routed", "midx", "bigram", "default"])
def test_cane_resumes_and_saves_its_model(text, tmp_path, options, monkeypatch):
    """A resumed run has the same bits, and the saved model gives the predictions of the loss, whose
    table is tied to the embedding."""
    arguments = [
        "--data", text, "--loss", "cane", "--candidates", "12", "--epochs", "2", "--output",
        tmp_path / "out", *SMALL, *options
    ]
    check_resume(train, arguments, tmp_path, monkeypatch)
    model = torch.jit.load(tmp_path / "out" / "model.pt")
    corpus = data.load_corpus(str(text))
    args = train.parse_arguments([str(argument) for argument in arguments])
    trained = train.Run("cane", corpus, args)
    trained.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["runs"]["cane"])
    trained.encoder.eval()
    ids = torch.tensor([1, 5, 3, 2])
    hidden, _ = trained.encoder(ids.unsqueeze(0), [])
    log_prob, likely = model(ids, 5)
    want = trained.loss.log_prob(hidden[0, -1]).topk(5)
    torch.testing.assert_close(log_prob, want.values)
    assert likely.tolist() == want.indices.tolist()
    routed = "routed" in options
    rows = trained.loss.class_table()[0] if routed else trained.loss.linear.weight
    subset = trained.loss.edges.weight[trained.loss.tree.parent[trained.loss.tree.class_node] -
                                       1] if routed else 0.0
    torch.testing.assert_close(trained.encoder.embedding(ids), (rows - subset)[ids])


def test_successors_are_the_most_frequent(text):
    corpus = data.load_corpus(str(text))
    num_words, k = len(corpus.words), 7
    followers = [Counter() for _ in range(num_words)]
    for word, following in zip(corpus.train.tolist(), corpus.train.tolist()[1:]):
        followers[word][following] += 1
    assert any(0 < len(found) < k
               for found in followers) and any(len(found) > k for found in followers)
    table = ngram.successors(corpus.train, num_words, k)
    for found, row in zip(followers, table.tolist()):
        best = sorted(found, key=lambda word: (-found[word], word))[:k]
        assert row == best + [word for word in range(k) if word not in best][:k - len(best)]
    whole = ngram.successors(corpus.train, num_words, num_words)
    assert torch.equal(whole.sort(1).values, torch.arange(num_words).expand(num_words, -1))


def test_bigram_candidates_follow_the_current_word(text, tmp_path, monkeypatch):
    arguments = [
        "--data", text, "--loss", "cane", "--candidates-from", "bigram", "--candidates", "5",
        "--output", tmp_path, *SMALL
    ]
    run_ = train.Run("cane", data.load_corpus(str(text)),
                     train.parse_arguments([str(a) for a in arguments]))
    seen = []
    monkeypatch.setattr(run_.loss, "forward",
                        lambda input, target, candidates: seen.append(candidates) or input.sum())
    inputs = run_.parts["train"][0][0]
    run_.train_loss()
    assert torch.equal(seen[0], run_.successors[inputs]) and seen[0].shape == (*inputs.shape, 5)


@pytest.mark.parametrize(
    "options",
    [["exact"], ["sampled"], ["cane", "--candidates-from", "routed", "--subsets", "9"], ["cane"]],
    ids=["exact", "sampled", "routed", "cane"])
def test_unigram_bias_starts_with_the_frequencies(text, tmp_path, options):
    """Without context, probabilities equal word frequencies."""
    arguments = [
        "--data", text, "--unigram-bias", "--candidates", "5", "--output", tmp_path, *SMALL,
        "--loss", *options
    ]
    corpus = data.load_corpus(str(text))
    start = train.Run(options[0], corpus,
                      train.parse_arguments([str(argument) for argument in arguments]))
    counts = corpus.counts.clamp(min=1)
    torch.testing.assert_close(
        start.loss.log_prob(torch.zeros(1, 16))[0].exp(), counts / counts.sum())


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_the_scripted_model_gives_the_predictions_of_the_eager_one(text, tmp_path, model):
    corpus = data.load_corpus(str(text))
    encoder = ENCODERS[model](len(corpus.words), width=16, dropout=0.5)
    special = (data.UNKNOWN, data.END_OF_LINE, data.NUMBER)
    eager = Completer(encoder, torch.nn.Linear(16, len(corpus.words)), corpus.words, False, special)
    script(eager).save(str(tmp_path / "model.pt"))
    scripted = torch.jit.load(tmp_path / "model.pt")

    prompt = "été_12(x) = 'naïve' … \n\n \t f(3.5e10, zzz)"
    ids = scripted.encode(prompt)
    index = {word: i for i, word in enumerate(corpus.words)}
    expected = [index[data.END_OF_LINE]
                ] + [index.get(token, index[data.UNKNOWN]) for token in data.tokenise(prompt)][:-1]
    assert ids.tolist() == expected
    assert scripted.decode(ids[:5]) == "été <unk> <number> ("  # no underscore in the text

    assert scripted.encode("").tolist() == [index[data.END_OF_LINE]]

    log_prob, likely = scripted(ids, 7)
    wanted = torch.log_softmax(eager.linear(encoder(ids[None, -encoder.context:], [])[0][0, -1]),
                               -1).topk(7)
    torch.testing.assert_close(log_prob, wanted.values)
    assert likely.tolist() == wanted.indices.tolist()
    words = scripted.complete(ids, 50, 1.0, 10)
    assert len(words) == 50 and scripted.unknown not in words.tolist()
    assert scripted.complete(ids, 1, 0.0).item() == next(i for i in likely.tolist()
                                                         if i != scripted.unknown)
    # Ten samples of the two likeliest words, drawn as from all scores.
    torch.manual_seed(3)
    drawn = [scripted.complete(ids, 1, 0.7, 2).item() for _ in range(10)]
    torch.manual_seed(3)
    known = wanted.indices != scripted.unknown
    scores, words = wanted.values[known][:2], wanted.indices[known][:2]
    choices = [torch.multinomial((scores / 0.7).softmax(0), 1) for _ in range(10)]
    assert drawn == [words[choice].item() for choice in choices]


@pytest.mark.parametrize("options, message", [
    (["--sampler", "unigram", "--distinct"], "--distinct: expected a midx sampler, got unigram"),
    (["--sampler", "in_batch", "--private"], "--private: expected a sampler that draws, got in_b"),
])
def test_options_that_a_sampler_does_not_have_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        train.parse_arguments(options)
    assert message in capsys.readouterr().err


def test_batches_cover_every_word_once():
    """Columns continue from batch to batch, and padding is not counted, so a perplexity covers the
    whole text."""
    batches = data.Batches(torch.arange(100, 172), batch_size=5, bptt=4, device=torch.device("cpu"))
    pairs = []
    for i in range(len(batches)):
        inputs, targets, count = batches[i]
        counted = targets != batches.IGNORED
        assert count == counted.sum()
        assert torch.equal(inputs[counted] + 1, targets[counted])
        pairs += targets[counted].tolist()
    assert sorted(pairs) == list(range(101, 172))


def test_the_vocabulary_is_sorted_by_frequency(tmp_path):
    """Rare words, and words that training lacks, become <unk>."""
    for split, content in {"train": "b b b\nb a a c\n", "valid": "a c d\n", "test": "b\n"}.items():
        (tmp_path / f"tiny.{split}.txt").write_text(content)
    corpus = data.load_corpus(str(tmp_path), min_count=2)
    assert corpus.words == ["b", "<eos>", "a", "<unk>"]
    assert corpus.counts.tolist() == [4, 2, 2, 1]
    assert corpus.valid.tolist() == [2, 3, 3, 1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "no-such-file"], "neither a file nor a folder"),
        (["--samples", "5000"], "take fewer"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--dropout", "1"], "less than 1"),
        (["--lr", "-1"], "more than 0"),
        (["--table", "split"], "--table split: expected several processes, as `torchrun "
         "--nproc-per-node 2"),
    ],
)
def test_errors_name_the_option_to_change(text, tmp_path, capsys, arguments, message):
    assert run(train, "--data", text, "--output", tmp_path, *SMALL, *arguments) == 2
    assert message in capsys.readouterr().err


def test_resume_refuses_other_arguments(text, tmp_path, capsys):
    arguments = [
        "--data", text, "--epochs", "1", "--output", tmp_path, "--checkpoint", tmp_path / "c.pt",
        *SMALL
    ]
    assert run(train, *arguments) == 0
    assert run(train, *arguments, "--resume", "--layers", "1") == 2
    assert "--layers 2, and this run has 1" in capsys.readouterr().err
