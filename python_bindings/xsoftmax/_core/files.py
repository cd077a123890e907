"""Atomic replacement of files, and safe opening of regular files."""

import contextlib
import fcntl
import os
import re
import stat
from typing import BinaryIO, Iterator, Union


def open_regular(owner: str, path: Union[str, "os.PathLike[str]"]) -> BinaryIO:
    """Opens a regular file for reading, without ever blocking.

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: the path is a folder.
        ValueError: the path is a FIFO, a socket or a device: opening one may block or have side
            effects.
        OSError: the file cannot be opened.
    """
    try:
        _check_regular(owner, path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileNotFoundError(f"{owner}: there is no file {os.fspath(path)}") from None
    try:
        # Check again: the name may refer to another file by now.
        _check_regular(owner, path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(owner: str, path: Union[str, "os.PathLike[str]"],
                   status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{owner}: expected {os.fspath(path)} as a file, got a folder")
    if not stat.S_ISREG(status.st_mode):
        kind = ("a FIFO" if stat.S_ISFIFO(status.st_mode) else
                "a socket" if stat.S_ISSOCK(status.st_mode) else "a device")
        raise ValueError(f"{owner}: expected {os.fspath(path)} as a file, got {kind}")


@contextlib.contextmanager
def replace_file(owner: str, path: Union[str, "os.PathLike[str]"]) -> Iterator[str]:
    """Yields the name of a draft file next to ``path``, which replaces ``path`` on success and is
    removed on an exception.

    Drafts of the same file that killed processes left behind are removed too.

    Raises:
        IsADirectoryError, ValueError: the path is a folder, or a FIFO, socket or device.
        OSError: the file cannot be written.
    """
    if os.path.exists(path):
        _check_regular(owner, path, os.stat(path))
    path = os.path.realpath(path)
    draft, lock = _new_draft(path)
    try:
        yield draft
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    finally:
        os.close(lock)
    _remove_abandoned_drafts(path)


def _new_draft(path: str) -> tuple[str, int]:
    """Creates a draft file next to ``path``. Returns its name and a descriptor that holds a lock on
    it while this process lives."""
    number = 0
    while True:
        draft = f"{path}.{os.getpid()}.{number}.draft"
        number += 1
        try:
            lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        if not is_locked(lock) and is_named(draft, lock):
            return draft, lock
        os.close(lock)  # another process removed it as abandoned before it was locked


def is_locked(descriptor: int) -> bool:
    """Tries to lock an open file or folder for this process, until it is closed.

    Returns:
        True if another process holds the lock. False if this process has it now, or if the file
        system does not support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_named(path: str, descriptor: int) -> bool:
    """Returns whether the path still refers to the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def _remove_abandoned_drafts(path: str) -> None:
    """Removes drafts of a file that no process has locked."""
    folder, name = os.path.split(path)
    entries: list[str] = []
    with contextlib.suppress(OSError):  # the folder may be writable but not readable
        entries = os.listdir(folder)
    for entry in entries:
        draft = os.path.join(folder, entry)
        if not re.fullmatch(re.escape(name) + r"\.\d+\.\d+\.draft",
                            entry) or not os.path.isfile(draft):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # Raises if another process holds the lock, or if locks are not supported.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_named(draft, descriptor):
                    os.unlink(draft)
            finally:
                os.close(descriptor)
