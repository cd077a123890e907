"""The names of a public module that ``dir`` lists."""

from typing import Callable, Iterable, List

_MODULE_ATTRIBUTES = ("__all__", "__doc__", "__file__", "__name__", "__package__", "__spec__")


def public_names(names: Iterable[str]) -> Callable[[], List[str]]:
    """Returns a module's ``__dir__`` that lists its ``__all__``, `names`, but not what it imports.
    """
    listing = sorted({*names, *_MODULE_ATTRIBUTES})
    return lambda: list(listing)
