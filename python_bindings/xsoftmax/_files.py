"""Files that are whole, or as they were; and those that are read."""

import contextlib
import os
import stat
from typing import BinaryIO, Iterator, Union


@contextlib.contextmanager
def replaced(path: Union[str, "os.PathLike[str]"]) -> Iterator[str]:
    """The name of a file beside ``path`` to write to, which takes its place where nothing is raised, and else is removed."""
    path = os.path.realpath(path)
    draft = f"{path}.{os.getpid()}.draft"
    try:
        yield draft
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def open_regular(owner: str, path: Union[str, "os.PathLike[str]"]) -> BinaryIO:
    """Opens a file to read, and never waits for one who writes to a pipe.

    Raises:
        FileNotFoundError: there is no such file. IsADirectoryError: it is a folder.
        ValueError: it is a pipe, a device or a socket. OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileNotFoundError(f"{owner}: there is no file {os.fspath(path)}") from None
    except OSError as error:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            raise ValueError(f"{owner}: expected {os.fspath(path)} as a regular file, got a socket") from error
        raise
    file = os.fdopen(descriptor, "rb") if not stat.S_ISDIR(mode := os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise IsADirectoryError(f"{owner}: expected a file, got the folder {os.fspath(path)}")
    if not stat.S_ISREG(mode):
        file.close()
        raise ValueError(f"{owner}: expected {os.fspath(path)} as a regular file, got a pipe or a device")
    return file
