"""The base class of losses that score candidates instead of all classes."""

from typing import List, Optional

import torch
from torch import Tensor

from .._core.options import logit_options, option_text
from ..samplers import CandidateSet, columns_of
from .linear_loss import LinearLoss


class CandidateLoss(LinearLoss):
    """Base class of losses that score candidates in train() and are exact in eval()."""

    _option_names = ("estimator", "remove_accidental_hits", "label_smoothing", "reduction",
                     "ignore_index", "positives", "sparse_grad", "z_loss")

    def _option_text(self) -> str:
        return option_text(**{name: getattr(self, name)
                              for name in self._option_names},
                           **logit_options(self.logit_scale, self.softcap))

    def _prepare_sampling(self, input: Tensor, target: Tensor,
                          soft: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the queries and targets to pass to a sampler.

        Queries are [Q, D], multiplied by `logit_scale`, and zero where a target is ignored. Targets
        are [Q], or [Q, T] for multiple positives, and -1 where ignored.
        """
        self._queries(input, self._check_tensors(input, target))
        self._check_step()
        queries, sampler_target = torch.ops.xsoftmax.counted_queries(input, target,
                                                                     self.linear.weight,
                                                                     self.ignore_index, soft)
        return queries if self.logit_scale == 1.0 else queries * self.logit_scale, sampler_target

    def _refresh_due(self) -> bool:
        """Returns whether the next step refreshes a sampler from the table. Such a refresh runs
        separately, so that Ctrl-C can interrupt it and a progress bar can follow it."""
        if torch.jit.is_scripting():
            return False
        return not torch.compiler.is_compiling() and any(
            sampler.follows_table and sampler.refresh_due() for sampler in self._samplers())

    def _run_step(self, input: Tensor, target: Tensor, state: List[Tensor], sampler: str,
                  generator: Optional[torch.Generator], training: bool, prepares: bool,
                  optional_tensors: List[Optional[Tensor]]) -> Tensor:
        """Runs a step as one operator, from hidden states to the reduced loss."""
        self._check_queries(input, self._check_tensors(input, target))
        self._check_step()
        return torch.ops.xsoftmax.sampled_step(input, self.linear.weight, self.linear.bias, target,
                                               state, sampler, self._options, generator, training,
                                               prepares, optional_tensors)

    def _candidate_loss(self, input: Tensor, target: Tensor, sets: List[CandidateSet],
                        log_z: Optional[Tensor], target_prob: Optional[Tensor] = None) -> Tensor:
        ids, log_count, target_log_count, distinct = columns_of(sets)
        return torch.ops.xsoftmax.sampled_softmax_loss(input, self.linear.weight, self.linear.bias,
                                                       target, ids, log_count, target_log_count,
                                                       distinct, self.weight, log_z, self._options,
                                                       target_prob)
