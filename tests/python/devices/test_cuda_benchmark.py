"""benchmarks/cuda.py runs all its parts, here on a CPU with small shapes."""

import gc
import importlib
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import xsoftmax as xs

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "cuda.py"
PARTS = [
    "device", "tests", "shared", "private", "exact", "language_model", "recurrent", "exact_wide",
    "gathers", "optimizers", "draws", "midx", "midx_step", "trees"
]  # fmt: skip
NOT_INSTALLED = ("No module named", "FBGEMM")
NAMED = {
    "shared": ["naive, torch.compile", "launches, xsoftmax", "Partial FC"],
    "private": ["naive, torch.compile", "launches, xsoftmax"],
    "exact": ["F.cross_entropy, torch.compile", "launches, xsoftmax"],
    "recurrent": ["sampled / exact", "launches, exact"],
    "language_model": ["head 79 + 32 private MIDX: validation loss", "last loss of plain PyTorch"],
}


def run(folder, *arguments, status=0):
    output = folder / "cuda.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--output",
         str(output), *arguments], capture_output=True, text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"))  # fmt: skip
    assert done.returncode == status, done.stderr
    return json.loads(output.read_text())["rows"], done.stdout


@pytest.mark.slow
def test_the_program_runs_parts_and_writes_a_record(tmp_path):
    record, without = tmp_path / "record.json", ",".join(set(PARTS) - {"device", "tests"})
    rows, printed = run(tmp_path, "--device", "cpu", "--tiny", "--minutes", "30", "--without",
                        without, "--json", str(record))  # fmt: skip
    assert [row["part"] for row in rows] == ["device", "tests", "tests"]
    tests = [row["value"] for row in rows if row["figure"].startswith("tests of the device")]
    assert tests == [0, 0], rows
    assert all(row["figure"] in printed for row in rows)
    found = json.loads(record.read_text())
    assert found["rows"] == rows and [table["title"] for table in found["tables"]
                                      ] == ["device", "tests"]  # fmt: skip
    assert found["tables"][0]["rows"][0][0] == "a large copy"
    assert found["machine"]["gpu"] == "cpu" and "benchmarks/cuda.py" in found["command"]


@pytest.mark.slow
def test_a_part_that_cannot_run_is_a_row(tmp_path):
    """And a record of earlier figures stays if nothing was measured."""
    record = tmp_path / "record.json"
    record.write_text("earlier figures")
    rows, _ = run(tmp_path, "--device", "nowhere", "--tiny", "--only", "shared,private", "--json",
                  str(record), status=1)  # fmt: skip
    assert [row["figure"] for row in rows] == ["(part shared)", "(part private)"]
    assert all("no device nowhere" in row["detail"] for row in rows)
    assert record.read_text() == "earlier figures"
    rows, _ = run(tmp_path, "--device", "cpu", "--tiny", "--only", "shared", "--minutes", "0",
                  status=1)  # fmt: skip
    assert "not enough time was left" in rows[0]["detail"]


@pytest.mark.parametrize("arguments, message", [
    (["--output", "/nowhere/at/all.json"], "--output: expected a file that can be written"),
    (["--json", "/nowhere/at/all.json"], "--json: expected a file that can be written"),
    (["--minutes", "-1"], "--minutes: expected at least 0"),
    (["--layer-seconds", "0"], "--layer-seconds: expected a number above 0"),
    (["--only", "all"], "--only: expected names"),
    (["--without", "all"], "--without: expected names"),
])  # fmt: skip
def test_bad_arguments_are_refused_before_anything_runs(arguments, message):
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def figures(monkeypatch):
    """The modules of the parts, on one thread, since a busy machine slows several down.

    benchmarks/ is last in sys.path; otherwise torch would import cuda.py as NVIDIA's package.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "path", [*sys.path, str(PROGRAM.parent)])
    names = ("bench", "device_tests", "language_model", "parts", "sampled")
    yield SimpleNamespace(
        **{name: importlib.import_module(f"cuda_figures.{name}")
           for name in names})
    torch.set_num_threads(threads)


def rows_of(figures, monkeypatch, part, bench=None):
    """Returns (figure, value, detail) of each row of a part."""
    bench, rows = bench or figures.bench.Bench("cpu", True), []

    def row(figure, value=None, unit="", aim=None, detail="", **more):
        rows.append((figure, value, detail))
        json.dumps(more)

    monkeypatch.setattr(bench, "row", row)
    figures.parts.PARTS[part].run(bench)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if part != "tests"])
def test_every_part_measures_its_figures(figures, monkeypatch, part):
    assert list(figures.parts.PARTS) == PARTS
    rows = rows_of(figures, monkeypatch, part)
    missing = [row for row in rows if row[1] is None]
    assert not [
        row for row in missing if "not reached" not in row[2]
        # fmt: skip
        and not any(word in row[0] + row[2] for word in NOT_INSTALLED)
    ], missing
    measured = [value for _, value, _ in rows if value is not None]
    assert measured and all(value > 0 for value in measured)
    for name in NAMED.get(part, []):
        assert any(name in figure for figure, _, _ in rows), name


@pytest.mark.slow
@pytest.mark.parametrize("part, names", [
    ("shared", [
        "as a CUDA graph", "CUDA graph / naive, eager", "/ naive, CUDA graph and "
        "SparseAdam", "/ naive, torch.compile, CUDA graph and SparseAdam"
    ]),
    ("exact", [
        "as CUDA graphs / F.linear + F.cross_entropy, CUDA graph",
        "as CUDA graphs / F.linear + F.cross_entropy, torch.compile, CUDA graph"
    ]),
    ("draws", ["512 uniform samples without replacement, as a CUDA graph"]),
    ("midx", ["sampling, as a CUDA graph"]),
])  # fmt: skip
def test_cuda_graphs_of_all_contestants_are_measured(figures, monkeypatch, part, names):
    """The GPU path, with fake timers and graphs that run eagerly."""
    bench, cpu = (figures.bench.Bench("cpu", True) for _ in range(2))
    stand_ins = dict(_timed=cpu._timed, compiled=cpu.compiled, synchronize=lambda: None,
                     graphed=lambda step: step, release=lambda: None, peak=lambda: 1e9,
                     _counted=lambda run: (3, 1e-3), peak_memory=lambda run: 2.0)  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(bench, name, stand_in)
    bench.cuda = True
    rows = rows_of(figures, monkeypatch, part, bench)
    for name in names:
        assert any(figure.endswith(name) for figure, value, _ in rows if value), name
    assert part in ("draws", "midx") or any("launches, xsoftmax" in figure and value == 3
                                            and "kernels 1 ms" in detail
                                            for figure, value, detail in rows)  # fmt: skip


def test_bandwidth_is_compared_with_the_data_sheet_and_a_copy(figures, monkeypatch):
    bench, rows = figures.bench.Bench("cpu", True), []
    monkeypatch.setattr(bench, "row", lambda *row, **more: rows.append((row, more)))
    monkeypatch.setattr(bench, "peak", lambda: 4e9)
    monkeypatch.setattr(bench, "copy_rate", lambda: 2e9)
    bench.share("kernel", 1e-3, 1e6)
    ((figure, value, unit, _, detail), more), = rows
    assert (figure, value, unit, more["of_copy"]) == ("kernel", 25, "% of peak", 50)
    assert "50 % of a copy" in detail


def test_the_compiled_rival_equals_the_eager_one(figures):
    bench = figures.bench.Bench("cpu", True)
    naive = figures.sampled.NaiveSampled(torch.randn(50, 4))
    compiled = figures.sampled.compiled_naive(bench, naive)
    input, target, log_count = torch.randn(6, 4), torch.randint(50, (6,)), torch.tensor(-1.0)
    for method, shape in (("shared", (8,)), ("private", (6, 3))):
        arguments = input, target, torch.randint(50, shape), log_count
        values = [getattr(module, method)(*arguments) for module in (naive, compiled)]
        torch.testing.assert_close(*values, rtol=0, atol=0)
    assert compiled.embedding.weight is naive.embedding.weight


def fails(*arguments, **others):
    raise RuntimeError("out of memory")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["shared", "private"])
def test_a_failing_rival_does_not_stop_the_part(figures, monkeypatch, part):
    for method in ("shared", "private"):
        monkeypatch.setattr(figures.sampled.NaiveSampled, method, fails)
    rows = rows_of(figures, monkeypatch, part)
    assert ("(run of naive)", None, "RuntimeError: out of memory") in rows
    assert any("naive failed" in detail for _, _, detail in rows)
    assert part == "private" or any(value for figure, value, _ in rows if "Partial FC" in figure)


@pytest.mark.slow
def test_a_failing_output_layer_does_not_stop_the_part(figures, monkeypatch):
    monkeypatch.setattr(xs.LinearCrossEntropyLoss, "forward", fails)
    rows = rows_of(figures, monkeypatch, "language_model")
    failed = [figure for figure, _, detail in rows if detail == "RuntimeError: out of memory"]
    assert failed == ["(GPT, xs.LinearCrossEntropyLoss)"]
    assert sum("validation loss" in figure for figure, _, _ in rows) == 3


@pytest.mark.slow
@pytest.mark.parametrize("part", ["shared", "exact"])
def test_a_failing_memory_measurement_does_not_stop_the_part(figures, monkeypatch, part):
    monkeypatch.setattr(figures.bench.Bench, "peak_memory", fails)
    rows = rows_of(figures, monkeypatch, part)
    failed = [
        figure for figure, _, detail in rows
        if "memory" in figure and detail == "RuntimeError: out of memory"
    ]  # fmt: skip
    assert len(failed) >= 2 and sum(value is not None for _, value, _ in rows) >= 2


def test_tests_that_take_too_long_report_their_progress(figures, monkeypatch):
    monkeypatch.setattr(figures.device_tests, "TEST_SECONDS", 1)
    (figure, value, detail), *_ = rows_of(figures, monkeypatch, "tests")
    assert figure == "tests of the device, test_cuda_device.py"
    assert value is None and "stopped after" in detail


def test_a_captured_step_stays_alive(figures, monkeypatch):
    """The graph reads tensors of the step."""
    class Graph:
        replay = staticmethod(lambda: None)

    class Nothing:
        def __init__(self, *arguments):
            pass

        __enter__ = wait_stream = lambda self, *arguments: None
        __exit__ = lambda self, *arguments: False

    stand_ins = dict(Stream=Nothing, current_stream=Nothing, stream=Nothing, CUDAGraph=Graph,
                     graph=Nothing)  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    class Step:
        def __call__(self):
            pass

    step = Step()
    kept, step = weakref.ref(step), figures.bench.Bench("cpu", True).graphed(step)
    gc.collect()
    assert kept() is not None
