"""benchmarks/cuda.py runs every part to its end: on a CPU, with small shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "cuda.py"


def run(folder, *arguments):
    output = folder / "cuda.json"
    done = subprocess.run([sys.executable, str(PROGRAM), "--output", str(output), *arguments], capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())["rows"], done.stdout


def test_every_part_finds_its_figures(tmp_path):
    rows, printed = run(tmp_path, "--device", "cpu", "--tiny", "--minutes", "30")
    assert {row["part"] for row in rows} >= {"device", "shared", "private", "gathers", "optimizers", "draws", "midx", "midx_step", "trees", "tests", "exact"}
    missing = [row for row in rows if row["value"] is None]
    assert not [row for row in missing if "not installed" not in row["detail"] and "No module named" not in row["detail"]
                and "FBGEMM" not in row["figure"]], missing
    assert all(row["value"] > 0 for row in rows if row["value"] is not None and row["part"] != "tests")
    assert [row["value"] for row in rows if row["figure"] == "tests of the device"] == [0], rows
    assert all(row["figure"] in printed for row in rows)


def test_what_cannot_run_is_a_row(tmp_path):
    rows, _ = run(tmp_path, "--device", "nowhere", "--tiny", "--only", "shared,private")
    assert [row["figure"] for row in rows] == ["(part shared)", "(part private)"] and all("nowhere" in row["detail"] for row in rows)
    rows, _ = run(tmp_path, "--device", "cpu", "--tiny", "--only", "shared", "--minutes", "0")
    assert [row["detail"] for row in rows] == ["no time was left for it"]
