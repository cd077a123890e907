"""Functional losses: of a class table or of vectors, and of candidate sets with expected counts."""

from typing import Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

from ._core.checks import check_reduction, check_tensor
from .optim.first_step import watch_functions
from ._core.options import logit_options, option_text
from ._core.public import public_names
from .tables.table_module import flat_queries
from .samplers import CandidateSet, columns_of

__all__ = [
    "linear_cross_entropy", "linear_entropy", "linear_log_prob", "sampled_softmax_loss",
    "tower_loss"
]
__dir__ = public_names(__all__)


def _check_tensors(owner: str, required: Dict[str, Tensor], **optional: Optional[Tensor]) -> None:
    present = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**required, **present}.items():
        check_tensor(owner, name, value)


def _logit_options(name: str, logit_scale: float, softcap: Optional[float]) -> Dict[str, float]:
    if softcap == 0:  # 0 means no cap to the operator, which makes all other checks
        raise ValueError(f"{name}: expected softcap as a finite number above 0, or None, got "
                         f"{softcap}")
    return logit_options(logit_scale, softcap)


def linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor, *,
                         bias: Optional[Tensor] = None, class_weight: Optional[Tensor] = None,
                         reduction: str = "mean", ignore_index: int = -100,
                         label_smoothing: float = 0.0, logit_scale: float = 1.0,
                         softcap: Optional[float] = None, z_loss: float = 0.0,
                         target_prob: Optional[Tensor] = None) -> Tensor:
    """Computes the exact cross entropy of a linear layer, without the logits [Q, N] in memory.

    Equivalent to::

        F.cross_entropy(F.linear(input, weight, bias), target, class_weight, ...)

    If gradients are recorded, the forward pass computes them together with the loss. Evaluate under
    ``torch.no_grad()``.

    Args:
        input: ``[*, D]``, float32, float64, bfloat16 or float16.
        weight: ``[N, D]``, in the dtype of `input`: a class table, or vectors computed by a
            network.
        target: int64 ``[*]``, in [0, N) or ignore_index; ``[*, T]`` with `target_prob`.
        bias: ``[N]``, in the dtype of `input`, or None.
        class_weight: floating ``[N]``, or None: the ``weight`` of ``F.cross_entropy``. It gets no
            gradient.
        reduction: "mean", "sum" or "none".
        ignore_index: targets of this value contribute no loss and no gradient.
        label_smoothing: in [0, 1]; must be 0 with `target_prob`.
        logit_scale, softcap, z_loss: as in :class:`xsoftmax.LinearCrossEntropyLoss`.
        target_prob: floating ``[*, T]`` or None, as in
            :meth:`xsoftmax.LinearCrossEntropyLoss.forward`.

    Returns:
        A scalar, or ``[*]`` with reduction="none"; float64 for float64 input, else float32. If no
        query counts (an empty batch, or all targets ignored), "sum" is 0 and "mean" is NaN, as in
        torch.

    Raises:
        ValueError: a shape does not fit, or an option is out of range.
        TypeError: the dtype or device of `weight` or `bias` differs from that of `input`; `target`
            is not int64; `class_weight` is not floating.
        IndexError: a target is neither in [0, N) nor ignore_index (checked on the CPU only).
    """
    name = "linear_cross_entropy"
    check_reduction(name, reduction)
    _check_tensors(name, dict(input=input, weight=weight, target=target), bias=bias,
                   class_weight=class_weight, target_prob=target_prob)
    if weight.dim() != 2:
        raise ValueError(f"{name}: expected weight of shape [N, D], got {list(weight.shape)}")
    queries = flat_queries(name, weight.size(1), input, target, several=target_prob is not None)
    options = option_text(reduction=reduction, ignore_index=ignore_index,
                          label_smoothing=label_smoothing, z_loss=z_loss,
                          **_logit_options(name, logit_scale, softcap))
    if target_prob is not None:
        return torch.ops.xsoftmax.linear_soft_loss(input, weight, bias, target, target_prob,
                                                   class_weight, options)
    loss = torch.ops.xsoftmax.linear_cross_entropy(queries, weight, bias, target.reshape(-1),
                                                   class_weight, options)
    return loss.reshape(target.shape) if reduction == "none" else loss


def linear_log_prob(input: Tensor, weight: Tensor, ids: Optional[Tensor] = None, *,
                    bias: Optional[Tensor] = None, logit_scale: float = 1.0,
                    softcap: Optional[float] = None) -> Tensor:
    """Computes log-probabilities of given classes, without the logits [Q, N] in memory.

    Equivalent to::

        F.log_softmax(F.linear(input, weight, bias), -1).gather(-1, ids)

    Args:
        input: ``[*, D]``, float32, float64, bfloat16 or float16.
        weight: ``[N, D]``, in the dtype of `input`.
        ids: int64 ``[*]`` or ``[*, K]`` in [0, N); may repeat. None: all classes, which holds ``[*,
            N]`` in memory.
        bias: ``[N]``, in the dtype of `input`, or None.
        logit_scale, softcap: as in :class:`xsoftmax.LinearCrossEntropyLoss`.

    Returns:
        The shape of `ids`, or ``[*, N]``; float64 for float64 input, else float32. Differentiable
        with respect to all arguments but `ids`.

    Raises:
        ValueError: a shape does not fit.
        TypeError: the dtype or device of `weight` or `bias` differs from that of `input`; `ids` is
            not int64.
        IndexError: an id is not in [0, N) (checked on the CPU only).
    """
    name = "linear_log_prob"
    _check_tensors(name, dict(input=input, weight=weight), bias=bias, ids=ids)
    options = option_text(**_logit_options(name, logit_scale, softcap))
    return torch.ops.xsoftmax.linear_log_prob(input, weight, bias, ids, options)


def linear_entropy(input: Tensor, weight: Tensor, *, bias: Optional[Tensor] = None,
                   logit_scale: float = 1.0, softcap: Optional[float] = None) -> Tensor:
    """Computes the entropy of the softmax of a linear layer, without the logits [Q, N] in memory.

    Equivalent to::

        log_p = F.log_softmax(F.linear(input, weight, bias), -1)
        -(log_p.exp() * log_p).sum(-1)

    except that a class with a score of -inf adds 0.

    Args:
        input: ``[*, D]``, float32, float64, bfloat16 or float16.
        weight: ``[N, D]``, in the dtype of `input`.
        bias: ``[N]``, in the dtype of `input`, or None.
        logit_scale, softcap: as in :class:`xsoftmax.LinearCrossEntropyLoss`.

    Returns:
        ``[*]``, in nats; float64 for float64 input, else float32. Differentiable with respect to
        all arguments.

    Raises:
        ValueError: a shape does not fit.
        TypeError: the dtype or device of `weight` or `bias` differs from that of `input`.
    """
    name = "linear_entropy"
    _check_tensors(name, dict(input=input, weight=weight), bias=bias)
    options = option_text(**_logit_options(name, logit_scale, softcap))
    return torch.ops.xsoftmax.linear_entropy(input, weight, bias, options)


def sampled_softmax_loss(input: Tensor, weight: Tensor, target: Tensor, sets: List[CandidateSet], *,
                         bias: Optional[Tensor] = None, class_weight: Optional[Tensor] = None,
                         log_z: Optional[Tensor] = None, target_prob: Optional[Tensor] = None,
                         logit_scale: float = 1.0, softcap: Optional[float] = None,
                         **options: Union[str, bool, int, float]) -> Tensor:
    """Computes the sampled loss of a class table on given candidate sets.

    This is what :class:`xsoftmax.SampledSoftmaxLoss` computes in train() once its sampler has
    drawn. For one shared set without replacement and the estimator "sampled_softmax", it is
    equivalent to::

        s = F.linear(input, weight[ids], bias[ids]) - log_count  # [Q, M], weighted 1 / count
        s = s.masked_fill(ids == target[:, None], -inf)          # remove_accidental_hits
        s_y = (input * weight[target]).sum(1) + bias[target]     # [Q]
        F.cross_entropy(torch.cat([s_y[:, None], s], 1), torch.zeros_like(target))

    Forward and backward read only the rows of the targets and the candidates. Samples with
    replacement are renormalised to the classes other than the target (Chen et al., 2025, section
    3.2): their ``s`` is increased by ``log((M - target_log_count.exp()) / m)``, where m of the M
    samples are not the target.

    Args:
        input: ``[*, D]``, float32, float64, bfloat16 or float16.
        weight: ``[N, D]``, in the dtype of `input`: the class table.
        target: int64 ``[*]`` in [0, N) or ignore_index; ``[*, T]`` for multiple positives.
        sets: a list of :class:`xsoftmax.samplers.CandidateSet`, returned by a sampler
            (``sampler.sample(queries, target)``) or built by the caller. ``ids`` are ``[M]`` or
            ``[Q, M]``. For multiple positives, ``target_log_count`` is ``[Q, T]``: the distinct
            positives, in descending order of id.
        bias: ``[N]``, in the dtype of `input`, or None.
        class_weight: floating ``[N]``, or None.
        log_z: floating 0-dim tensor, or None. It is subtracted from all scores, which affects only
            the estimators "nce" and "negative_sampling". It gets a gradient if it requires one.
        target_prob: floating ``[*, T]`` or None, as in :meth:`xsoftmax.SampledSoftmaxLoss.forward`.
            ``target_log_count`` of the sets is then ``[Q, T]``: the distinct classes of probability
            above 0, in descending order of id.
        logit_scale, softcap: as in :class:`xsoftmax.LinearCrossEntropyLoss`.
        options: ``estimator="sampled_softmax"``, ``remove_accidental_hits=True``,
            ``label_smoothing=0.0``, ``reduction="mean"``, ``ignore_index=-100``,
            ``positives="mean"``, ``z_loss=0.0`` and ``sparse_grad=None``, as in
            :class:`xsoftmax.SampledSoftmaxLoss`. Estimators written in Python and
            "complementary_sum" are not supported.

    Returns:
        A scalar, or ``[*]`` with reduction="none"; float64 for float64 input, else float32. Without
        candidates, the softmax losses are 0. If no query counts (an empty batch, or all targets
        ignored), "sum" is 0 and "mean" is NaN, as in torch.

    Raises:
        ValueError: a shape does not fit; an option is unknown or out of range; options exclude each
            other; a set lacks target_log_count for an estimator that needs it, such as "ranking";
            the sets do not suit CANE.
        TypeError: the dtype or device of `weight` or `bias` differs from that of `input`; `target`
            or ids are not int64.
        IndexError: a target is neither in [0, N) nor ignore_index, or an id is not in [0, N)
            (checked on the CPU only).
        RuntimeError: a call inside ``torch.func.vmap``.
    """
    _check_tensors("sampled_softmax_loss", dict(input=input, weight=weight, target=target),
                   bias=bias, class_weight=class_weight, log_z=log_z, target_prob=target_prob)
    if "reduction" in options:
        check_reduction("sampled_softmax_loss", options["reduction"])  # type: ignore[arg-type]
    if not torch.compiler.is_compiling():
        watch_functions()
    text = option_text(**options, **_logit_options("sampled_softmax_loss", logit_scale, softcap))
    return torch.ops.xsoftmax.sampled_softmax_loss(input, weight, bias, target, *columns_of(sets),
                                                   class_weight, log_z, text, target_prob)


def tower_loss(query: Tensor, item: Tensor, item_id: Tensor, candidates: List[Tuple[Tensor,
                                                                                    CandidateSet]],
               *, estimator: str = "sampled_softmax", remove_accidental_hits: bool = True,
               weight: Optional[Tensor] = None, reduction: str = "mean") -> Tensor:
    """Computes the loss of queries against item vectors that a network has just computed.

    This is what :class:`xsoftmax.TwoTowerLoss` computes from its candidates and their expected
    counts. For one shared set without replacement and the estimator "sampled_softmax", it is
    equivalent to::

        s = query @ vectors.T - log_count
        s = s.masked_fill(ids == item_id[:, None], -inf)
        positive = (query * item).sum(1, keepdim=True)
        F.cross_entropy(torch.cat([positive, s], 1), torch.zeros_like(item_id))

    without ``[Q, S]`` in memory, forward or backward (on the CPU).

    Args:
        query, item: ``[Q, D]``: each query and the vector of its item; float32, float64, bfloat16
            or float16. Vectors of another dtype are cast to that of `query`.
        item_id: int64 ``[Q]``, any values.
        candidates: pairs of vectors and a :class:`xsoftmax.samplers.CandidateSet`: vectors ``[S,
            D]`` with ids ``[S]``, shared by all queries, or vectors ``[Q, P, D]`` with ids ``[Q,
            P]``. All vectors get gradients.
        estimator, remove_accidental_hits: as in :class:`xsoftmax.TwoTowerLoss`.
        weight: floating ``[Q]``, or None: multiplies the losses; the mean is weighted by it. It
            gets no gradient.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or ``[Q]`` with reduction="none"; float64 for float64 `query`, else float32. The
        mean over an empty batch is NaN.

    Raises:
        ValueError: a shape does not fit; an option is out of range; a set lacks target_log_count
            for an estimator that needs it, such as "ranking".
        TypeError: `item_id` or ids are not int64; vectors or `weight` are not floating; tensors are
            on different devices.
    """
    _check_tensors("tower_loss", dict(query=query, item=item, item_id=item_id), weight=weight)
    options = option_text(estimator=estimator, remove_accidental_hits=remove_accidental_hits,
                          reduction=check_reduction("tower_loss", reduction))
    vectors, sets = [part
                     for part, _ in candidates], [candidate_set for _, candidate_set in candidates]
    return torch.ops.xsoftmax.tower_loss(query, item, item_id, vectors, *columns_of(sets), weight,
                                         options)
