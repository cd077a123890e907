"""Statistics and comparisons for the tests of samplers."""

import copy
import io
import math

import pytest
import torch
from scipy import stats

import xsoftmax as xs
from xsoftmax._core.options import option_text


def seed(value):
    return torch.tensor(value, dtype=torch.int64)


def zipf(n, power=1.0):
    return torch.arange(1, n + 1, dtype=torch.float64).pow(-power)


def queries(count):
    return torch.zeros(count, 4)


def changed(sampler, **options):
    """Returns a copy of a sampler with the same index and other options."""
    other = copy.deepcopy(sampler)
    given = dict(option.split("=") for option in sampler.options.split(","))
    other.options = option_text(**(given | options))
    for name, value in options.items():
        if hasattr(other, name):
            setattr(other, name, value)
    return other


def log_prob(sampler, queries, ids):
    """Returns log q of samples with replacement."""
    return sampler.log_count(queries, ids) - math.log(sampler.num_samples)


def chi_square(counts, expected):
    """Returns the p-value; cells with fewer than five expected draws are merged."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    return stats.chisquare(counts[keep].numpy(),
                           (expected[keep] * counts.sum() / expected[keep].sum()).numpy()).pvalue


def check_scripted_compiled_and_saved(make_loss):
    """Checks that three steps have the same losses in eager mode, scripted and compiled, and that a
    saved and loaded loss continues like the original."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    values = []
    for wrap in (lambda m: m, torch.jit.script,
                 lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(5)
        loss = make_loss()
        x, target = torch.randn(6, loss.in_features), torch.randint(loss.num_classes, (6,))
        called = wrap(loss)
        torch.manual_seed(6)
        values.append([called(x, target).item() for _ in range(3)])
    assert values[0] == pytest.approx(values[1], rel=1e-5) and values[0] == pytest.approx(
        values[2], rel=1e-5)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(loss), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    torch.manual_seed(8)
    want = loss(x, target)
    torch.manual_seed(8)
    torch.testing.assert_close(loaded(x, target), want)


def loss_before_and_after_training(loss, steps=60):
    """Returns the exact loss of three queries per class before and after training with RowAdam."""
    input, target = torch.randn(3 * loss.num_classes,
                                loss.in_features), torch.arange(loss.num_classes).repeat(3)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.05)
    before = loss.exact(input, target).item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(input, target).backward()
        optimizer.step()
    return before, loss.eval()(input, target).item()
