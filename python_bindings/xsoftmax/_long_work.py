"""Work of operators that takes long: Ctrl-C stops it, and it says how far it is (csrc/core/long_work.h)."""

import contextlib
import contextvars
import signal
import threading
from typing import Any, Callable, Iterator, Optional, Tuple

import torch

Show = Callable[[int, int], None]
_BETWEEN = 0.1  # seconds from one look at the numbers to the next
_bars: "contextvars.ContextVar[bool]" = contextvars.ContextVar("xsoftmax.progress", default=False)


@contextlib.contextmanager
def progress(enabled: bool = True) -> Iterator[None]:
    """While it is open, long work of this thread (trees from vectors, training and prediction of XRLinear, refreshes of samplers, search indices) shows a
    bar by tqdm, on a terminal.

        with xs.progress():
            tree = xs.LabelTree.from_vectors(vectors)
    """
    token = _bars.set(enabled)
    try:
        yield
    finally:
        _bars.reset(token)


def run(name: str, op: Callable[..., Any], *args: Any, show: Optional[Show] = None) -> Any:
    """``op(*args)``, which Ctrl-C stops with KeyboardInterrupt. What the operator would have changed is then as it was. After its last look for the signal the
    operator finishes its change, and KeyboardInterrupt follows. Where a program handles SIGINT by a function of its own, that is called when the operator has
    returned, as ever.

    Args:
        name: of the work, for a bar.
        show: called with (done, total) while it runs, by another thread; what it raises stops the work and is raised. None: a bar, inside of :func:`progress`.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    if show is None and _bars.get():
        with bar(name) as show:
            return _watched(op, args, show)
    return _watched(op, args, show)


@contextlib.contextmanager
def bar(name: str) -> Iterator[Show]:
    """A bar by tqdm, as a function of done and total."""
    from tqdm import tqdm

    with tqdm(desc=name, total=100, unit="%", disable=None, leave=False, bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}") as shown:
        def show(done: int, total: int) -> None:
            shown.n = 100 * done // total if total > 0 else 0
            shown.refresh()

        yield show


def _watched(op: Callable[..., Any], args: Tuple[Any, ...], show: Optional[Show]) -> Any:
    numbers = torch.zeros(3, dtype=torch.int64, device="cpu")
    if type(numbers) is not torch.Tensor:  # under FakeTensorMode and the like nothing takes long
        return op(*args)
    watch = None if show is None else _Watch(numbers, show)
    # Other threads never see KeyboardInterrupt; the main one raises it where Python's own handler would.
    sigint = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    error: Optional[BaseException] = None
    try:
        torch.ops.xsoftmax.watch_long_work(numbers, sigint)
        result = op(*args)
    except BaseException as raised:
        error = raised
    finally:
        interrupted = torch.ops.xsoftmax.end_long_work()
        failure = None if watch is None else watch.end()
    if failure is not None:
        raise failure from None
    if interrupted:
        raise KeyboardInterrupt
    if error is not None:
        raise error
    if show is not None:
        total = max(1, int(numbers[1]))
        show(total, total)
    return result


class _Watch:
    """A thread that looks at the numbers and shows them."""

    def __init__(self, numbers: torch.Tensor, show: Show) -> None:
        self.numbers, self.show = numbers, show
        self.failure: Optional[BaseException] = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._look, name="xsoftmax progress", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.done.wait(_BETWEEN):
            try:
                done, total, _ = self.numbers.tolist()
                if total > 0:
                    self.show(done, total)
            except BaseException as error:  # KeyboardInterrupt too: what a function of the caller raises
                self.failure = error
                self.numbers[2] += 1
                return

    def end(self) -> Optional[BaseException]:
        self.done.set()
        self.thread.join()
        return self.failure
