"""Output layers for very many classes. See README.md."""

from . import _library
