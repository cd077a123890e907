"""Interleaved timing: the candidates of a comparison take turns in one process, so that changes of
the machine's speed affect all of them equally."""

import ctypes
import gc
import platform
import statistics
import time
from pathlib import Path
from typing import Callable

import torch

import xsoftmax as xs


def machine() -> dict:
    """Returns the facts about the machine that a figure depends on: CPU, threads, versions."""
    cpuinfo, first = Path("/proc/cpuinfo"), {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    name, flags = first.get("model name", platform.processor()), set(first.get("flags", "").split())
    if "cpu family" in first:  # several generations share one name
        name += f" (family {first['cpu family']}, model {first.get('model')})"
    units = ("amx_bf16"
             if "amx_bf16" in flags else "avx512_bf16" if "avx512_bf16" in flags else "none")
    return {
        "cpu": name, "bfloat16_units": units,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "xsoftmax_capability": xs.cpu_capability(), "threads": torch.get_num_threads(),
        "torch": torch.__version__
    }


def turns(runs: dict[str, Callable[[], object]], repeats: int, warmup: int = 3,
          clock: Callable[[], float] = time.perf_counter) -> dict[str, list[float]]:
    """Returns the seconds of each run, measured with `clock`. Runs are called in turn, `repeats`
    times after `warmup` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()  # a collection would be charged to a random run
    try:
        for round_ in range(warmup + repeats):
            for name, run in runs.items():
                start = clock()
                run()
                elapsed = clock() - start
                if round_ >= warmup:
                    seconds[name].append(elapsed)
    finally:
        gc.enable()
    return seconds


def interleave(runs: dict[str, Callable[[], object]], repeats: int, warmup: int = 3,
               clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Returns the medians of `turns`."""
    return {
        name: statistics.median(values)
        for name, values in turns(runs, repeats, warmup, clock).items()
    }


def share(work: Callable[[], object], every: int) -> float:
    """Returns a step's share of the seconds of work that is done every `every` steps, which medians
    of steps exclude; 0: never."""
    return interleave({"": work}, repeats=3, warmup=1)[""] / every if every else 0.0


class PeakMemory:
    """Measures the peak resident memory of the process above that on entry, in bytes, from the
    kernel's high-water mark."""
    def __enter__(self) -> "PeakMemory":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory could be reused unnoticed
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._before = self._status("VmRSS")
        self.bytes = 0
        return self

    def __exit__(self, *_) -> None:
        self.bytes = self._status("VmHWM") - self._before

    @staticmethod
    def _status(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {key}")


def print_table(rows: list[dict], columns: list[str]) -> None:
    """Prints rows as a Markdown table."""
    widths = [
        max([len(column)] + [len(str(row.get(column, ""))) for row in rows]) for column in columns
    ]
    print("| " + " | ".join(column.ljust(width) for column, width in zip(columns, widths)) + " |")
    print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        print("| " + " | ".join(
            str(row.get(column, "")).ljust(width) for column, width in zip(columns, widths)) + " |")


def print_machine() -> None:
    print(", ".join(f"{key} {value}" for key, value in machine().items()) + "\n")


def figure_rows(figures: list[dict]) -> list[dict]:
    """Converts figures with `figure`, `value` and optionally `medians` to texts."""
    has_medians = any(f.get("medians") for f in figures)
    return [{"figure": f["figure"], "value": f"{f['value']:.3g}"} |
            ({"medians": f.get("medians", "")} if has_medians else {}) for f in figures]
