"""Runs the device tests, and measures the device's bandwidth."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import List

from .bench import Bench

ROOT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 220  # time limit of all tests; the remaining time is for measurements
# Test files, and the tests of each that --tiny runs.
FILES = {
    "devices/test_cuda_device.py": "composites and scores", "samplers/test_device_draws.py": "lsh"
}


def part_device(bench: Bench) -> None:
    bench.row("a large copy",
              bench.copy_rate() / 1e9, "GB/s",
              detail=f"peak taken as {bench.peak() / 1e9:.0f} GB/s")


def part_tests(bench: Bench) -> None:
    """Tests kernels against composites and the CPU, steps without synchronisation, CUDA graphs,
    reproducibility, and samples against those of the CPU."""
    begin = time.perf_counter()
    for file in FILES:
        run_tests(bench, file, TEST_SECONDS - (time.perf_counter() - begin))


def arguments_of(bench: Bench, file: str) -> List[str]:
    # -rfE lists failed tests at the end; -v lists each test, in case the run is stopped.
    arguments = ["-v", "--no-header", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
    if bench.tiny:
        return [*arguments, "-x", "-k", FILES[file]]
    arguments += ["--maxfail=50"]
    if importlib.util.find_spec("xdist"):
        arguments += ["-n", str(min(8, os.cpu_count() or 1))]
    return arguments


def run_tests(bench: Bench, file: str, seconds: float) -> None:
    """Reports the result of the tests, or their progress at the time limit, and failed tests."""
    environment = dict(os.environ, XSOFTMAX_TEST_DEVICE=str(bench.device), PYTHONUNBUFFERED="1")
    command = [sys.executable, "-m", "pytest", *arguments_of(bench, file), file]
    begin, status = time.perf_counter(), None
    try:
        done = subprocess.run(command, cwd=ROOT / "tests" / "python", env=environment,
                              capture_output=True, text=True, timeout=max(seconds, 1))
        status, output, errors = float(done.returncode), done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:  # its output is bytes, not text
        output, errors = ((part or b"").decode(errors="replace")
                          for part in (stopped.stdout, stopped.stderr))
    lines = output.strip().splitlines()
    took = f"{time.perf_counter() - begin:.0f} s"
    figure = f"tests of the device, {Path(file).name}"
    if status is None:
        passed = sum(" PASSED" in line for line in lines)
        bench.row(
            figure, None, "", "0", f"stopped after {took}, {passed} had passed, the last "
            f"was: {lines[-1] if lines else 'none'}"[:300])
    else:
        end = lines[-1] if lines else errors[-300:]
        ran = any(word in end for word in (" passed", " failed", " error"))
        bench.row(figure, status if ran else None, "exit status", "0",
                  f"{end}; {took}" if ran else f"no test ran: {end}")
    listed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    for line in listed or [line for line in lines if " FAILED" in line or " ERROR" in line]:
        bench.row("(test)", detail=line[:300])
