"""benchmarks/cuda.py runs every part to its end: on a CPU, with small shapes."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "cuda.py"


def run(folder, *arguments, status=0):
    output = folder / "cuda.json"
    done = subprocess.run([sys.executable, str(PROGRAM), "--output", str(output), *arguments], capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == status, done.stderr
    return json.loads(output.read_text())["rows"], done.stdout


def test_every_part_finds_its_figures(tmp_path):
    rows, printed = run(tmp_path, "--device", "cpu", "--tiny", "--minutes", "30")
    assert {row["part"] for row in rows} >= {"device", "shared", "private", "gathers", "optimizers", "draws", "midx", "midx_step", "trees", "tests", "exact"}
    missing = [row for row in rows if row["value"] is None]
    assert not [row for row in missing if "not installed" not in row["detail"] and "No module named" not in row["detail"]
                and "FBGEMM" not in row["figure"]], missing
    assert all(row["value"] > 0 for row in rows if row["value"] is not None and row["part"] != "tests")
    assert [row["value"] for row in rows if row["figure"].startswith("tests of the device")] == [0, 0], rows
    assert all(row["figure"] in printed for row in rows)


def test_what_cannot_run_is_a_row(tmp_path):
    rows, _ = run(tmp_path, "--device", "nowhere", "--tiny", "--only", "shared,private", status=1)
    assert [row["figure"] for row in rows] == ["(part shared)", "(part private)"] and all("no device nowhere" in row["detail"] for row in rows)
    rows, _ = run(tmp_path, "--device", "cpu", "--tiny", "--only", "shared", "--minutes", "0", status=1)
    assert [row["detail"] for row in rows] == ["no time was left for it"]


@pytest.mark.parametrize("arguments, message", [(["--output", "/nowhere/at/all.json"], "--output: expected a file that can be written"),
                                                (["--minutes", "-1"], "--minutes: expected at least 0"), (["--only", "all"], "--only: expected names")])
def test_bad_arguments_are_refused_before_anything_runs(arguments, message):
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def program(monkeypatch):
    """The names of the program, which is not run."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = {"__name__": "__main__", "__file__": str(PROGRAM)}
    exec(compile(PROGRAM.read_text().replace('if __name__ == "__main__":\n    main()', ""), str(PROGRAM), "exec"), names)
    return names


def rows_of(program, monkeypatch, part):
    bench, rows = program["Bench"]("cpu", True), []
    monkeypatch.setattr(bench, "row", lambda figure, value=None, unit="", aim=None, detail="": rows.append((figure, value, detail)))
    part(bench)
    return rows


def fails(*arguments, **others):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("part", ["part_shared", "part_private"])
def test_a_rival_that_fails_takes_nothing_along(program, monkeypatch, part):
    for method in ("shared", "private"):
        monkeypatch.setattr(program["NaiveSampled"], method, fails)
    rows = rows_of(program, monkeypatch, program[part])
    assert ("(run of naive)", None, "RuntimeError: out of memory") in rows
    assert any("naive failed" in detail for _, _, detail in rows)
    assert part == "part_private" or [value for figure, value, _ in rows if figure == "the same step / Partial FC"][0] > 0


@pytest.mark.parametrize("part", ["part_shared", "part_exact"])
def test_memory_that_cannot_be_measured_takes_nothing_along(program, monkeypatch, part):
    monkeypatch.setattr(program["Bench"], "peak_memory", fails)
    rows = rows_of(program, monkeypatch, program[part])
    failed = [figure for figure, _, detail in rows if "memory" in figure and detail == "RuntimeError: out of memory"]
    assert len(failed) >= 2 and sum(value is not None for _, value, _ in rows) >= 2


def test_tests_that_take_too_long_tell_how_far_they_came(program, monkeypatch):
    program["TEST_SECONDS"] = 2
    (figure, value, detail), *_ = rows_of(program, monkeypatch, program["part_tests"])
    assert figure == "tests of the device, test_cuda_device.py" and value is None and "stopped after" in detail


def test_a_captured_step_is_kept(program, monkeypatch):
    """The graph reads what the step holds."""
    class Graph:
        replay = staticmethod(lambda: None)

    class Nothing:
        def __init__(self, *arguments):
            pass
        __enter__ = wait_stream = lambda self, *arguments: None
        __exit__ = lambda self, *arguments: False  # noqa: E731
    for name, stand_in in dict(Stream=Nothing, current_stream=Nothing, stream=Nothing, CUDAGraph=Graph, graph=Nothing).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    class Step:
        def __call__(self):
            pass
    step = Step()
    kept, step = weakref.ref(step), program["Bench"]("cpu", True).graphed(step)
    gc.collect()
    assert kept() is not None
