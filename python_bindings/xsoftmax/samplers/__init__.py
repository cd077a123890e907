"""Samplers: modules that propose the classes to score for a query, with the expected count of each.
"""

from .._core.public import public_names
from .adaptive import AdaptiveSampler
from .complement import ComplementSampler
from .in_batch import InBatchSampler
from .midx import MidxSampler
from .candidate_set import CandidateSet, columns_of
from .sampler import OF_BATCH, Sampler, make_sampler, register
from .static import FixedSampler, LogUniformSampler, StaticSampler, UniformSampler, UnigramSampler
from .streaming import StreamingCounts
from .study.kernel import KernelSampler, RffSampler, SphereSampler
from .study.lsh import LshSampler
from .study.midx_relatives import ExactMidxSampler, LearnableMidxSampler, SpreadMidxSampler
from .union import UnionSampler

__all__ = [
    "OF_BATCH", "AdaptiveSampler", "CandidateSet", "ComplementSampler", "ExactMidxSampler",
    "FixedSampler", "InBatchSampler", "KernelSampler", "LearnableMidxSampler", "LogUniformSampler",
    "LshSampler", "MidxSampler", "RffSampler", "Sampler", "SphereSampler", "SpreadMidxSampler",
    "StaticSampler", "StreamingCounts", "UniformSampler", "UnigramSampler", "UnionSampler",
    "columns_of", "make_sampler", "register"
]
__dir__ = public_names(__all__)
