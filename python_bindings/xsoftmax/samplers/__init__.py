"""Samplers: modules that propose which classes to score for a query, and say how often each would be proposed."""

from .adaptive import AdaptiveSampler
from .complement import ComplementSampler
from .in_batch import InBatchSampler
from .kernel import KernelSampler, RffSampler, SphereSampler
from .lsh import LshSampler
from .midx import MidxSampler
from .sampler import Proposal, Sampler
from .static import LogUniformSampler, StaticSampler, UniformSampler, UnigramSampler
from .union import UnionSampler

__all__ = ["AdaptiveSampler", "ComplementSampler", "InBatchSampler", "KernelSampler", "LogUniformSampler", "LshSampler", "MidxSampler", "Proposal",
           "RffSampler", "Sampler", "SphereSampler", "StaticSampler", "UniformSampler", "UnigramSampler", "UnionSampler", "make_sampler"]

ADAPTIVE = {"midx": MidxSampler, "lsh": LshSampler, "sphere": SphereSampler, "rff": RffSampler}
_OF_NUMBERS = {"uniform": UniformSampler, "log_uniform": LogUniformSampler, "in_batch": InBatchSampler}


def make_sampler(name: str, num_classes: int, **kwargs) -> Sampler:
    """A sampler by name: "uniform", "log_uniform", "unigram" (needs ``counts=``), "in_batch", or "midx", "lsh", "sphere", "rff" (these need
    ``dim=``).

    ``kwargs`` go to its constructor.
    """
    if name in _OF_NUMBERS:
        return _OF_NUMBERS[name](num_classes, **kwargs)
    if name in ADAPTIVE:
        if "dim" not in kwargs:
            raise ValueError(f"make_sampler: expected dim for \"{name}\", got none")
        return ADAPTIVE[name](num_classes, **kwargs)
    if name == "unigram":
        counts = kwargs.pop("counts", None)
        if counts is None:
            raise ValueError("make_sampler: expected counts for \"unigram\", got none")
        sampler = UnigramSampler(counts, **kwargs)
        if sampler.num_classes != num_classes:
            raise ValueError(f"make_sampler: expected counts of {num_classes} classes, got {sampler.num_classes}")
        return sampler
    names = ", ".join(f'"{known}"' for known in (*_OF_NUMBERS, "unigram", *ADAPTIVE))
    raise ValueError(f"make_sampler: expected one of {names}, got {name!r}")
