"""Files that are whole, or as they were."""

import contextlib
import os
from typing import Iterator, Union


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
