"""The names that ``dir`` shows of a public module."""

from typing import Callable, Iterable, List

_OF_EVERY_MODULE = ("__all__", "__doc__", "__file__", "__name__", "__package__", "__spec__")


def public_names(names: Iterable[str]) -> Callable[[], List[str]]:
    """Returns the ``__dir__`` of a module whose ``__all__`` is ``names``: without what it imports."""
    shown = sorted({*names, *_OF_EVERY_MODULE})
    return lambda: list(shown)
