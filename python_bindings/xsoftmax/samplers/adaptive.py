"""What the samplers that follow the class table share."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .. import _long_work
from .._checks import check_count, check_generator
from .._memory import device_of_values
from .._options import option_text, read_options
from .sampler import DescribedSampler, unusable_tables
from .static import Exclude, _bool, _ids


class AdaptiveSampler(DescribedSampler):
    """Base of samplers whose q follows the class table, by an index that a loss brings up to date in train().

    Expected counts are exact for what is drawn, also while the table moves on: they come from the same index. ``prepare`` refreshes the index before step 0,
    then ever less often up to step ``refresh_every``, and then at its multiples. A sampler that is not yet refreshed draws all classes alike.

    Args:
        num_classes: N >= 1.
        dim: D >= 1, the width of a query.
        num_samples: draws for each query, or for the batch where ``shared``; at least 0.
        bias: whether the class table has a bias.
        shared: one set for the batch, where a sampler can draw one.
        exclude: classes never drawn: an int h means the ids below h, an int64 tensor [E] means those ids.
        refresh_every: steps between two refreshes; 0: never again after step 0.

    Shapes and dtypes: queries floating [Q, D]; weight floating [N, D] and bias [N]; ids int64 [Q, M], or [M] where shared, and log counts float32 of that
    shape, or [Q, M]; see :class:`CandidateSet`.

    The index is in the state dict. One that is missing there, or that is of other options or of another head, is built anew: ``step`` is then 0. Of one that is
    there in part, ``load_state_dict`` names the missing keys (but for tables without elements, which it does not need), and builds it anew with strict=False.
    One with a NaN or an infinity is refused.
    ``step`` stays on the CPU wherever the sampler moves, so that no step of training waits for a device to know whether a refresh is due; so does ``recent``,
    how many of the last classes have come since the index was laid out (:meth:`plan_growth`).

    Raises:
        ValueError: an option out of range, or an ``exclude`` that leaves no class. In :meth:`prepare` and :meth:`refresh`: a table of another shape; one with a
            bias where ``bias=False``, or the other way round; one with a NaN or an infinity. Index, step and generator then stay as they were.
        TypeError: an option of another type; queries or a table of no floating dtype; targets or ids that are not int64.
        IndexError: an excluded class, a target or an id is not in [0, N) (checked on the CPU).
    """

    # What a family calls its operators (csrc/samplers/adaptive.h), its tables as they take them, those that are parameters, the one of
    # [num_classes] that is negative for an excluded class, and the statistics of a refresh.
    _family = ""
    _tables: Tuple[str, ...] = ("recent", "step")
    _learnt: Tuple[str, ...] = ()
    _places = ""
    _statistics: List[str] = []

    family: str
    statistics: List[str]

    def _begin(self, num_classes: int, dim: int, num_samples: int, shared: Optional[bool], exclude: Exclude, **options: Any) -> None:
        """What a constructor calls; `options`: those of the operators beside these."""
        owner = type(self).__name__
        num_classes = check_count(owner, "num_classes", num_classes, 1)
        shared = _bool(owner, "shared", shared, False)
        device = device_of_values(None)
        num_samples = check_count(owner, "num_samples", num_samples, 0)
        text = option_text(num_samples=num_samples, shared=shared, **options)
        with torch.device("cpu"):  # whose values the index is made from, also where the default device is meta
            classes = _ids(owner, "exclude", exclude, num_classes)
            self._make(num_classes, check_count(owner, "dim", dim, None), num_samples, shared,
                       _bool(owner, "distinct", options.get("distinct"), shared),
                       torch.empty(0, dtype=torch.int64) if classes is None else classes, text)
        self.to(device)

    def _make(self, num_classes: int, dim: int, num_samples: int, shared: bool, distinct: bool, excluded: Tensor, options: str) -> None:
        super().__init__(num_classes, num_samples, shared=shared, distinct=distinct)
        self.dim = dim
        self.options = options
        by_name = read_options(options)
        self._refresh_every, self._update_every = int(by_name["refresh_every"]), int(by_name.get("update_every", 0))
        self.follows_table = True
        if not (self.shared or self.distinct):
            self.default_estimator = "ranking"
        self.family, self.statistics = self._family, self._statistics  # scripted methods know attributes of the instance
        self._kind = f"{self._family}:{len(self._tables)}:"
        index = torch.ops.xsoftmax.adaptive_index(self.family, type(self).__name__, num_classes, dim, excluded.cpu(), options)
        for name, table in zip(self._tables, index):
            if name in self._learnt:
                self.register_parameter(name, nn.Parameter(table))
            else:
                self.register_buffer(name, table)

    def _index(self) -> List[Tensor]:
        """The tables, as operators take them."""
        raise NotImplementedError(f"{type(self).__name__} does not define _index")

    def _describe(self) -> str:
        return self._kind + self.options

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        return self._index()

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        if torch.jit.is_scripting():
            torch.ops.xsoftmax.adaptive_step_(self.family, weight, bias, self.step, self._index()[:-1], self.options, generator)
        else:
            self._interruptible_step(weight, bias, generator)

    @torch.jit.unused
    def _interruptible_step(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator]) -> None:
        check_generator(type(self).__name__, generator)
        _long_work.run("refresh", torch.ops.xsoftmax.adaptive_step_, self.family, weight, bias, self.step, self._index()[:-1], self.options, generator)

    @torch.jit.unused
    def _interruptible_refresh(self, weight: Tensor, bias: Optional[Tensor]) -> List[float]:
        return _long_work.run("refresh", torch.ops.xsoftmax.adaptive_refresh_, self.family, weight, bias, self.step, self._index()[:-1], self.options).tolist()

    @torch.jit.unused
    def refresh_due(self) -> bool:
        """Whether the next :meth:`prepare` follows the table anew.

        A table that costs much to make, such as all vectors of an item tower, need be made then only: between two refreshes ``prepare`` reads no row of it, but
        for the updates of :class:`MidxSampler`.
        """
        return torch.ops.xsoftmax.next_refresh_is_due(self.step, self._refresh_every)

    @torch.jit.unused
    def _host_counters(self) -> List[Tensor]:
        return [self.step]

    @torch.jit.unused
    def _host_numbers(self) -> List[Tensor]:
        return [self.recent]

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Follows the class table at once, whatever the schedule says.

        Args:
            weight: floating ``[N, D]``, the class table.
            bias: floating ``[N]`` where the sampler was made with bias=True, else None.

        Returns:
            The statistics that the class names, by name.

        Raises:
            ValueError, TypeError: as :class:`AdaptiveSampler`; nothing has changed then
        """
        if torch.jit.is_scripting():
            values: List[float] = torch.ops.xsoftmax.adaptive_refresh_(self.family, weight, bias, self.step, self._index()[:-1], self.options).tolist()
        else:
            values = self._interruptible_refresh(weight, bias)
        named: Dict[str, float] = {}
        for name, value in zip(self.statistics, values):
            named[name] = value
        return named

    @torch.jit.unused
    def plan_growth(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Optional[Callable[[], None]]:
        """Plans a growth by O(the new classes), averaged over many; for private independent draws, but not for :class:`ExactMidxSampler`.

        New classes are placed as by :meth:`plan_resize`. They are drawn evenly, each as if all classes were, until the index is next laid out: by a refresh, by
        an update, or here where a quarter as many classes as the index holds would have come. See :meth:`Sampler.plan_growth`.
        """
        gained = torch.ops.xsoftmax.adaptive_grow(self.family, type(self).__name__, num_classes, rows, bias, self._index(), self.options)

        def grow() -> None:
            *tables, recent, _ = self._index()
            torch.ops.xsoftmax.adaptive_grow_(recent, tables, gained, self.num_classes, num_classes)
            self.num_classes = num_classes

        return grow if gained else None

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Callable[[], None]:
        """Plans a resize: new classes are placed under the codewords, planes or directions that the index has.

        Without the rows of the new classes, and before the first refresh, all classes are drawn alike until the next step refreshes. All biases are taken in.
        It costs O(N), but reads no rows of a table other than the new ones (a kernel sampler sums up its copy). See :meth:`Sampler.plan_resize`.
        """
        index = torch.ops.xsoftmax.adaptive_resize(self.family, type(self).__name__, num_classes, rows, bias, self._index(), self.options)

        def resize() -> None:
            for name, table in zip(self._tables, index):
                if name not in self._learnt:
                    setattr(self, name, table)
            self.num_classes = num_classes

        return resize

    def _excluded(self) -> Tensor:
        return (getattr(self, self._places).view(self.num_classes, -1)[:, 0] < 0).nonzero().squeeze(1)

    def _like(self, excluded: Tensor) -> "AdaptiveSampler":
        other = type(self).__new__(type(self))
        other._make(self.num_classes, self.dim, self.num_samples, self.shared, self.distinct, excluded, self.options)
        return other.to(getattr(self, self._places).device)

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "AdaptiveSampler":
        excluded = self._excluded()
        return self._like(torch.cat([excluded, ids.to(excluded.device)]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        recent, step = self.recent, self.step  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.recent, self.step = recent, step  # which every step of training reads: they stay on the host
        return self

    @classmethod
    def for_table(cls, num_classes: int, *num_samples: int, dim: int, bias: bool, **options: Any) -> "AdaptiveSampler":
        return cls(num_classes, dim, *num_samples, bias=bias, **options)  # type: ignore[call-arg]  # the constructor is that of a subclass

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        tables = {name: getattr(self, name) for name in self._tables}
        saved = {name: state_dict[prefix + name] for name in tables if prefix + name in state_dict}
        if unusable := unusable_tables(type(self).__name__, prefix, saved):
            error_msgs.extend(unusable)
            return
        missing = [prefix + name for name, table in tables.items() if name not in saved and table.numel() > 0]
        fits = all(table.shape == tables[name].shape for name, table in saved.items())
        if missing or not fits:
            if fits and self._places in saved:  # a part of an index like this one, where one of another family shares a few names
                missing_keys.extend(missing)
            self.step.zero_()
            return
        before = self._excluded()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.recent, self.step = self.recent.cpu(), self.step.cpu()  # load_state_dict(assign=True) takes tensors as they are
        if not torch.equal(self._excluded(), before):
            fresh = self._like(before)
            with torch.no_grad():
                for name, table in tables.items():
                    table.copy_(getattr(fresh, name))

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, dim={self.dim}, " + self.options.replace(",", ", ")
