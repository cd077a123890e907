"""Samplers: modules that propose which classes to score for a query, and say how often each would be proposed."""

from .in_batch import InBatchSampler
from .midx import MidxSampler
from .sampler import Proposal, Sampler
from .static import LogUniformSampler, StaticSampler, UniformSampler, UnigramSampler
from .union import UnionSampler

__all__ = ["InBatchSampler", "LogUniformSampler", "MidxSampler", "Proposal", "Sampler", "StaticSampler", "UniformSampler", "UnigramSampler",
           "UnionSampler", "make_sampler"]


def make_sampler(name: str, num_classes: int, **kwargs) -> Sampler:
    """A sampler by name: "uniform", "log_uniform", "unigram" (needs ``counts=``), "in_batch" or "midx" (needs ``dim=``).

    ``kwargs`` go to its constructor.
    """
    if name == "uniform":
        return UniformSampler(num_classes, **kwargs)
    if name == "log_uniform":
        return LogUniformSampler(num_classes, **kwargs)
    if name == "in_batch":
        return InBatchSampler(num_classes, **kwargs)
    if name == "midx":
        if "dim" not in kwargs:
            raise ValueError("make_sampler: expected dim for \"midx\", got none")
        return MidxSampler(num_classes, **kwargs)
    if name == "unigram":
        counts = kwargs.pop("counts", None)
        if counts is None:
            raise ValueError("make_sampler: expected counts for \"unigram\", got none")
        sampler = UnigramSampler(counts, **kwargs)
        if sampler.num_classes != num_classes:
            raise ValueError(f"make_sampler: expected counts of {num_classes} classes, got {sampler.num_classes}")
        return sampler
    raise ValueError(f"make_sampler: expected \"uniform\", \"log_uniform\", \"unigram\", \"in_batch\" or \"midx\", got {name!r}")
