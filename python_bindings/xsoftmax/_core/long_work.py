"""Long-running operators: interruption by Ctrl-C and progress bars (csrc/op/long_work.h)."""

import contextlib
import contextvars
import signal
import threading
from typing import Any, Callable, Iterator, Optional, Tuple

import torch

Show = Callable[[int, int], None]
_POLL_SECONDS = 0.1  # seconds between two reads of the progress numbers
_bars: "contextvars.ContextVar[bool]" = contextvars.ContextVar("xsoftmax.progress", default=False)


@contextlib.contextmanager
def progress(enabled: bool = True) -> Iterator[None]:
    """Context manager that shows a tqdm progress bar for long-running work of this thread.

    Bars appear on a terminal, for trees built from vectors, training and prediction of XRLinear,
    refreshes of samplers, and search indices.

    Args:
        enabled: whether to show bars.

    Example::

        with xs.progress():
            tree = xs.LabelTree.from_vectors(vectors)
    """
    token = _bars.set(enabled)
    try:
        yield
    finally:
        _bars.reset(token)


def run(name: str, op: Callable[..., Any], *args: Any, show: Optional[Show] = None) -> Any:
    """Returns ``op(*args)``, which Ctrl-C interrupts with KeyboardInterrupt.

    An interrupted operator leaves everything unchanged. If the signal comes after its last check,
    the operator completes its change and KeyboardInterrupt follows. If the program has its own
    SIGINT handler, that is called once the operator has returned, as usual.

    Args:
        name: the label of the progress bar.
        op: the operator.
        args: its arguments.
        show: called by another thread with (done, total) while the operator runs; an exception from
            it stops the work and is re-raised. None: a bar, inside :func:`progress`.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    if show is None and _bars.get():
        with bar(name) as show:
            return _run_watched(op, args, show)
    return _run_watched(op, args, show)


@contextlib.contextmanager
def bar(name: str) -> Iterator[Show]:
    """Yields a function of (done, total) that updates a tqdm progress bar."""
    from tqdm import tqdm

    with tqdm(desc=name, total=100, unit="%", disable=None, leave=False,
              bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}") as tqdm_bar:

        def show(done: int, total: int) -> None:
            tqdm_bar.n = 100 * done // total if total > 0 else 0
            tqdm_bar.refresh()

        yield show


def _run_watched(op: Callable[..., Any], args: Tuple[Any, ...], show: Optional[Show]) -> Any:
    numbers = torch.zeros(3, dtype=torch.int64, device="cpu")
    if type(numbers) is not torch.Tensor:  # under FakeTensorMode and similar nothing takes long
        return op(*args)
    watch = None if show is None else _Watch(numbers, show)
    # Python raises KeyboardInterrupt in the main thread only, and only with its default handler.
    sigint = threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGINT) is signal.default_int_handler
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
    """Thread that polls the progress numbers and shows them."""
    def __init__(self, numbers: torch.Tensor, show: Show) -> None:
        self.numbers, self.show = numbers, show
        self.failure: Optional[BaseException] = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._poll, name="xsoftmax progress", daemon=True)
        self.thread.start()

    def _poll(self) -> None:
        while not self.done.wait(_POLL_SECONDS):
            try:
                done, total, _ = self.numbers.tolist()
                if total > 0:
                    self.show(done, total)
            # BaseException, because the caller's function may raise KeyboardInterrupt too.
            except BaseException as error:
                self.failure = error
                self.numbers[2] += 1
                return

    def end(self) -> Optional[BaseException]:
        self.done.set()
        self.thread.join()
        return self.failure
