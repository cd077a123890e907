"""The formulas of benchmarks/scale_out.py for bytes, seconds and memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xsoftmax as xs

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import scale_out  # noqa: E402


def test_bytes_match_hand_computed_values():
    assert scale_out.queries_bytes(2, 10, 4) == 2 * 10 * 4 * 4 + 24 * 10
    assert scale_out.queries_bytes(8, 256, 128, number=2) == 2 * 7 * 256 * 128 * 2 + 24 * 7 * 256
    assert scale_out.rows_bytes(2, 100, 4) == 100 * 4 * 4
    assert scale_out.rows_bytes(4, 100, 8) == 2 * 3 / 4 * 100 * 8 * 4
    assert scale_out.rows_of_step(256, shared=512) == 768 and scale_out.rows_of_step(
        256, private=20) == 256 * 21


@pytest.mark.parametrize("kind, draws, last", [("shared", 256 * 63, 63), ("private", 40, 40)])
def test_the_rule_chooses_the_exchange_with_fewer_bytes(kind, draws, last):
    """The rule takes queries if W b < S + u (shared) or W < P + 1 (private).

    `last` is the largest W that takes queries. D is so large that 24 bytes per query are little.
    """
    rows = scale_out.rows_of_step(256, **{kind: draws})
    for ranks, queries_win in [(2, True), (last, True), (last + 2, False), (1024, False)]:
        assert (scale_out.queries_bytes(ranks, 256, 4096)
                < scale_out.rows_bytes(ranks, rows, 4096)) == queries_win


def test_seconds_match_hand_computed_values():
    assert scale_out.network_seconds("rows", 8, 1e9, 10, 0.0) == pytest.approx(0.8)
    assert scale_out.network_seconds("queries", 8, 0.0, 10,
                                     1e-3) == pytest.approx(7e-3 * scale_out.COLLECTIVES["queries"])
    assert scale_out.step_seconds(2.0, 3.0) == (3.0, 5.0)


@pytest.mark.parametrize("width, classes", [(8, 100), (64, 1001)])
def test_memory_is_the_size_of_table_and_state_on_a_rank(width, classes):
    loss = xs.SampledSoftmaxLoss(width, classes, sampler="log_uniform", num_samples=5)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(torch.randn(3, width), torch.tensor([1, 2, 3])).backward()
    optimizer.step()
    state = optimizer.state[loss.linear.weight]
    kept = loss.linear.weight.nbytes + sum(state[name].nbytes
                                           for name in ("exp_avg", "exp_avg_sq", "last_step"))
    assert scale_out.memory_bytes(2 * classes - 1, 2, width) == kept  # the larger of two ranks


@pytest.mark.slow
def test_the_program_reports_winners_times_and_memory():
    # Links so slow that bytes, not measured times, decide which exchange wins.
    command = [
        sys.executable,
        str(BENCHMARKS / "scale_out.py"), "--ranks", "2", "64", "--links", "0.01", "--classes",
        "1000", "--queries", "8", "--width", "16", "--shared", "32", "--private", "4",
        "--local-classes", "1000", "--repeats", "3", "--latency", "0", "--json"
    ]
    found = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert [(step["draws"], step["ranks"], step["wins"])
            for step in found["steps"]] == [("shared", 2, "queries"), ("shared", 64, "rows"),
                                            ("private", 2, "queries"), ("private", 64, "rows")]
    for step in found["steps"]:
        for exchange, (least, most) in step["step_seconds"].items():
            assert 0 < step["compute_seconds"][exchange] <= least < most
    assert [table["bytes"] for table in found["memory"]
            ] == [scale_out.memory_bytes(1000, ranks, 16) for ranks in (2, 64)]
    bad = subprocess.run([*command, "--ranks", "0"], capture_output=True, text=True)
    assert bad.returncode == 2 and "--ranks: expected more than 0, got 0" in bad.stderr
