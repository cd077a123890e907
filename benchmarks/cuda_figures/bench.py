"""Measures times, fractions of bandwidth, memory, host time and launches, and reports each figure
as a row."""

import functools
import gc
import json
import statistics
import time
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

MARK = "cuda.py row: "  # prefix of the lines with which the process of a part reports its rows
FULL = dict(classes=1_000_000, many=100_000_000, width=256, queries=8192, shared=512, private=20,
            private_many=64, codewords=64, midx=64, index_width=128, tree_queries=256, repeats=15,
            flush=1 << 30, exact=((131_072, 256), (50_304, 768), (131_072, 2048)),
            recurrent=(10_000, 200, 20, 35), language=(512, 8, 8, 256, 64))  # fmt: skip
TINY = dict(classes=3000, many=5000, width=16, queries=32, shared=64, private=4, private_many=6,
            codewords=4, midx=6, index_width=8, tree_queries=16, repeats=2, flush=1 << 20,
            exact=((1000, 16), (400, 24), (1000, 32)), recurrent=(600, 16, 4, 5),
            language=(32, 1, 2, 16, 4))  # fmt: skip
# Bytes per second, from the data sheets; of several that a device's name contains, the first.
PEAK = {
    "GH200": 4.0e12, "H200": 4.8e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H100": 3.35e12,
    "B200": 8e12, "A100-PCIE-40GB": 1.555e12, "A100-SXM4-40GB": 1.555e12, "A100": 2.0e12,
    "L40": 0.864e12
}  # fmt: skip

Runs = Dict[str, Callable[[], object]]


class Bench:
    """The sizes and measurement methods of one part. Each row is printed immediately, so that it is
    kept if the part fails later."""
    def __init__(self, device: str, tiny: bool, seconds: float = 120, text: Optional[str] = None,
                 layer_seconds: Optional[float] = None):
        """
        Args:
            seconds: the time limit of the part.
            text: file or folder for the language model. Default: Python's standard library.
            layer_seconds: training time of the language model with each output layer. Default: an
                equal share of the part's time.
        """
        self.device, self.cuda, self.tiny = torch.device(device), device.startswith("cuda"), tiny
        self.end, self.text = time.monotonic() + seconds, text
        self.layer_seconds = layer_seconds
        self.host: Dict[str, float] = {}  # seconds until the call returned, by the run's name
        self.__dict__.update(TINY if tiny else FULL)

    # ---- rows

    def row(self, figure: str, value: Optional[float] = None, unit: str = "",
            aim: Optional[str] = None, detail: str = "", **more: object) -> None:
        """Reports a figure, or why it is missing. `more` is only written to the JSON."""
        row = {"figure": figure, "value": value, "unit": unit, "aim": aim, "detail": detail}
        print(MARK + json.dumps(row | more), flush=True)

    def ratio(self, figure: str, seconds: Dict[str, float], ours: str, rival: str,
              aim: Optional[str] = None) -> None:
        """Reports the time of `ours` divided by that of `rival`, with all times as its detail."""
        detail = ", ".join(f"{name} {1e3 * value:.4g} ms" for name, value in seconds.items())
        if ours in seconds and rival in seconds:
            self.row(figure, seconds[ours] / seconds[rival], "", aim, detail)
        else:
            failed = ", ".join(sorted({ours, rival} - set(seconds)))
            self.row(figure, None, "", aim, f"not measured: {failed} failed. {detail}")

    def ratios(self, figure: str, seconds: Dict[str, float], ours: str,
               aims: Optional[Dict[str, str]] = None) -> None:
        """Reports the time of `ours` divided by that of each other run. `aims` are by rival."""
        for name in seconds:
            if name != ours:
                pair = {key: seconds[key] for key in (ours, name) if key in seconds}
                self.ratio(f"{figure} / {name}", pair, ours, name, (aims or {}).get(name))

    def share(self, figure: str, seconds: float, bytes_: float, aim: Optional[str] = None) -> None:
        """Reports the bandwidth of a run relative to the data sheet and to a measured copy."""
        rate = bytes_ / seconds
        of_copy = 100 * rate / self.copy_rate()
        detail = f"{of_copy:.3g} % of a copy, {1e6 * seconds:.4g} us, {rate / 1e9:.4g} GB/s"
        self.row(figure, 100 * rate / self.peak(), "% of peak", aim, detail, of_copy=of_copy)

    @functools.lru_cache  # noqa: B019 (there is only one Bench)
    def peak(self) -> float:
        name = torch.cuda.get_device_name() if self.cuda else ""
        known = (rate for part, rate in PEAK.items() if part in name)
        return next(known, None) or self.copy_rate()

    @functools.lru_cache  # noqa: B019
    def copy_rate(self) -> float:
        """Returns the bytes per second of a large copy within the device, reads plus writes."""
        source = torch.empty(self.flush // 4, device=self.device)
        target = torch.empty_like(source)
        seconds = self.kernels({"copy": lambda: target.copy_(source)})["copy"]
        return 2 * source.nbytes / seconds

    # ---- times

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def steps(self, runs: Runs, repeats: Optional[int] = None) -> Dict[str, float]:
        """Returns median seconds, each run from an idle device to the end of its kernels."""
        return self._medians(runs, self.synchronize, repeats or self.repeats)

    def kernels(self, runs: Runs) -> Dict[str, float]:
        """Returns median seconds, measured after a large write, which empties the cache and lets
        the host run ahead."""
        flushed = torch.empty(self.flush, dtype=torch.uint8, device=self.device)

        def before() -> None:
            self.synchronize()
            flushed.zero_()

        return self._medians(runs, before, self.repeats)

    def _medians(self, runs: Runs, before: Callable[[], object], repeats: int) -> Dict[str, float]:
        """Times interleaved runs. A run that fails is skipped, with a row that gives the reason."""
        working = {name: run for name, run in runs.items() if self._warm_up(name, run)}
        times: Dict[str, List[Tuple[float, float]]] = {name: [] for name in working}
        gc.collect()
        for repeat in range(repeats + 1):
            for name, run in working.items():
                before()
                measured = self._timed(run)
                if repeat > 0:
                    times[name].append(measured)
        self.host |= {
            name: statistics.median(host for _, host in found)
            for name, found in times.items()
        }
        return {
            name: statistics.median(seconds for seconds, _ in found)
            for name, found in times.items()
        }

    def _warm_up(self, name: str, run: Callable[[], object]) -> bool:
        """Runs twice, and returns whether that succeeded."""
        try:
            run(), run()
            self.synchronize()
            return True
        except Exception as error:
            self.synchronize()  # raises if the device is lost, after which no figure is valid
            self.row(f"(run of {name})", detail=reason(error))
            return False

    def _timed(self, run: Callable[[], object]) -> Tuple[float, float]:
        """Returns the seconds on the device, and the seconds until the call returned."""
        if not self.cuda:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin,) * 2
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter()
        run()
        host = time.perf_counter() - begin
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host

    def launches(self, figure: str, runs: Runs, seconds: Dict[str, float],
                 aims: Optional[Dict[str, str]] = None) -> None:
        """Reports the launches of each run in `seconds`, with its host time and the total time of
        its kernels. On a CPU, operator calls are counted instead."""
        for name in seconds:
            try:
                count, busy = self._counted(runs[name])
            except Exception as error:
                self.synchronize()
                self.row(f"({figure}: launches, {name})", detail=reason(error))
                continue
            host, kernels = self.host[name], f", kernels {1e3 * busy:.4g} ms" if busy else ""
            detail = f"host {1e3 * host:.4g} ms{kernels}, step {1e3 * seconds[name]:.4g} ms"
            self.row(f"{figure}: launches, {name}", count, "" if self.cuda else "operator calls",
                     (aims or {}).get(name), detail, host_seconds=host, kernel_seconds=busy)

    def _counted(self, run: Callable[[], object]) -> Tuple[int, Optional[float]]:
        """Returns the number of kernels, copies and fills of a run, and their seconds. Without a
        device, returns the number of operator calls and None."""
        run()
        self.synchronize()
        activity = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiled:
            run()
            self.synchronize()
        events = profiled.events()
        if not self.cuda:
            return sum(event.name.startswith(("aten::", "xsoftmax::")) for event in events), None
        on_device = [
            event for event in events if event.device_type == torch.autograd.DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        return len(on_device), sum(event.time_range.elapsed_us() for event in on_device) / 1e6

    # ---- memory

    def peak_memory(self, run: Callable[[], object]) -> Optional[float]:
        """Returns the MB that a run allocates in addition to what was allocated before."""
        if not self.cuda:
            return None
        run()
        gc.collect()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def memory(self, figure: str, runs: Runs, names: Iterable[str],
               aims: Optional[Dict[str, str]] = None) -> None:
        """Reports the memory of the named runs, or why it is unknown."""
        for name in names:
            try:
                if (value := self.peak_memory(runs[name])) is not None:
                    self.row(f"{figure}, {name}", value, "MB", (aims or {}).get(name))
            except Exception as error:
                self.synchronize()  # raises if the device is lost
                self.row(f"({figure}, {name})", detail=reason(error))

    def release(self) -> None:
        """Frees cached memory, before a case that needs much of it."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    # ---- variants of a run

    def attempt(self, name: str, make: Callable[[], Callable[[], object]]) -> Runs:
        """Returns the run that `make` returns; or {}, with a row that gives the reason."""
        try:
            return {name: make()}
        except Exception as error:
            self.row(f"(run of {name})", detail=reason(error))
            return {}

    def compiled(self, function: Callable) -> Callable:
        """Returns the function under torch.compile; on a CPU it is only traced."""
        return torch.compile(function, dynamic=False, backend="inductor" if self.cuda else "eager")

    def graphed(self, step: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that replays a CUDA graph of the step."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        except Exception:  # the generator may not have noticed the end of the capture
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
            raise

        def replay(step=step) -> None:  # keeps the graph's tables, states and inputs alive
            graph.replay()

        return replay

    # ---- data

    def batch(self, queries: Optional[int] = None, classes: Optional[int] = None,
              dtype: torch.dtype = torch.float32, width: Optional[int] = None):
        shape = queries or self.queries, width or self.width
        input = torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True)
        return input, torch.randint(classes or self.classes, shape[:1], device=self.device)

    def table(self, classes: int, width: int) -> Tensor:
        return torch.empty(classes, width, device=self.device).uniform_(-0.05, 0.05)


def reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def training_step(call: Callable[[], Tensor], input: Optional[Tensor], parameters: Iterable[Tensor],
                  optimizer: Optional[torch.optim.Optimizer] = None) -> Callable[[], None]:
    """Returns a step: forward pass, backward pass and, if given, the optimizer."""
    leaves = [*([] if input is None else [input]), *parameters]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        call().backward()
        if optimizer is not None:
            optimizer.step()

    return step
