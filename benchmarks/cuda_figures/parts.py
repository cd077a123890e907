"""The parts by name. Each runs in its own process, so that a failure does not affect others."""

import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch

from . import device_tests, draws, exact, kernels, language_model, recurrent, sampled, trees
from .bench import MARK, Bench, reason


@dataclass
class Part:
    run: Callable[[Bench], None]
    most: float = 120  # seconds after which it is stopped
    least: float = 5  # seconds that must be left to start it


# The order in which they run. If time is short, the last ones are skipped.
PARTS: Dict[str, Part] = {
    "device": Part(device_tests.part_device),
    "tests": Part(device_tests.part_tests, most=device_tests.TEST_SECONDS + 20),
    "shared": Part(sampled.part_shared),
    "private": Part(sampled.part_private),
    "exact": Part(exact.part_exact),
    "language_model": Part(language_model.part_language_model, most=170, least=100),
    "recurrent": Part(recurrent.part_recurrent),
    "exact_wide": Part(exact.part_exact_wide),
    "gathers": Part(kernels.part_gathers),
    "optimizers": Part(kernels.part_optimizers),
    "draws": Part(draws.part_draws),
    "midx": Part(draws.part_midx),
    "midx_step": Part(draws.part_midx_step),
    "trees": Part(trees.part_trees),
}


def run_part(name: str, device: str, tiny: bool, seconds: float, text: Optional[str],
             layer_seconds: Optional[float]) -> None:
    """Runs a part in its own process, and ends the process."""
    bench = Bench(device, tiny, seconds, text, layer_seconds)
    torch._dynamo.config.recompile_limit = 64  # one function is used for all shapes and dtypes
    torch.manual_seed(0)
    try:
        PARTS[name].run(bench)
    except BaseException as error:
        traceback.print_exc()
        bench.row(f"(part {name})", detail=reason(error))
    sys.stdout.flush()
    os._exit(0)  # a lost device may hang during a normal exit


def process_of(name: str, program: str, options: List[str], left: float, tiny: bool = False,
               most: Optional[float] = None) -> List[dict]:
    """Runs a part in a process and returns its rows, including those before a failure or a stop.

    Args:
        options: options of the program for the part.
        left: the seconds left for this part and all later ones.
        most: seconds after which the part is stopped, instead of its own.
    """
    part = PARTS[name]
    least = 5 if tiny else part.least
    if left < least:
        return [
            missing(
                name, f"not enough time was left for it: {max(left, 0):.0f} s of at least "
                f"{least:.0f} s")
        ]
    seconds = min(left, part.most if most is None else most)
    command = [
        sys.executable, program, "--part", name, "--part-seconds", f"{seconds:.0f}", *options
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        output, errors = process.communicate(timeout=seconds)
        ended = [] if process.returncode == 0 else [
            missing(name, f"ended with {process.returncode}: {errors[-200:]}")
        ]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # includes the part's child processes
        output, errors = process.communicate()
        ended = [missing(name, f"stopped after {seconds:.0f} s")]
    told = [line for line in errors.splitlines() if "ActivityProfiler" not in line]
    sys.stderr.write("".join(f"{line}\n" for line in told)[-2000:])
    found = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    return [json.loads(line) for line in found] + ended


def missing(part: str, why: str) -> dict:
    return {"figure": f"(part {part})", "value": None, "unit": "", "aim": None, "detail": why}
