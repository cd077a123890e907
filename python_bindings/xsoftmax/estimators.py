"""Estimators written in Python, beside those of the library."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ._options import option_text
from .samplers import CandidateSet, columns_of


class CandidateBatch(NamedTuple):
    """What an estimator sees, for a batch of Q queries and C candidates. Candidates that hit the target, where hits are removed, have a log
    weight of -inf and take no part."""

    target: Tensor
    """``[Q]``: scores of the targets, less their log expected count where the estimator corrects the target."""
    score: Tensor
    """``[Q, C]``: scores of the candidates."""
    log_weight: Tensor
    """``[Q, C]``: ``(score + log_weight).exp().sum(1)`` is the estimate of the sum of ``e^s`` over the classes other than the target."""
    adjusted: Tensor
    """``[Q, C]``: ``score + log_weight``, -inf where a candidate takes no part."""
    drawn: Tensor
    """bool ``[C]``: an independent draw, not one of a distinct set."""
    draws: Tensor
    """``[Q]``: how many of those take part."""
    covered: Tensor
    """bool ``[Q]``: the target is in a distinct set."""
    target_log_count: Tensor
    """``[Q]``: the target's log expected count in all sets; of size 0 where the estimator does not ask for it."""


_TRAITS = ("corrects_target", "needs_target_count", "renormalizes", "weighs", "drops_distinct_hits", "drops_drawn_hits", "takes_a_draw", "has_noise")
_REGISTERED: Dict[str, Tuple[Callable[[CandidateBatch], Tensor], Dict[str, bool]]] = {}


def register_estimator(name: str, loss: Callable[[CandidateBatch], Tensor], **traits: bool) -> None:
    """Gives an estimator a name: from then on ``estimator=name`` of :class:`xsoftmax.SampledSoftmaxLoss` is ``loss``.

    Args:
        loss: the losses ``[Q]`` of a :class:`CandidateBatch`, in differentiable PyTorch expressions. It runs in Python, not in TorchScript (C++
            programs register one by ``xsoftmax::register_estimator``, which serves TorchScript as well).
        traits: what the estimator asks of the candidates, each False where it is not named: weighs (candidates weigh 1 / expected count, not 1),
            drops_distinct_hits and drops_drawn_hits (candidates that are the target are removed, among distinct sets, among independent
            draws), renormalizes (q to the classes other than the target, where such draws are removed), needs_target_count, corrects_target (the
            target's score is lowered by its log expected count, which is then needed), takes_a_draw (beside distinct sets, a target in
            none of them takes the place of the first independent draw), has_noise (it wants distinct sets and independent draws).

    Raises:
        ValueError: a name that is taken. In a call of the loss: `loss` gives another shape than ``[Q]``, or the target is ``[*, T]``.
        TypeError: a trait that is unknown, or a loss that cannot be called.
    """
    if name in _REGISTERED or name in torch.ops.xsoftmax.estimator_names():
        raise ValueError(f"register_estimator: expected a name that is not taken, got {name!r}")
    if not callable(loss):
        raise TypeError(f"register_estimator: expected a function for {name!r}, got {type(loss).__name__}")
    unknown = set(traits) - set(_TRAITS)
    if unknown:
        raise TypeError(f"register_estimator: expected traits among {', '.join(_TRAITS)}, got {', '.join(sorted(unknown))}")
    _REGISTERED[name] = (loss, {"needs_target_count": bool(traits.get("corrects_target", False)), **traits})


def check_estimator(owner: str, name: str, label_smoothing: float, more: Sequence[str] = ()) -> None:
    names = [*torch.ops.xsoftmax.estimator_names(), *more, *_REGISTERED]
    if name not in names:
        raise ValueError(f"{owner}: expected estimator to be one of {names}, got {name!r}")
    if label_smoothing != 0.0 and (name in _REGISTERED or not torch.ops.xsoftmax.estimator_smooths(name)):
        raise ValueError(f"{owner}: expected label_smoothing=0 with estimator={name!r}, got {label_smoothing}")


def has_noise(name: str) -> bool:
    """Whether independent draws stand for what the other candidates leave out."""
    return _REGISTERED[name][1].get("has_noise", False) if name in _REGISTERED else torch.ops.xsoftmax.estimator_has_noise(name)


def has_normalizer(name: str) -> bool:
    """Whether the loss is a log normaliser less the score of the target, as z_loss needs it."""
    return name not in _REGISTERED and torch.ops.xsoftmax.estimator_has_normalizer(name)


def is_registered(estimator: str) -> bool:
    """Returns whether the estimator is written in Python."""
    return estimator in _REGISTERED


def registered_loss(module: Any, input: Tensor, target: Tensor, sets: List[CandidateSet]) -> Optional[Tensor]:
    """The loss of a module whose estimator is written in Python; None where it is not."""
    if module.estimator not in _REGISTERED:
        return None
    loss, traits = _REGISTERED[module.estimator]
    if target.dim() == input.dim():
        raise ValueError(f"SampledSoftmaxLoss: expected one target of each query with estimator {module.estimator!r}, which is written in Python, "
                         f"got target of shape {list(target.shape)}")
    if module.z_loss != 0.0:
        raise ValueError(f"SampledSoftmaxLoss: expected z_loss=0 with estimator {module.estimator!r}, which has no log normaliser, got {module.z_loss}")
    sets = sorted(sets, key=lambda part: (part.ids.dim() == 1, not part.distinct))  # as the scores stand side by side
    counts = (target != module.ignore_index).reshape(-1)
    known = torch.where(counts, target.reshape(-1), 0)
    queries = torch.where(counts.unsqueeze(1), input.reshape(len(known), input.shape[-1]), 0.0)
    private = torch.cat([known.unsqueeze(1), *(part.ids for part in sets if part.ids.dim() == 2)], 1)
    shared = [part.ids for part in sets if part.ids.dim() == 1]
    scores = torch.ops.xsoftmax.candidate_scores(queries, module.linear.weight, module.linear.bias, private,
                                                 torch.cat(shared) if shared else None, module.sparse_grad)
    batch = torch.ops.xsoftmax.candidate_batch(
        module._logits(scores), known, *columns_of(sets), option_text(remove_accidental_hits=module.remove_accidental_hits, **traits))
    each = loss(CandidateBatch(*batch))
    if each.shape != known.shape:
        raise ValueError(f"SampledSoftmaxLoss: expected estimator {module.estimator!r} to give a loss for each query, {list(known.shape)}, "
                         f"got {list(each.shape)}")
    return torch.ops.xsoftmax.reduced_loss(each, target, module.weight, option_text(reduction=module.reduction, ignore_index=module.ignore_index))
