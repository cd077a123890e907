"""Custom estimators, written in Python."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ._core.options import option_text
from .samplers import CandidateSet, columns_of


class CandidateBatch(NamedTuple):
    """The arguments of an estimator, for Q queries and C candidates.

    With ``remove_accidental_hits=True``, candidates that equal the target have a log weight of
    -inf, so they add nothing.
    """

    target: Tensor
    """``[Q]``: scores of the targets, minus their log expected count if the estimator has the trait
    ``corrects_target``."""
    score: Tensor
    """``[Q, C]``: scores of the candidates."""
    log_weight: Tensor
    """``[Q, C]``: ``(score + log_weight).exp().sum(1)`` estimates the sum of ``e^s`` over all
    classes except the target."""
    adjusted: Tensor
    """``[Q, C]``: ``score + log_weight``; -inf for candidates that are left out."""
    drawn: Tensor
    """bool ``[C]``: whether the candidate was sampled with replacement."""
    draws: Tensor
    """``[Q]``: the number of candidates sampled with replacement that are not left out."""
    covered: Tensor
    """bool ``[Q]``: whether the target is in a set without replacement."""
    target_log_count: Tensor
    """``[Q]``: the target's log expected count over all sets; empty unless the estimator has the
    trait ``needs_target_count``."""


_TRAITS = ("corrects_target", "needs_target_count", "renormalizes", "weighs", "drops_distinct_hits",
           "drops_drawn_hits", "replaces_a_sample", "has_noise")
_PYTHON_ESTIMATORS: Dict[str, Tuple[Callable[[CandidateBatch], Tensor], Dict[str, bool]]] = {}


def register_estimator(name: str, loss: Callable[[CandidateBatch], Tensor], **traits: bool) -> None:
    """Registers a Python function as an estimator, so that ``estimator=name`` of
    :class:`xsoftmax.SampledSoftmaxLoss` selects it.

    Args:
        name: the name of the estimator.
        loss: a function that returns the losses ``[Q]`` of a :class:`CandidateBatch`, in
            differentiable PyTorch operations. It runs in Python and does not script. C++ programs
            register an estimator with ``xsoftmax::register_estimator``, which also works in
            TorchScript.
        traits: properties of the estimator, all False by default:

            - weighs: candidates weigh 1 / expected count instead of 1.
            - drops_distinct_hits, drops_drawn_hits: candidates that equal the target are removed
              from sets without replacement, or from samples with replacement.
            - renormalizes: q is renormalised to the classes other than the target, where hits are
              removed from samples with replacement.
            - needs_target_count: ``target_log_count`` is computed.
            - corrects_target: the target's score is lowered by its log expected count. Implies
              needs_target_count.
            - replaces_a_sample: a target that is in no set without replacement takes the place of
              the first sample with replacement.
            - has_noise: requires both a set without replacement and samples with replacement.

    Raises:
        ValueError: the name is taken. When the loss is called: `loss` returns a shape other than
            ``[Q]``, or the target is ``[*, T]``.
        TypeError: a trait is unknown, or `loss` is not callable.
    """
    if name in _PYTHON_ESTIMATORS or name in torch.ops.xsoftmax.estimator_names():
        raise ValueError(f"register_estimator: expected a name that is not taken, got {name!r}")
    if not callable(loss):
        raise TypeError(f"register_estimator: expected a function for {name!r}, got "
                        f"{type(loss).__name__}")
    unknown = set(traits) - set(_TRAITS)
    if unknown:
        raise TypeError(f"register_estimator: expected traits among {', '.join(_TRAITS)}, got "
                        f"{', '.join(sorted(unknown))}")
    _PYTHON_ESTIMATORS[name] = (loss, {
        "needs_target_count": bool(traits.get("corrects_target", False)), **traits
    })


def check_estimator(owner: str, name: str, label_smoothing: float,
                    other_names: Sequence[str] = ()) -> None:
    names = [*torch.ops.xsoftmax.estimator_names(), *other_names, *_PYTHON_ESTIMATORS]
    if name not in names:
        raise ValueError(f"{owner}: expected estimator to be one of {names}, got {name!r}")
    if label_smoothing != 0.0 and (name in _PYTHON_ESTIMATORS
                                   or not torch.ops.xsoftmax.estimator_smooths(name)):
        raise ValueError(f"{owner}: expected label_smoothing=0 with estimator={name!r}, got "
                         f"{label_smoothing}")


def has_noise(name: str) -> bool:
    """Returns whether the estimator uses samples with replacement to estimate what the other
    candidates leave out."""
    return _PYTHON_ESTIMATORS[name][1].get(
        "has_noise",
        False) if name in _PYTHON_ESTIMATORS else torch.ops.xsoftmax.estimator_has_noise(name)


def has_normalizer(name: str) -> bool:
    """Returns whether the loss is a log normaliser minus the target's score, as z_loss requires."""
    return name not in _PYTHON_ESTIMATORS and torch.ops.xsoftmax.estimator_has_normalizer(name)


def is_registered(estimator: str) -> bool:
    """Returns whether the estimator is written in Python."""
    return estimator in _PYTHON_ESTIMATORS


def registered_loss(module: Any, input: Tensor, target: Tensor,
                    sets: List[CandidateSet]) -> Optional[Tensor]:
    """Returns the loss of a module whose estimator is written in Python, or None for a built-in
    one."""
    if module.estimator not in _PYTHON_ESTIMATORS:
        return None
    loss, traits = _PYTHON_ESTIMATORS[module.estimator]
    if target.dim() == input.dim():
        raise ValueError("SampledSoftmaxLoss: expected one target of each query with estimator "
                         f"{module.estimator!r}, which is written in Python, "
                         f"got target of shape {list(target.shape)}")
    if module.z_loss != 0.0:
        raise ValueError("SampledSoftmaxLoss: expected z_loss=0 with estimator "
                         f"{module.estimator!r}, which has no log normaliser, got {module.z_loss}")
    # In the order of the columns of `scores`: private sets first, then shared ones; within each,
    # sets without replacement first.
    sets = sorted(sets, key=lambda part: (part.ids.dim() == 1, not part.distinct))
    counts = (target != module.ignore_index).reshape(-1)
    target_ids = torch.where(counts, target.reshape(-1), 0)
    queries = torch.where(counts.unsqueeze(1), input.reshape(len(target_ids), input.shape[-1]), 0.0)
    private = torch.cat(
        [target_ids.unsqueeze(1), *(part.ids for part in sets if part.ids.dim() == 2)], 1)
    shared = [part.ids for part in sets if part.ids.dim() == 1]
    scores = torch.ops.xsoftmax.candidate_scores(queries, module.linear.weight, module.linear.bias,
                                                 private,
                                                 torch.cat(shared) if shared else None,
                                                 module.sparse_grad)
    batch = torch.ops.xsoftmax.candidate_batch(
        module._logits(scores), target_ids, *columns_of(sets),
        option_text(remove_accidental_hits=module.remove_accidental_hits, **traits))
    values = loss(CandidateBatch(*batch))
    if values.shape != target_ids.shape:
        raise ValueError(f"SampledSoftmaxLoss: expected estimator {module.estimator!r} to give a "
                         f"loss for each query, {list(target_ids.shape)}, "
                         f"got {list(values.shape)}")
    return torch.ops.xsoftmax.reduced_loss(
        values, target, module.weight,
        option_text(reduction=module.reduction, ignore_index=module.ignore_index))
