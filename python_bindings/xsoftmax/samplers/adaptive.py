"""Base class of samplers that follow the class table."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .._core import long_work
from .._core.checks import check_count, check_generator
from .._core.memory import device_of_values
from .._core.options import option_text, read_options
from .sampler import DescribedSampler, unusable_tables
from .static import Exclude, _check_option, _read_ids


class AdaptiveSampler(DescribedSampler):
    """Base class of samplers whose distribution q follows the class table through an index, which a
    loss keeps up to date in train().

    Expected counts are exact for what is drawn, also while the table moves on, because they are
    computed from the same index. ``prepare`` refreshes the index before step 0, then at growing
    intervals up to step ``refresh_every``, and then at its multiples. Before the first refresh, all
    classes are drawn uniformly.

    The index is part of the state dict. If it is missing from a checkpoint, or belongs to other
    options or another head, it is rebuilt: ``step`` is reset to 0. If it is incomplete,
    ``load_state_dict`` reports the missing keys (except tables without elements, which are not
    needed), and with strict=False it is rebuilt. An index with a NaN or an infinity is refused.
    ``step``, and ``recent``, the number of classes added since the index was last rebuilt
    (:meth:`plan_growth`), stay on the CPU when the sampler moves, so that a training step never
    synchronises with the device to find out whether a refresh is due.

    Args:
        num_classes: N >= 1.
        dim: D >= 1, the width of a query.
        num_samples: samples per query, or for the batch if ``shared``; at least 0.
        bias: whether the class table has a bias.
        shared: whether the batch shares one set, if the sampler supports it.
        exclude: classes never drawn: an int h for the ids below h, or an int64 tensor [E] of ids.
        refresh_every: steps between two refreshes; 0: never again after step 0.

    Shapes and dtypes: queries floating [Q, D]; weight floating [N, D] and bias [N]; ids int64 [Q,
    M], or [M] if shared; log counts float32 of that shape, or [Q, M]; see :class:`CandidateSet`.

    Raises:
        ValueError: an option is out of range, or ``exclude`` leaves no class. In :meth:`prepare`
            and :meth:`refresh`: the table has another shape, its bias does not match the option
            ``bias``, or it has a NaN or an infinity; index, step and generator are then unchanged.
        TypeError: an option has another type; queries or the table are not floating; targets or ids
            are not int64.
        IndexError: an excluded class, a target or an id is not in [0, N) (checked on the CPU only).
    """

    _family = ""  # prefix of its operators (csrc/proposal/adaptive.h)
    _tables: Tuple[str, ...] = ("recent", "step")  # tables, in the order of the operators
    _parameter_names: Tuple[str, ...] = ()  # tables that are parameters
    _places = ""  # table with a row per class, negative for excluded classes
    _statistics: List[str] = []  # names of the statistics that a refresh returns

    family: str
    statistics: List[str]

    def _begin(self, num_classes: int, dim: int, num_samples: int, shared: Optional[bool],
               exclude: Exclude, **options: Any) -> None:
        """Initialises the sampler; called by constructors. `options` are further options of the
        operators."""
        owner = type(self).__name__
        num_classes = check_count(owner, "num_classes", num_classes, 1)
        shared = _check_option(owner, "shared", shared, False)
        device = device_of_values(None)
        num_samples = check_count(owner, "num_samples", num_samples, 0)
        text = option_text(num_samples=num_samples, shared=shared, **options)
        # The index is built from these values, so they must not be on a default device of meta.
        with torch.device("cpu"):
            classes = _read_ids(owner, "exclude", exclude, num_classes)
            self._make(num_classes, check_count(owner, "dim", dim, None), num_samples, shared,
                       _check_option(owner, "distinct", options.get("distinct"), shared),
                       torch.empty(0, dtype=torch.int64) if classes is None else classes, text)
        self.to(device)

    def _make(self, num_classes: int, dim: int, num_samples: int, shared: bool, distinct: bool,
              excluded_ids: Tensor, options: str) -> None:
        super().__init__(num_classes, num_samples, shared=shared, distinct=distinct)
        self.dim = dim
        self.options = options
        values = read_options(options)
        self._refresh_every, self._update_every = int(values["refresh_every"]), int(
            values.get("update_every", 0))
        self.follows_table = True
        # TorchScript only sees attributes of the instance.
        self.family, self.statistics = self._family, self._statistics
        self._kind = f"{self._family}:{len(self._tables)}:"
        index = torch.ops.xsoftmax.adaptive_index(self.family,
                                                  type(self).__name__, num_classes, dim,
                                                  excluded_ids.cpu(), options)
        for name, table in zip(self._tables, index):
            if name in self._parameter_names:
                self.register_parameter(name, nn.Parameter(table))
            else:
                self.register_buffer(name, table)

    def _index(self) -> List[Tensor]:
        """Returns the tables in the order in which operators take them."""
        raise NotImplementedError(f"{type(self).__name__} does not define _index")

    def _describe(self) -> str:
        return self._kind + self.options

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        return self._index()

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor],
                generator: Optional[torch.Generator] = None) -> None:
        if torch.jit.is_scripting():
            torch.ops.xsoftmax.adaptive_step_(self.family, weight, bias, self.step,
                                              self._index()[:-1], self.options, generator)
        else:
            self._interruptible_step(weight, bias, generator)

    @torch.jit.unused
    def _interruptible_step(self, weight: Tensor, bias: Optional[Tensor],
                            generator: Optional[torch.Generator]) -> None:
        check_generator(type(self).__name__, generator)
        long_work.run("refresh", torch.ops.xsoftmax.adaptive_step_, self.family, weight, bias,
                      self.step,
                      self._index()[:-1], self.options, generator)

    @torch.jit.unused
    def _interruptible_refresh(self, weight: Tensor, bias: Optional[Tensor]) -> List[float]:
        return long_work.run("refresh", torch.ops.xsoftmax.adaptive_refresh_, self.family, weight,
                             bias, self.step,
                             self._index()[:-1], self.options).tolist()

    @torch.jit.unused
    def refresh_due(self) -> bool:
        """Returns whether the next :meth:`prepare` refreshes the index.

        A table that is expensive to compute, such as all vectors of an item tower, is needed only
        then: between two refreshes ``prepare`` reads no row of it, except for the updates of
        :class:`MidxSampler`.
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
        """Rebuilds the index from the class table immediately, regardless of the schedule.

        Args:
            weight: floating ``[N, D]``, the class table.
            bias: floating ``[N]`` if the sampler was constructed with bias=True, else None.

        Returns:
            The statistics of the class, by name.

        Raises:
            ValueError, TypeError: same as :class:`AdaptiveSampler`. An error changes nothing.
        """
        if torch.jit.is_scripting():
            values: List[float] = torch.ops.xsoftmax.adaptive_refresh_(
                self.family, weight, bias, self.step,
                self._index()[:-1], self.options).tolist()
        else:
            values = self._interruptible_refresh(weight, bias)
        statistics: Dict[str, float] = {}
        for name, value in zip(self.statistics, values):
            statistics[name] = value
        return statistics

    @torch.jit.unused
    def plan_growth(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Optional[Callable[[], None]]:
        """Plans a growth in O(new classes), amortised. Supported for private samples with
        replacement, except in :class:`ExactMidxSampler`.

        New classes are added to the index as by :meth:`plan_resize`. Until the index is next
        rebuilt, each is drawn with the probability that it has under a uniform distribution. The
        next refresh or update rebuilds the index, and so does this method when the number of new
        classes reaches a quarter of those in the index. See :meth:`Sampler.plan_growth`.
        """
        new_tables = torch.ops.xsoftmax.adaptive_grow(self.family,
                                                      type(self).__name__, num_classes, rows, bias,
                                                      self._index(), self.options)

        def grow() -> None:
            *tables, recent, _ = self._index()
            torch.ops.xsoftmax.adaptive_grow_(recent, tables, new_tables, self.num_classes,
                                              num_classes)
            self.num_classes = num_classes

        return grow if new_tables else None

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Callable[[], None]:
        """Plans a resize that assigns new classes to the existing codewords, planes or directions
        of the index.

        Without the rows of the new classes, and before the first refresh, all classes are drawn
        uniformly until the next step, which refreshes the index. All biases are updated. The cost
        is O(N), but only new rows of the table are read (a kernel sampler sums its copy of the
        table again). See :meth:`Sampler.plan_resize`.
        """
        index = torch.ops.xsoftmax.adaptive_resize(self.family,
                                                   type(self).__name__, num_classes, rows, bias,
                                                   self._index(), self.options)

        def resize() -> None:
            for name, table in zip(self._tables, index):
                if name not in self._parameter_names:
                    setattr(self, name, table)
            self.num_classes = num_classes

        return resize

    def _find_excluded(self) -> Tensor:
        return (getattr(self, self._places).view(self.num_classes, -1)[:, 0]
                < 0).nonzero().squeeze(1)

    def _make_like(self, excluded_ids: Tensor) -> "AdaptiveSampler":
        sampler = type(self).__new__(type(self))
        sampler._make(self.num_classes, self.dim, self.num_samples, self.shared, self.distinct,
                      excluded_ids, self.options)
        return sampler.to(getattr(self, self._places).device)

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "AdaptiveSampler":
        excluded_ids = self._find_excluded()
        return self._make_like(torch.cat([excluded_ids, ids.to(excluded_ids.device)]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        recent, step = self.recent, self.step  # type: ignore[has-type]
        super()._apply(fn, recurse)
        # Every training step reads them, so they stay on the host.
        self.recent, self.step = recent, step
        return self

    @classmethod
    def for_table(cls, num_classes: int, *num_samples: int, dim: int, bias: bool,
                  **options: Any) -> "AdaptiveSampler":
        return cls(num_classes, dim, *num_samples, bias=bias,
                   **options)  # type: ignore[call-arg]  # a subclass's constructor

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        tables = {name: getattr(self, name) for name in self._tables}
        saved_tables = {
            name: state_dict[prefix + name]
            for name in tables if prefix + name in state_dict
        }
        if messages := unusable_tables(type(self).__name__, prefix, saved_tables):
            error_msgs.extend(messages)
            return
        missing_names = [
            prefix + name
            for name, table in tables.items() if name not in saved_tables and table.numel() > 0
        ]
        fits = all(table.shape == tables[name].shape for name, table in saved_tables.items())
        if missing_names or not fits:
            # Report missing keys only for the same family: others share a few names.
            if fits and self._places in saved_tables:
                missing_keys.extend(missing_names)
            self.step.zero_()
            return
        excluded_ids = self._find_excluded()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        # load_state_dict(assign=True) may have placed them on a device.
        self.recent, self.step = self.recent.cpu(), self.step.cpu()
        if not torch.equal(self._find_excluded(), excluded_ids):
            sampler = self._make_like(excluded_ids)
            with torch.no_grad():
                for name, table in tables.items():
                    table.copy_(getattr(sampler, name))

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, dim={self.dim}, " + self.options.replace(",", ", ")
