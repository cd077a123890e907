"""Draws from what a set of classes leaves over."""

from typing import Callable, Dict, List, Optional, Union

import torch
from torch import Tensor

from .._checks import check_count
from .._options import option_text, read_options
from .sampler import CandidateSet, DescribedSampler, Sampler, make_sampler, sampler_names


class ComplementSampler(DescribedSampler):
    """Draws from the classes outside the target, or outside a set: the complementary sums of Botev et al. (2017), and the noise of CANE (Han et al., 2018, Eq.
    2).

    A draw of ``sampler`` is made up to ``tries`` times, until it is outside. If no try is, the draw is uniform over the classes outside. Its probability has a
    closed form, with f the mass that the sampler's q gives the set C::

        q_x(j) = q_j (1 + f + ... + f^(tries - 1)) + f^tries / (N - |C|)        j outside C

    This is about q_j / (1 - f) where f is small. The number of tries is fixed, so the cost of a draw does not depend on the data. Draws are private and
    independent.

    Args:
        sampler: draws private independent classes, ``tries num_samples`` of them for each query, and belongs to this one from here on. None: draws are uniform
            over the classes outside, with one try each.
        num_samples: draws for each query: at least 1, or 0 without a sampler.
        num_classes: N, where there is no sampler to say it.

    Shapes and dtypes: ids int64 [Q, M], log counts float32 [Q, M].

    Raises:
        ValueError: a sampler that shares its draws, draws distinct classes, draws no multiple of num_samples, or belongs to a loss already; num_samples or
            num_classes out of range; :meth:`log_count`, since the counts depend on the target. In a draw: a sampler of several sets, or a set with a class
            twice.
        TypeError: an option of another type; candidates or targets that are not int64.
        IndexError: a candidate or a target is not in [0, N) and not -1 (checked on the CPU).
    """

    def __init__(self, sampler: Optional[Sampler], num_samples: int, *, num_classes: Optional[int] = None):
        num_samples = check_count("ComplementSampler", "num_samples", num_samples, 0 if sampler is None else 1)
        tries = 0
        if sampler is not None:
            if not isinstance(sampler, Sampler):
                raise TypeError(f"ComplementSampler: expected sampler to be a Sampler or None, got {type(sampler).__name__}")
            if sampler.shared or sampler.distinct:
                raise ValueError(f"ComplementSampler: expected a sampler of private independent draws, got {sampler}")
            if sampler.num_samples < num_samples or sampler.num_samples % num_samples != 0:
                raise ValueError(f"ComplementSampler: expected a sampler that draws a multiple of num_samples = {num_samples} for each query, "
                                 f"got {sampler.num_samples}")
            if num_classes not in (None, sampler.num_classes):
                raise ValueError(f"ComplementSampler: expected num_classes={sampler.num_classes}, "
                                 f"that of the sampler, got {num_classes}")
            num_classes, tries = sampler.num_classes, sampler.num_samples // num_samples
        super().__init__(num_classes, num_samples, shared=False)  # type: ignore[arg-type]  # whose check names it
        if sampler is not None:
            sampler._claim("ComplementSampler")
        self.sampler = sampler
        self.follows_table = sampler is not None and sampler.follows_table
        self.options = option_text(num_classes=self.num_classes, num_samples=num_samples, tries=tries)

    def extra_repr(self) -> str:
        return self.options.replace(",", ", ")

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """Draws outside the target; of several classes of a query, outside the first. See :meth:`Sampler.sample`."""
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
        """Draws for each query outside its set.

        Args:
            queries: floating ``[Q, D]``.
            candidates: int64 ``[C]``, for all queries, or ``[Q, C]``: no class twice in a set; -1 where there is none.
            target: int64 ``[Q]`` or ``[Q, T]``, see :meth:`Sampler.sample`.
            generator: on the queries' device. None: torch's default one.

        Returns:
            A :class:`CandidateSet` of private draws with log counts ``log(num_samples q_x)``; those of targets inside the set are -inf. Where no class is
            outside, log counts are +inf.

        Raises:
            ValueError, TypeError, IndexError: as :class:`ComplementSampler`
        """
        if self._describe() != "":
            ids, of_ids, of_target = torch.ops.xsoftmax.sampler_sample_outside(queries, candidates, target, self.state_tensors(), self._describe(), generator,
                                                                               self.training, self._first_query)
            return CandidateSet(ids, of_ids, None if target is None else of_target, False)
        if candidates.dim() != 1 and (candidates.dim() != 2 or candidates.size(0) != queries.size(0)):
            raise ValueError(f"ComplementSampler: expected candidates of shape [C] or [{queries.size(0)}, C], got {list(candidates.shape)}")
        inside = torch.ops.xsoftmax.sort_sets(candidates if candidates.dim() == 2 else candidates.unsqueeze(0), self.num_classes)
        draws: Optional[Tensor] = None
        inside_count: Optional[Tensor] = None
        log_count: Optional[Tensor] = None
        target_count: Optional[Tensor] = None
        if self.sampler is not None:
            drawn = self.sampler.sample(queries, target, generator)
            if len(drawn) != 1:
                raise ValueError(f"ComplementSampler: expected a sampler of one set, got {len(drawn)} sets")
            draws, target_count = drawn[0].ids, drawn[0].target_log_count
            if target is not None and target_count is None:
                raise ValueError("ComplementSampler: expected a set with target_log_count, since it is drawn for targets, got None")
            classes = inside.clamp(max=self.num_classes - 1)
            inside_count = self.sampler.log_count(queries, classes if candidates.dim() == 2 else classes[0])
        ids = torch.ops.xsoftmax.complement_sample(self._seed(queries, generator), inside, draws, queries, self.options)
        if self.sampler is not None:
            log_count = self.sampler.log_count(queries, ids)
        of_ids, of_target = torch.ops.xsoftmax.complement_log_count(inside, inside_count, ids, log_count, target, target_count, self.options)
        return CandidateSet(ids, of_ids, None if target is None else of_target, False)

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
    def plan_growth(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Optional[Callable[[], None]]:
        plan = None if self.sampler is None else self.sampler.plan_growth(num_classes, rows, bias)
        return None if plan is None and self.sampler is not None else self._planned(plan, num_classes)

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Callable[[], None]:
        return self._planned(None if self.sampler is None else self.sampler.plan_resize(num_classes, rows, bias), num_classes)

    @torch.jit.unused
    def _planned(self, plan: Optional[Callable[[], None]], num_classes: int) -> Callable[[], None]:
        def resize() -> None:
            if plan is not None:
                plan()
            self.num_classes = num_classes
            self.options = option_text(**{**read_options(self.options), "num_classes": num_classes})

        return resize

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        if self.sampler is not None:
            self.sampler.prepare(weight, bias, generator)

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        stats: Dict[str, float] = {}
        if self.sampler is not None:
            stats = self.sampler.refresh(weight, bias)
        return stats


def outside_target(sampler: Sampler) -> ComplementSampler:
    """Returns a sampler whose draws are those of the given one, from classes other than the target.

    The estimator "complementary_sum" takes it. The given sampler belongs to it from then on.
    """
    if isinstance(sampler, ComplementSampler):
        return sampler
    return ComplementSampler(sampler, sampler.num_samples)


def noise_outside(owner: str, noise: Union[Sampler, str], num_noises: int, num_classes: int, dim: int, bias: bool,
                  candidates: Optional[Tensor] = None, follows_table: bool = True) -> ComplementSampler:
    """Draws from outside a set for each query, by what users give.

    Args:
        noise: a sampler of private independent draws, or its name, for a class table of width dim; each noise then has up to four tries.
        candidates: where the set is always the same.
        follows_table: False where there is no class table that a sampler could follow.
    """
    if isinstance(noise, str) and noise != "uniform":
        noise = make_sampler(noise, num_classes, 4 * num_noises, dim=dim, bias=bias, shared=False)
    if not isinstance(noise, Sampler) and noise != "uniform":
        raise TypeError(f"{owner}: expected noise_sampler as a Sampler or one of "
                        f"{sampler_names()}, got {type(noise).__name__}")
    if not isinstance(noise, Sampler) or num_noises == 0:
        return ComplementSampler(None, num_noises, num_classes=num_classes)
    if noise.num_classes != num_classes:
        raise ValueError(f"{owner}: expected a noise_sampler of {num_classes} classes, got one of {noise.num_classes}")
    if not follows_table and noise.follows_table:
        raise ValueError(f"{owner}: expected a noise_sampler that does not follow a class table, "
                         f"since a tree has none, got {type(noise).__name__}")
    inside = torch.zeros(0, dtype=torch.int64) if candidates is None or candidates.is_meta else candidates.cpu()
    if 0 < inside.numel() < num_classes:
        noise = noise.excluding(inside) or noise  # whose draws then are all outside
    # A class that is neither a candidate nor ever drawn would learn nothing of how it compares with the others.
    device = next(iter(noise.buffers()), inside).device
    count = noise.log_count(torch.zeros(1, dim, device=device), torch.arange(num_classes, device=device)).reshape(-1)
    never = count.isneginf().nonzero().squeeze(1).cpu()
    never = never[~torch.isin(never, inside)]
    if never.numel() > 0:
        raise ValueError(f"{owner}: expected a noise_sampler that draws every class outside the candidates, got one that never draws "
                         f"{never.numel()} of them, such as {int(never[0])}")
    return ComplementSampler(noise, num_noises)
