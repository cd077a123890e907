"""Samplers: modules that propose which classes to score for a query, and say how often each would be proposed."""

from .._public import public_names
from .adaptive import AdaptiveSampler
from .complement import ComplementSampler
from .in_batch import InBatchSampler
from .kernel import KernelSampler, RffSampler, SphereSampler
from .lsh import LshSampler
from .midx import MidxSampler
from .midx_study import ExactMidxSampler, LearnableMidxSampler, SpreadMidxSampler
from .sampler import OF_BATCH, CandidateSet, Sampler, columns_of, make_sampler, register
from .static import FixedSampler, LogUniformSampler, StaticSampler, UniformSampler, UnigramSampler
from .streaming import StreamingCounts
from .union import UnionSampler

__all__ = ["OF_BATCH", "AdaptiveSampler", "CandidateSet", "ComplementSampler", "ExactMidxSampler", "FixedSampler", "InBatchSampler", "KernelSampler",
           "LearnableMidxSampler", "LogUniformSampler", "LshSampler", "MidxSampler", "RffSampler", "Sampler", "SphereSampler", "SpreadMidxSampler",
           "StaticSampler", "StreamingCounts", "UniformSampler", "UnigramSampler", "UnionSampler", "columns_of", "make_sampler", "register"]
__dir__ = public_names(__all__)
