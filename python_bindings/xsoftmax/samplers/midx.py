"""MIDX: classes drawn by a quantised copy of the class table."""

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .._memory import table_empty
from .adaptive import AdaptiveSampler, _check_flags, _check_ints, _detached, _proposal, _target_or_first
from .sampler import Proposal, draw_seed, one_set
from .static import Exclude, _log_of_count


_Index = Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]


class MidxSampler(AdaptiveSampler):
    r"""Draws classes by their scores under a quantised copy of the class table ("Inverted multi-index sampled softmax", fast MIDX).

    K-means gives two codebooks of K codewords, and each class the cell (k1, k2) of its nearest ones. A query z draws a cell by the scores
    of its two codewords and a class inside it (Theorem 2)::

        q(i | z) = w_i e^{z1.c1[k1] + z2.c2[k2]} / Z,        w_i = e^{bias_i}, or 1 without a bias

    at O(K D + K^2) a query and O(log K) a draw, whatever the number of classes. ``kind="rq"``: a row is about c1 + c2, z1 = z2 = z;
    ``"pq"``: it is about [c1; c2], and z = [z1; z2]. q is exact for what is drawn also while the table moves on: it comes from the index.

    Private draws are independent, as in the paper, or distinct; a set that the batch shares comes from the mixture of the queries' q, and
    is distinct unless ``distinct=False``. See :class:`Proposal`.

    In train() a loss brings the index up to date by itself, before it draws: a *refresh* (new codebooks from the present ones by K-means on
    ``train_points`` rows, every class coded again: O((N + iterations train_points) K D)) at step 0, ``refresh_every`` / 32, / 16, ..., and
    then every ``refresh_every`` steps; between those, every ``update_every`` steps, the classes scored since are coded again under the
    same codebooks.

    Args:
        num_classes: N >= 1.
        dim: D, the width of a query; at least 2 for "pq".
        codewords: K in [1, 1024]: 64 suits a million classes.
        kind: "rq" or "pq".
        bias: whether the class table has a bias. A loss sets it to what its table has.
        distinct: whether a set holds no class twice. None: shared sets are distinct, private ones independent.
        exclude: classes never drawn: an int h means the ids below h, a tensor (int64, one dimension) means those ids.
        spread: weigh each class by e^{|r|^2 |z|^2 / 2D} as well, r being what the codewords leave of its row, |z|^2 a running mean over the
            queries that were drawn for in train(): the mean of e^{z.r} were r Gaussian. Classes that the codewords describe badly are drawn
            more often. Weights change with the next refresh or update, so not at all where neither is due.
        exact: Theorem 1: cells weigh what quantisation leaves out as well, and q is the softmax itself, in float32, at O(N D) a query: for
            study. Draws are private and independent, from a copy of the table that each training step renews.
        learnable: the codewords are parameters. In train() a loss adds the gradient of ``midx_codebook_loss`` (after section 6.2.3:
            how far the codes are from the rows, and q from the softmax) to that of its own value, which does not change; a refresh then
            codes the classes anew under the learnt codewords. Give ``loss.parameters()`` to the optimizer.
        learn_rows: so many classes, drawn anew each step, are what learnable codebooks look at.
        mixture: a shared set is drawn from the "mean" of the queries' q, or from its root mean square, "rms", which minimises the variance.
        refresh_every: steps between two refreshes; 0: none after the one that builds the index at step 0.
        update_every: steps between two updates; 0: none. An update recodes the touched classes only, but lays out all N anew.
        iterations: of K-means, for each codebook.
        train_points: rows that K-means sees; None: 256 a codeword.

    Buffers, all in the state dict (a checkpoint without them, or with those of another index, loads as well: the index is then built
    anew): ``codewords1``, ``codewords2`` float32 [K, D1] and [K, D2], ``cell`` int32 [N], ``order`` int64 [A], ``start`` int64 [K K + 1],
    ``mass`` float64 [K, K]; with a bias or spread ``log_weight`` float32 [N], ``prefix`` float64 [A], ``heaviest`` float64 [K K];
    ``spread`` float32 [N] and ``query_square`` float64 with spread; ``table``, ``table_bias`` where exact; ``step`` int64; ``touched``
    bool [N] where update_every > 0.
    """

    distinct: Optional[bool]

    def __init__(self, num_classes: int, dim: int, *, codewords: int = 64, kind: str = "rq", bias: bool = False,
                 distinct: Optional[bool] = None, exclude: Exclude = None, mixture: str = "mean", refresh_every: int = 500,
                 update_every: int = 0, iterations: int = 10, train_points: Optional[int] = None,
                 spread: bool = False, exact: bool = False, learnable: bool = False, learn_rows: int = 1024):
        name = type(self).__name__
        super().__init__(num_classes, dim, bias, refresh_every, least_dim=2 if kind == "pq" else 1)
        _check_ints(name, (("codewords", codewords, 1), ("iterations", iterations, 0), ("learn_rows", learn_rows, 1),
                           ("update_every", update_every, 0)))
        if codewords > 1024:
            raise ValueError(f"{name}: expected codewords of at most 1024, got {codewords}")
        if kind not in ("rq", "pq"):
            raise ValueError(f"{name}: expected kind as \"rq\" or \"pq\", got {kind!r}")
        if mixture not in ("mean", "rms"):
            raise ValueError(f"{name}: expected mixture as \"mean\" or \"rms\", got {mixture!r}")
        _check_flags(name, spread=spread, exact=exact, learnable=learnable)
        if distinct is not None and not isinstance(distinct, bool):
            raise TypeError(f"{name}: expected distinct as True, False or None, got {distinct!r}")
        if train_points is not None:
            _check_ints(name, (("train_points", train_points, 1),))
        self.codewords = codewords
        self.kind = kind
        self.residual = kind == "rq"
        self.distinct = distinct
        self.rms = mixture == "rms"
        self.update_every = update_every
        self.iterations = iterations
        self.train_points = 256 * codewords if train_points is None else train_points
        if exact and distinct:
            raise ValueError(f"{name}: expected distinct=False or None beside exact=True, whose draws are independent, got True")
        if exact and spread:
            raise ValueError(f"{name}: expected spread=False beside exact=True, which needs none, got True")
        if exact and learnable:
            raise ValueError(f"{name}: expected learnable=False beside exact=True, whose q does not depend on the codewords, got True")
        self.exact = exact
        self.counts_beside = not exact
        self.learnable = self.learns = learnable
        self.learn_rows = learn_rows
        self._has_spread = spread
        self._begin(exclude)

    def _make_index(self, excluded: Tensor) -> None:
        # All classes in one cell, until the first refresh.
        n, k = self.num_classes, self.codewords
        cell = table_empty(n, dtype=torch.int32).zero_().index_fill_(0, excluded, -1)
        drawn = n - int((cell < 0).sum())
        width1, width2 = (self.dim, self.dim) if self.residual else ((self.dim + 1) // 2, self.dim // 2)
        for name, width in (("codewords1", width1), ("codewords2", width2)):
            if self.learnable:
                self.register_parameter(name, nn.Parameter(torch.zeros(k, width)))
            else:
                self.register_buffer(name, torch.zeros(k, width))
        self.register_buffer("cell", cell)
        weighted = self._has_bias or self._has_spread
        log_weight = table_empty(n, dtype=torch.float32).zero_() if weighted else None
        order, start, mass, prefix, heaviest = torch.ops.xsoftmax.midx_cells(cell, log_weight, k, drawn)
        self.register_buffer("order", order)
        self.register_buffer("start", start)
        self.register_buffer("mass", mass)
        self.register_buffer("log_weight", log_weight)
        self.register_buffer("prefix", prefix if weighted else None)
        self.register_buffer("heaviest", heaviest if weighted else None)
        self.register_buffer("spread", torch.zeros(n) if self._has_spread else None)
        self.register_buffer("query_square", torch.zeros([], dtype=torch.float64) if self._has_spread else None)
        self.register_buffer("table", torch.zeros(n, self.dim) if self.exact else None)
        self.register_buffer("table_bias", torch.zeros(n) if self.exact and self._has_bias else None)
        self.register_buffer("touched", torch.zeros(n, dtype=torch.bool) if self.update_every > 0 else None)

    def _shares(self) -> bool:
        return not self.exact

    def _excluded(self) -> Tensor:
        return (self.cell < 0).nonzero().squeeze(1)

    def _options(self) -> Dict[str, Any]:
        return {"codewords": self.codewords, "kind": self.kind, "distinct": self.distinct, "mixture": "rms" if self.rms else "mean",
                "refresh_every": self.refresh_every, "update_every": self.update_every, "iterations": self.iterations,
                "train_points": self.train_points, "spread": self._has_spread, "exact": self.exact, "learnable": self.learnable,
                "learn_rows": self.learn_rows}

    def _index(self) -> _Index:
        """As the ops take it."""
        return (self.codewords1.detach(), self.codewords2.detach(), self.cell, self.order, self.start, self.mass, self.log_weight, self.prefix,
                self.heaviest)

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """New codebooks from ``weight [N, D]`` (and ``bias [N]``, where the sampler has one), every class coded.

        Returns:
            ``distortion``: mean squared distance of a row from its codewords; ``mean_square``: of a row from 0; ``inertia1``,
            ``inertia2``: what K-means left for each codebook, over its training rows; ``cells``: cells in use.
        """
        self._check_table(weight, bias)
        stats = torch.ops.xsoftmax.midx_refresh_(
            draw_seed(weight, None), weight.detach(), _detached(bias), self.spread, self.query_square, *self._index(), self.residual,
            0 if self.learnable and bool(self.step > 0) else self.iterations, self.train_points, bool(self.step > 0))
        self.step.clamp_(min=1)
        self._copy_table(weight, bias)
        values: List[float] = stats.tolist()
        return {"distortion": values[0], "mean_square": values[1], "inertia1": values[2], "inertia2": values[3], "cells": values[4]}

    def _copy_table(self, weight: Tensor, bias: Optional[Tensor]) -> None:
        table, table_bias = self.table, self.table_bias
        if table is not None:
            table.copy_(weight.detach())
        if table_bias is not None and bias is not None:
            table_bias.copy_(bias.detach())

    @torch.jit.export
    def update(self, weight: Tensor, bias: Optional[Tensor], rows: Tensor) -> None:
        """Codes the classes ``rows`` (int64 [R]) again under the present codebooks, and takes in all biases."""
        self._check_table(weight, bias)
        torch.ops.xsoftmax.midx_update_(weight.detach(), _detached(bias), self.spread, self.query_square, *self._index(), rows)

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        self._check_table(weight, bias)
        torch.ops.xsoftmax.midx_step_(
            draw_seed(weight, generator), weight.detach(), _detached(bias), self.spread, self.query_square, self.step, self.touched,
            *self._index(), self.residual, self.iterations, 0 if self.learnable else self.iterations, self.train_points,
            self.refresh_every, self.update_every)
        self._copy_table(weight, bias)

    @torch.jit.export
    def auxiliary_loss(self, input: Tensor, weight: Tensor, bias: Optional[Tensor],
                       generator: Optional[torch.Generator] = None) -> Optional[Tensor]:
        if not self.learnable:
            return None
        at = torch.randint(self.order.size(0), [min(self.learn_rows, self.order.size(0))], generator=generator, device=weight.device)
        ids = self.order[at]
        some_bias: Optional[Tensor] = None
        if bias is not None:
            some_bias = bias.detach()[ids].float()
        return torch.ops.xsoftmax.midx_codebook_loss(self.codewords1, self.codewords2, weight.detach()[ids].float(), some_bias,
                                                     input.detach().float())

    @torch.jit.export
    def note(self, ids: Tensor) -> None:
        touched = self.touched
        if touched is not None:
            touched.index_fill_(0, ids.reshape(-1), True)

    @torch.jit.export
    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """See :meth:`Sampler.sample`."""
        input = self._checked(input)
        distinct = self.draws_distinct(shared)
        query_square = self.query_square
        if query_square is not None and self.training and input.size(0) > 0:
            with torch.no_grad():
                squares = input.detach().to(torch.float64).square().sum(1)
                square = squares.sum() / (squares != 0).sum().clamp_min(1)  # a loss makes ignored queries 0
                mean = torch.lerp(query_square, square, self.step.to(torch.float64).clamp(1.0, 100.0).reciprocal())
                query_square.copy_(torch.where(mean.isfinite(), mean, query_square))
        seed = draw_seed(input, generator)
        table = self.table
        if table is not None:
            if shared or distinct:
                raise ValueError("MidxSampler: expected private independent draws where exact is set, got shared or distinct ones")
            ids, log_q = torch.ops.xsoftmax.midx_exact_sample(seed, input, *self._index(), table, self.table_bias, num_samples)
            log_samples = _log_of_count(num_samples, ids).to(torch.float32)
            of_target: Optional[Tensor] = None
            if target is not None:
                of_target = self.log_prob(input, target.unsqueeze(1)).squeeze(1) + log_samples
            return one_set(ids, log_q + log_samples, of_target, False)
        some = _target_or_first(target, input)
        if shared:
            draws = torch.ops.xsoftmax.midx_sample_shared(seed, input, *self._index(), num_samples, distinct, self.rms, some)
        else:
            draws = torch.ops.xsoftmax.midx_sample(seed, input, *self._index(), num_samples, distinct, some)
        return _proposal(draws, target, distinct)

    def draws_distinct(self, shared: bool) -> bool:
        distinct = self.distinct
        return shared if distinct is None else distinct

    def log_count(self, input: Tensor, num_samples: int, shared: bool, ids: Tensor) -> Tensor:
        if not self.draws_distinct(shared):
            log_q = self.mixture_log_prob(input, ids.reshape(-1)).reshape(ids.shape) if shared else self.log_prob(input, ids)
            return log_q + _log_of_count(num_samples, ids).to(torch.float32)
        if not shared:
            raise ValueError("MidxSampler: expected independent private draws, got distinct ones, whose counts only a draw knows")
        draws = torch.ops.xsoftmax.midx_sample_shared(
            torch.zeros([], dtype=torch.int64, device=input.device), input, *self._index(), num_samples, True, self.rms, ids.reshape(-1))
        return draws[2].reshape(ids.shape)

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of ``ids [S]`` for every query, ``[Q, S]``, or of ``ids [Q, P]``, ``[Q, P]``; float32, -inf for a class never drawn."""
        input = self._checked(input)
        table = self.table
        if table is not None:
            return torch.ops.xsoftmax.midx_exact_log_prob(input, *self._index(), table, self.table_bias, ids)
        return torch.ops.xsoftmax.midx_log_prob(input, *self._index(), ids)

    @torch.jit.export
    def mixture_log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of ``ids [S]`` in the mixture from which a shared set is drawn: float32 ``[S]``."""
        input = self._checked(input)
        return torch.ops.xsoftmax.midx_mixture_log_prob(input, *self._index(), self.rms, ids)

    def extra_repr(self) -> str:
        text = super().extra_repr() + f", codewords={self.codewords}, kind={self.kind!r}"
        text += f", update_every={self.update_every}" if self.update_every > 0 else ""
        flags = {"spread": self._has_spread, "exact": self.exact, "learnable": self.learnable}
        return text + "".join(f", {name}=True" for name, flag in flags.items() if flag)
