"""Sampling from the classes outside a set."""

from typing import Callable, Dict, List, Optional, Union

import torch
from torch import Tensor

from .._core.checks import check_count
from .._core.options import option_text, read_options
from .candidate_set import CandidateSet
from .sampler import DescribedSampler, Sampler, make_sampler, sampler_names


class ComplementSampler(DescribedSampler):
    """Samples from the classes other than the target, or outside a set: the complementary sums of
    Botev et al. (2017), and the noise of CANE (Han et al., 2018, Eq. 2).

    Each sample is drawn from ``sampler`` up to ``tries`` times, until it is outside the set C. If
    every try fails, the sample is uniform over the classes outside C. The resulting probability has
    a closed form, where f is the probability of C under the sampler's q::

        q_x(j) = q_j (1 + f + ... + f^(tries - 1)) + f^tries / (N - |C|)        for j outside C

    This is about q_j / (1 - f) for small f. The number of tries is fixed, so the cost of a sample
    does not depend on the data. Samples are private to each query, with replacement.

    Args:
        sampler: a sampler of private samples with replacement, that draws ``tries * num_samples``
            classes per query. It cannot be used elsewhere. None: samples are uniform over the
            classes outside, with one try each.
        num_samples: samples per query: at least 1, or 0 without a sampler.
        num_classes: N; required without a sampler.

    Shapes and dtypes: ids int64 [Q, M], log counts float32 [Q, M].

    Raises:
        ValueError: the sampler shares its draws, samples without replacement, does not draw a
            multiple of num_samples, or belongs to a loss already; num_samples or num_classes is out
            of range; :meth:`log_count` is called, since counts depend on the target. When drawing:
            the sampler returns several sets, or a set of candidates has a repeated class.
        TypeError: an option has another type; candidates or targets are not int64.
        IndexError: a candidate or a target is neither in [0, N) nor -1 (checked on the CPU only).
    """
    def __init__(self, sampler: Optional[Sampler], num_samples: int, *,
                 num_classes: Optional[int] = None):
        num_samples = check_count("ComplementSampler", "num_samples", num_samples,
                                  0 if sampler is None else 1)
        tries = 0
        if sampler is not None:
            if not isinstance(sampler, Sampler):
                raise TypeError("ComplementSampler: expected sampler to be a Sampler or None, got "
                                f"{type(sampler).__name__}")
            if sampler.shared or sampler.distinct:
                raise ValueError("ComplementSampler: expected a sampler of private independent "
                                 f"draws, got {sampler}")
            if sampler.num_samples < num_samples or sampler.num_samples % num_samples != 0:
                raise ValueError("ComplementSampler: expected a sampler that draws a multiple of "
                                 f"num_samples = {num_samples} for each query, "
                                 f"got {sampler.num_samples}")
            if num_classes not in (None, sampler.num_classes):
                raise ValueError(f"ComplementSampler: expected num_classes={sampler.num_classes}, "
                                 f"that of the sampler, got {num_classes}")
            num_classes, tries = sampler.num_classes, sampler.num_samples // num_samples
        super().__init__(
            num_classes,  # type: ignore[arg-type]  # whose check names it
            num_samples,
            shared=False)
        if sampler is not None:
            sampler._claim("ComplementSampler")
        self.default_estimator = "sampled_softmax"  # the target is never drawn
        self.sampler = sampler
        self.follows_table = sampler is not None and sampler.follows_table
        self.options = option_text(num_classes=self.num_classes, num_samples=num_samples,
                                   tries=tries)

    def extra_repr(self) -> str:
        return self.options.replace(",", ", ")

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """Draws classes other than the target; if the target has several classes per query, other
        than the first. See :meth:`Sampler.sample`."""
        if self._describe() != "":
            return self._draw(queries, target, generator)
        if target is None:
            outside_of = torch.zeros([0], dtype=torch.int64, device=queries.device)
        else:
            outside_of = target.unsqueeze(1) if target.dim() == 1 else target[:, :1]
        return [self.sample_outside(queries, outside_of, target, generator)]

    @torch.jit.export
    def sample_outside(self, queries: Tensor, candidates: Tensor, target: Optional[Tensor] = None,
                       generator: Optional[torch.Generator] = None) -> CandidateSet:
        """Draws classes outside a set, for each query.

        Args:
            queries: floating ``[Q, D]``.
            candidates: the sets, int64 ``[C]`` for all queries, or ``[Q, C]``, without repeated
                classes, with -1 as padding.
            target: int64 ``[Q]`` or ``[Q, T]``, see :meth:`Sampler.sample`.
            generator: a generator on the device of the queries. None: torch's default generator.

        Returns:
            A :class:`CandidateSet` of private samples with log counts ``log(num_samples q_x)``. The
            log count of a target inside the set is -inf. If no class is outside, log counts are
            +inf.

        Raises:
            ValueError, TypeError, IndexError: same as :class:`ComplementSampler`.
        """
        if self._describe() != "":
            ids, ids_log_count, target_log_count = torch.ops.xsoftmax.sampler_sample_outside(
                queries, candidates, target, self.state_tensors(), self._describe(), generator,
                self.training, self._first_query)
            return CandidateSet(ids, ids_log_count, None if target is None else target_log_count,
                                False)
        if candidates.dim() != 1 and (candidates.dim() != 2
                                      or candidates.size(0) != queries.size(0)):
            raise ValueError("ComplementSampler: expected candidates of shape [C] or "
                             f"[{queries.size(0)}, C], got {list(candidates.shape)}")
        inside = torch.ops.xsoftmax.sort_sets(
            candidates if candidates.dim() == 2 else candidates.unsqueeze(0), self.num_classes)
        draws: Optional[Tensor] = None
        inside_count: Optional[Tensor] = None
        log_count: Optional[Tensor] = None
        target_count: Optional[Tensor] = None
        if self.sampler is not None:
            sampler_sets = self.sampler.sample(queries, target, generator)
            if len(sampler_sets) != 1:
                raise ValueError("ComplementSampler: expected a sampler of one set, got "
                                 f"{len(sampler_sets)} sets")
            draws, target_count = sampler_sets[0].ids, sampler_sets[0].target_log_count
            if target is not None and target_count is None:
                raise ValueError("ComplementSampler: expected a set with target_log_count, since "
                                 "it is drawn for targets, got None")
            classes = inside.clamp(max=self.num_classes - 1)
            inside_count = self.sampler.log_count(queries,
                                                  classes if candidates.dim() == 2 else classes[0])
        ids = torch.ops.xsoftmax.complement_sample(self._seed(queries, generator), inside, draws,
                                                   queries, self.options)
        if self.sampler is not None:
            log_count = self.sampler.log_count(queries, ids)
        ids_log_count, target_log_count = torch.ops.xsoftmax.complement_log_count(
            inside, inside_count, ids, log_count, target, target_count, self.options)
        return CandidateSet(ids, ids_log_count, None if target is None else target_log_count, False)

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        raise ValueError("ComplementSampler: expected counts of a draw, got a call of log_count: "
                         "they depend on the target, so in a union it has to be the last private "
                         "part")

    def _describe(self) -> str:
        if self.sampler is None:
            return "complement:0:" + self.options
        part = self.sampler.describe()
        return "" if part == "" else "complement:0:" + self.options + "[" + part + "]"

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        tensors: List[Tensor] = []
        if self.sampler is not None:
            tensors = self.sampler.state_tensors()
        return tensors

    @torch.jit.unused
    def refresh_due(self) -> bool:
        return self.sampler is not None and self.sampler.refresh_due()

    @torch.jit.unused
    def plan_growth(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Optional[Callable[[], None]]:
        plan = None if self.sampler is None else self.sampler.plan_growth(num_classes, rows, bias)
        return None if plan is None and self.sampler is not None else self._plan(plan, num_classes)

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Callable[[], None]:
        return self._plan(
            None if self.sampler is None else self.sampler.plan_resize(num_classes, rows, bias),
            num_classes)

    @torch.jit.unused
    def _plan(self, plan: Optional[Callable[[], None]], num_classes: int) -> Callable[[], None]:
        def resize() -> None:
            if plan is not None:
                plan()
            self.num_classes = num_classes
            self.options = option_text(**{**read_options(self.options), "num_classes": num_classes})

        return resize

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor],
                generator: Optional[torch.Generator] = None) -> None:
        if self.sampler is not None:
            self.sampler.prepare(weight, bias, generator)

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        stats: Dict[str, float] = {}
        if self.sampler is not None:
            stats = self.sampler.refresh(weight, bias)
        return stats


def outside_target(sampler: Sampler) -> ComplementSampler:
    """Returns a sampler that draws from the classes other than the target with the given sampler,
    for the estimator "complementary_sum".

    It takes ownership of the given sampler.
    """
    if isinstance(sampler, ComplementSampler):
        return sampler
    return ComplementSampler(sampler, sampler.num_samples)


def make_noise_sampler(owner: str, noise: Union[Sampler, str], num_noises: int, num_classes: int,
                       dim: int, bias: bool, candidates: Optional[Tensor] = None,
                       follows_table: bool = True) -> ComplementSampler:
    """Returns a sampler of noise from outside a set, built from the user's argument.

    Args:
        owner: named in errors.
        noise: a sampler of private samples with replacement, or the name of one; a sampler given by
            name has up to four tries per noise.
        num_noises: noises per query.
        num_classes: N.
        dim, bias: of the class table, for a sampler given by name.
        candidates: the set, if it is always the same.
        follows_table: False if there is no class table that a sampler could follow.
    """
    if isinstance(noise, str) and noise != "uniform":
        noise = make_sampler(noise, num_classes, 4 * num_noises, dim=dim, bias=bias, shared=False)
    if not isinstance(noise, Sampler) and noise != "uniform":
        raise TypeError(f"{owner}: expected noise_sampler as a Sampler or one of "
                        f"{sampler_names()}, got {type(noise).__name__}")
    if not isinstance(noise, Sampler) or num_noises == 0:
        return ComplementSampler(None, num_noises, num_classes=num_classes)
    if noise.num_classes != num_classes:
        raise ValueError(f"{owner}: expected a noise_sampler of {num_classes} classes, got one of "
                         f"{noise.num_classes}")
    if not follows_table and noise.follows_table:
        raise ValueError(f"{owner}: expected a noise_sampler that does not follow a class table, "
                         f"since a tree has none, got {type(noise).__name__}")
    inside = torch.zeros(
        0, dtype=torch.int64) if candidates is None or candidates.is_meta else candidates.cpu()
    if 0 < inside.numel() < num_classes:
        noise = noise.excluding(inside) or noise  # all of its samples are then outside
    # A class that is neither a candidate nor ever drawn would get no gradient as a negative.
    device = next(iter(noise.buffers()), inside).device
    count = noise.log_count(torch.zeros(1, dim, device=device),
                            torch.arange(num_classes, device=device)).reshape(-1)
    missing_ids = count.isneginf().nonzero().squeeze(1).cpu()
    missing_ids = missing_ids[~torch.isin(missing_ids, inside)]
    if missing_ids.numel() > 0:
        raise ValueError(f"{owner}: expected a noise_sampler that draws every class outside the "
                         "candidates, got one that never draws "
                         f"{missing_ids.numel()} of them, such as {int(missing_ids[0])}")
    return ComplementSampler(noise, num_noises)
