"""Starts programs, and ends with them after Ctrl-C."""

import signal
import subprocess
from typing import Callable

INTERRUPTED = 130  # 128 + SIGINT, the exit code of a program that Ctrl-C has ended


def interruptible(main: Callable[[], None]) -> None:
    """Runs a program. Ctrl-C ends it without a traceback, since all finished runs are kept."""
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def run_program(command: list[str], **options) -> int:
    """Returns the exit code of a program, for which subprocess.Popen has options. After Ctrl-C,
    which the program receives as well, waits for it to save its checkpoint."""
    process, interrupted = subprocess.Popen(command, **options), False
    while process.poll() is None:
        try:
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
    # A program that Ctrl-C ends before it handles the signal has the negative code.
    if interrupted or process.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    return process.returncode
