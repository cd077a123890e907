"""advise: its measurements, and that it changes nothing."""

import time

import pytest
import torch

import xsoftmax as xs

MODULE = xs.tools.advise_bench

N, D, Q = 600, 8, 64


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(MODULE, "_ROUNDS", 12)
    threads = torch.get_num_threads()
    # steps take microseconds, which waiting threads would make random
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def counts():
    return 1e5 / torch.arange(1, N + 1)


def batch(counts):
    """Zipf-distributed targets, and a table that has learned their frequencies."""
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=32, bias=True)
    with torch.no_grad():
        loss.linear.weight.normal_(0, 0.3)
        loss.linear.bias.copy_((counts / counts.sum()).log())
    return loss, torch.randn(Q, D), torch.multinomial(counts, Q, replacement=True)


def test_a_sampler_with_frequencies_has_the_smaller_error(counts, monkeypatch):
    monkeypatch.setattr(MODULE, "_ROUNDS", 48)
    loss, input, target = batch(counts)
    advice = xs.advise(loss, input, target, 10, counts=counts, samplers=["uniform", "unigram"],
                       draws=[32, 128])
    row = {each.name: each for each in advice.rows}
    for size in (32, 128):
        assert row[f"unigram {size}"].noise < 0.7 * row[f"uniform {size}"].noise
    assert row["unigram 128"].noise < row["unigram 32"].noise and row["uniform 128"].noise < row[
        "uniform 32"].noise
    assert row["as it is"].noise == pytest.approx(row["uniform 32"].noise, rel=0.3)
    assert row["exact"].bias == row["exact"].noise == 0.0
    assert [each.error for each in advice.rows] == sorted(
        each.error for each in advice.rows) and advice.best is advice.rows[0]
    assert advice.queries == Q


def test_figures_match_diagnose(counts, monkeypatch):
    monkeypatch.setattr(MODULE, "_ROUNDS", 100)
    loss, input, target = batch(counts)
    advice = xs.advise(loss, input, target, 10, samplers=["uniform"], draws=[32])
    drawn = {each.name: each for each in advice.rows}["as it is"]
    found = xs.diagnose(loss, input, target, draws=200)
    # Root mean square, with the noise of the table's gradient measured by plain PyTorch.
    tables = torch.stack([
        torch.autograd.grad(loss.estimate(input, target), loss.linear.weight)[0].to_dense()
        for _ in range(200)
    ]).double()
    loss.eval()
    exact = torch.autograd.grad(loss(input, target), loss.linear.weight)[0].double()
    noise = (tables - tables.mean(0)).square().sum((1, 2)).mean().sqrt() / exact.norm()
    assert drawn.noise == pytest.approx(((found.gradient_noise**2 + noise.item()**2) / 2)**0.5,
                                        rel=0.25)


def test_error_matches_its_formula(counts):
    loss, input, target = batch(counts)
    advice = xs.advise(loss, input, target, 10, samplers=["uniform"], draws=[32], model_ms=5.0,
                       budget_ms=70.0)
    assert advice.budget_ms == 70.0
    for row in advice.rows:
        assert row.error == pytest.approx(
            (row.bias**2 + (1 + row.noise**2) * (row.ms + 5.0) / 70.0)**0.5)


@pytest.mark.parametrize("falling", [True, False])
def test_every_line_of_code_makes_the_measured_loss(counts, falling):
    loss, input, target = batch(counts)
    if not falling:
        counts = counts.flip(0)
    loss = xs.SampledSoftmaxLoss.from_linear(loss.linear, sampler="uniform", num_samples=32,
                                             label_smoothing=0.1, reduction="sum")
    advice = xs.advise(loss, input, target, 20, counts=counts, draws=[32, 100])
    names = [row.name for row in advice.rows]
    assert len(set(names)) == len(names)
    assert {
        "exact", "as it is", "unigram 32", "head 32 + unigram 32", "uniform 100", "in_batch",
        "midx 20", "head 150 + unigram 150 + midx 20"
    } <= set(names)
    for row in advice.rows:
        space = {"xs": xs, "counts": counts, "loss": loss}
        exec(row.code, space)
        made = space["loss"]
        assert made.linear is loss.linear and made.linear.bias is not None
        assert made.label_smoothing == 0.1 and made.reduction == "sum"
        if row.name.startswith("head 32"):
            assert torch.equal(
                made.head.sort().values,
                counts.topk(32).indices.sort().values) and made.sampler.num_samples == 32
        made.zero_grad()
        made(input, target).backward()
        assert row.gradient == ("row-sparse" if made.linear.weight.grad.is_sparse else "dense")
    assert str(advice).endswith(advice.best.code) and advice.best.name in str(advice)
    assert "<table>" in advice._repr_html_()


def test_options_of_the_table_are_in_the_code(counts):
    weight = torch.rand(N, dtype=torch.float64) + 0.5
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=32, weight=weight,
                                 ignore_index=0, sparse_grad=False, dtype=torch.float64)
    advice = xs.advise(loss, torch.randn(Q, D, dtype=torch.float64), torch.randint(N, (Q, 3)), 3,
                       samplers=["uniform"], draws=[32])
    space = {"xs": xs, "weight": weight, "loss": loss}
    exec(next(row.code for row in advice.rows if row.name == "uniform 32"), space)
    made = space["loss"]
    assert torch.equal(
        made.weight,
        weight) and made.ignore_index == 0 and made.linear.weight.dtype == torch.float64
    assert made.sparse_grad is False and made.linear.bias is None


def test_unseen_classes_limit_the_candidates(counts):
    """As with counts of a single batch: a sampler of frequencies cannot draw more classes than were
    seen."""
    loss, input, target = batch(counts)
    few = torch.zeros(N)
    few[:40] = counts[:40]
    advice = xs.advise(loss, input, target, 3, counts=few, samplers=["unigram", "uniform"],
                       draws=[32, 128])
    names = [row.name for row in advice.rows]
    assert "unigram 32" in names and "uniform 128" in names and "unigram 128" not in names
    assert "unigram 128: left out, since only 40 classes have a count above 0" in advice.notes
    assert ("head 32 + unigram 32: left out, since only 8 classes outside the head have a count "
            "above 0") in advice.notes


@pytest.mark.parametrize("sampler", ["midx", "in_batch", "uniform"])
def test_nothing_changes(counts, sampler):
    loss, input, target = batch(counts)
    options = {} if sampler == "in_batch" else {"num_samples": 16}
    loss = xs.SampledSoftmaxLoss.from_linear(loss.linear, sampler=sampler,
                                             head_classes=4 if sampler == "uniform" else 0,
                                             **options)
    optimizer = xs.optim.RowAdam(loss.parameters())
    for _ in range(3):
        loss(input, target).backward()
        optimizer.step()
    loss.catch_up()
    gradients = [parameter.grad.clone() for parameter in loss.parameters()]
    leaf = input.clone().requires_grad_()
    state = {name: value.clone() for name, value in loss.state_dict().items()}
    before = torch.get_rng_state()
    xs.advise(loss, leaf, target, 2, counts=counts, draws=[32])
    assert torch.equal(torch.get_rng_state(),
                       before) and loss.training and loss.sampler.training and leaf.grad is None
    assert loss.reduction == "mean" and all(parameter.requires_grad
                                            for parameter in loss.parameters())
    assert all(torch.equal(value, state[name]) for name, value in loss.state_dict().items())
    for parameter, gradient in zip(loss.parameters(), gradients):
        assert torch.equal(parameter.grad.to_dense(), gradient.to_dense())


def test_the_same_seed_draws_the_same(counts, monkeypatch):
    monkeypatch.setattr(MODULE, "_ROUNDS", 3)
    loss, input, target = batch(counts)

    def figures(seed):
        rows = xs.advise(loss, input, target, 30, samplers=["uniform", "midx"], draws=[32],
                         seed=seed).rows
        return {row.name: (row.bias, row.noise, row.draws) for row in rows if row.name != "exact"}

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)
    assert figures(1).keys() == figures(2).keys()


def test_the_time_limit_is_kept(monkeypatch):
    monkeypatch.setattr(MODULE, "_ROUNDS", 1000)
    loss = xs.SampledSoftmaxLoss(32, 30_000, sampler="uniform", num_samples=64)
    input, target = torch.randn(256, 32), torch.randint(30_000, (256,))
    for seconds in (1.5, 3):
        start = time.perf_counter()
        xs.advise(loss, input, target, seconds)
        assert time.perf_counter(
        ) - start < 1.2 * seconds + 0.3  # a step that has begun is completed


def test_part_of_the_batch_and_ignored_targets(counts, monkeypatch):
    loss, input, target = batch(counts)
    target[::2] = -100
    assert xs.advise(loss, input.reshape(8, 8, D), target.reshape(8, 8), 2, samplers=["uniform"],
                     draws=[32]).queries == Q // 2
    monkeypatch.setattr(MODULE, "memory_left", lambda device: 0.0)
    advice = xs.advise(loss, input, target, 10, samplers=["uniform"], draws=[32])
    assert "exact" not in [row.name
                           for row in advice.rows] and "does not fit into memory" in str(advice)


def test_other_losses(counts):
    loss, input, target = batch(counts)
    exact = xs.LinearCrossEntropyLoss.from_linear(loss.linear)
    names = [
        row.name
        for row in xs.advise(exact, input, target, 10, samplers=["uniform"], draws=[32]).rows
    ]
    assert sorted(names) == ["exact", "uniform 32"]
    with pytest.raises(
            TypeError, match="advise: expected a loss over a class table, got "
            "TwoTowerLoss, whose classes are vectors"):
        xs.advise(xs.TwoTowerLoss(N), input, target)
    with pytest.raises(
            TypeError, match="advise: expected a SampledSoftmaxLoss, "
            "LinearCrossEntropyLoss or CaneLoss, got BeamTreeLoss"):
        xs.advise(xs.BeamTreeLoss(D, xs.LabelTree.random(N, 10), num_candidates=4, num_noises=1),
                  input, target)


@pytest.mark.parametrize("change, error, message", [
    (dict(seconds=0), ValueError, "seconds above 0, got 0"),
    (dict(seconds="3"), TypeError, "seconds as a number, got str"),
    (dict(model_ms=-1), ValueError, "model_ms of at least 0, got -1"),
    (dict(counts=torch.ones(3)), ValueError, r"counts of shape \[600\], got \[3\]"),
    (dict(counts="all"), TypeError, "counts as a tensor, an array or a list of numbers, got str"),
    (dict(samplers=["unigram"]), ValueError, "counts for the samplers"),
    (dict(samplers=["nearest"]), ValueError, "nearest"),
    (dict(samplers="midx"), TypeError, r"samplers as a sequence of names, got a string: give "
     r"\['midx'\]"),
    (dict(draws=[0]), ValueError, "draws of at least 1, got 0"),
    (dict(input=torch.full((Q, D), torch.nan)), ValueError, "input with finite values"),
    (dict(input=torch.ones(Q, D + 1)), ValueError, "expected input of shape"),
    (dict(target=torch.full((Q,), -100)), ValueError, "a target that is not ignored, got none"),
])
def test_bad_arguments(counts, change, error, message):
    loss, input, target = batch(counts)
    with pytest.raises(error, match=message):
        xs.advise(loss, **{"input": input, "target": target, "seconds": 2, **change})
