"""Base classes of samplers, and the registry of sampler names."""

from typing import Any, Callable, Dict, Iterable, List, Optional, Type

import torch
from torch import Tensor

from .._core.lazy_gradient import PLAIN
from .._core.arguments import describe_argument
from .._core.checks import check_count, check_generator
from .._core.memory import fill_empty, move_table
from .._core.typing import Module
from .candidate_set import CandidateSet


def draw_seed(queries: Tensor, generator: Optional[torch.Generator]) -> Tensor:
    """Draws one int64 seed from a generator, as a 0-dim tensor on the device of ``queries``.

    None: the default generator of that device.
    """
    if not torch.jit.is_scripting():
        check_generator("sample", generator)
        if generator is not None and generator.device.type != queries.device.type:
            raise ValueError(f"sample: expected generator on the queries' device {queries.device}, "
                             f"got one on {generator.device}")
    return torch.randint(0, 9223372036854775807, [], dtype=torch.int64, device=queries.device,
                         generator=generator)


OF_BATCH = -1
"""The ``num_samples`` of a sampler whose candidates come from the batch."""


def unusable_tables(owner: str, prefix: str, saved_tables: Dict[str, Any],
                    may_be_infinite: Iterable[str] = ()) -> List[str]:
    """Returns error messages of ``load_state_dict`` for tables of a state dict that are not
    tensors, or hold a NaN or an infinity."""
    messages = []
    for name, table in saved_tables.items():
        if not isinstance(table, Tensor):
            messages.append(
                f'While copying the parameter named "{prefix}{name}", expected torch.Tensor or '
                f"Tensor-like object from checkpoint but received {type(table)}")
        # Skips fake tensors, which have no values.
        elif type(table) in PLAIN and table.is_floating_point() and table.numel(
        ) > 0 and not table.is_meta:
            is_invalid = table.isnan() if name in may_be_infinite else table.isfinite().logical_not(
            )
            if is_invalid.any():
                messages.append(f"{owner}: expected {prefix}{name} with finite values, got "
                                f"{table[is_invalid][0].item()}")
    return messages


class TableBuffers(Module):
    """Base class of modules whose buffers are tables: casts of the parent module leave their values
    and dtypes unchanged, and so does loading a state dict without them."""
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # model.half() casts every floating tensor, and to_empty() drops values. Tables keep both:
        # only their device changes.
        tables = {name: table for name, table in self._buffers.items() if table is not None}
        parameters = {
            name: table.detach()
            for name, table in self._parameters.items() if table is not None
        }
        super()._apply(fn, recurse)
        for name, table in tables.items():
            self._buffers[name] = move_table(type(self).__name__, table, self._buffers[name])
        for name, table in parameters.items():
            parameter: Any = self._parameters[name]
            parameter.data = move_table(type(self).__name__, table, parameter.detach())
            parameter.grad = None if parameter.grad is None else parameter.grad.to(table.dtype)
        return self

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        if any(prefix + name in state_dict for name in (*self._buffers, *self._parameters)):
            fill_empty(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        # Accept the state of another sampler, or none, so that the class table of a checkpoint
        # loads into any loss.
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(prefix)]
        if not any(prefix + name in state_dict for name in (*self._buffers, *self._parameters)):
            missing_keys[:] = [key for key in missing_keys if not key.startswith(prefix)]


class Sampler(TableBuffers):
    """Base class of all samplers.

    A custom sampler defines :meth:`sample` and :meth:`log_count`, and :meth:`prepare` if it follows
    the class table.

    Args:
        num_classes: N >= 1.
        num_samples: samples for the batch (``shared``) or per query, at least 0; OF_BATCH if the
            batch determines them.
        shared: whether the batch shares one set, or each query has its own.
        distinct: whether a set is sampled without replacement.

    Attributes:
        has_distinct, has_independent: whether any of its sets is sampled without replacement, or
            with replacement. Both can be True only for a union.
        default_estimator: the estimator that a loss uses by default with this sampler: "ranking"
            for private samples with replacement, which are usually few, so that each has a large
            weight; else "sampled_softmax".
        follows_table: whether it defines :meth:`prepare`. Such a sampler requires a loss with a
            class table.

    Shapes: queries [Q, D] and target int64 [Q] or [Q, T] give sets of ids int64 [M], or [Q, M]
    private to each query; see :meth:`sample`.

    Raises:
        ValueError: num_classes or num_samples is out of range.
        TypeError: num_classes or num_samples is not an int.
    """

    num_classes: int
    num_samples: int
    shared: bool
    distinct: bool
    default_estimator: str
    follows_table: bool

    def __init__(self, num_classes: int, num_samples: int, *, shared: bool = True,
                 distinct: bool = False):
        super().__init__()
        name = type(self).__name__
        self.num_classes = check_count(name, "num_classes", num_classes, 1)
        self.num_samples = OF_BATCH if num_samples == OF_BATCH else check_count(
            name, "num_samples", num_samples, 0)
        self.shared = bool(shared)
        self.distinct = bool(distinct)
        self.has_distinct, self.has_independent = self.distinct, not self.distinct
        self.default_estimator = "sampled_softmax" if shared or distinct else "ranking"
        self.follows_table = False
        self._owner = ""
        self._first_query = 0

    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """Draws the candidate sets of one step.

        Args:
            queries: floating ``[Q, D]``, zeros where a query does not count.
            target: int64 ``[Q]`` in [0, N), with -1 where a query does not count; such queries do
                not affect the others. Or ``[Q, T]``, several classes per query, of which the first
                determines whether it counts. If given, the sets contain the expected counts of
                these classes. None: all queries count.
            generator: a generator on the device of the queries. None: torch's default generator,
                which ``torch.manual_seed`` seeds. Each call draws one int64 from it.

        Returns:
            A list of :class:`CandidateSet`: one, or one or more for each part of a union.

        Raises:
            ValueError: queries or targets have another shape, or the generator is on another
                device.
            TypeError: queries are not floating (if the sampler reads them), or targets are not
                int64.
            IndexError: a target is neither in [0, N) nor -1 (checked on the CPU only).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define sample")

    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Returns the log expected counts of arbitrary classes in the sets drawn by :meth:`sample`.

        Args:
            queries: floating ``[Q, D]``.
            ids: int64 ``[S]`` or ``[Q, P]``, in [0, N).

        Returns:
            float32, -inf for a class that is never drawn. For ``ids [S]``: ``[S]``, or ``[Q, S]``
            if counts depend on the query. For ``ids [Q, P]``: ``[Q, P]``.

        Raises:
            ValueError: a shape does not fit, or counts are only known for what was drawn, as for
                private sets without replacement.
            TypeError: ids are not int64.
            IndexError: an id is not in [0, N) (checked on the CPU only).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define log_count")

    def _seed(self, queries: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        """Draws the seed of one call.

        A part of a batch gets the same private samples as in the whole batch, where its first query
        has the index ``_first_query``.
        """
        seed = draw_seed(queries, generator)
        return seed if self.shared or self._first_query == 0 else torch.stack(
            [seed, torch.full_like(seed, self._first_query)])

    @torch.jit.export
    def describe(self) -> str:
        """Returns the description of the sampler that operators take together with
        :meth:`state_tensors` (``csrc/proposal/sampler_kind.h``).

        It is empty for a sampler written in Python; a loss then calls :meth:`sample` in each step.
        """
        return ""

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        """Returns all tensors of the sampler, in the order in which operators take them."""
        tensors: List[Tensor] = []
        return tensors

    @torch.jit.unused
    def refresh_due(self) -> bool:
        """Returns whether the next :meth:`prepare` refreshes the sampler from the class table."""
        return False

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        """Returns whether the next step cannot be captured in a CUDA graph (make_graphed_step).

        This is always True for a custom sampler that follows the table without defining
        :meth:`refresh_due`, since it may refresh in any step.
        """
        return (self.follows_table
                and type(self).refresh_due is Sampler.refresh_due) or self.refresh_due()

    @torch.jit.unused
    def _host_counters(self) -> List[Tensor]:
        """Returns the CPU tensors that each step increments."""
        return []

    @torch.jit.unused
    def _host_numbers(self) -> List[Tensor]:
        """Returns the CPU tensors whose values a step reads, which a CUDA graph would freeze
        (make_graphed_step)."""
        return []

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor],
                generator: Optional[torch.Generator] = None) -> None:
        """Refreshes or updates a sampler that follows the class table, if its schedule says so.

        A loss calls it before it draws in train(). A static sampler does nothing.

        Args:
            weight: ``[N, D]``, the class table.
            bias: ``[N]`` or None.
            generator: as in :meth:`sample`.
        """

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Refreshes the sampler from the class table immediately, regardless of its schedule. A
        static sampler does nothing.

        Args:
            weight: ``[N, D]``, the class table.
            bias: ``[N]`` or None.

        Returns:
            Statistics by name; empty for a static sampler.
        """
        stats: Dict[str, float] = {}
        return stats

    @torch.jit.unused
    def resize(self, num_classes: int, rows: Optional[Tensor] = None,
               bias: Optional[Tensor] = None) -> None:
        """Changes the number of classes to draw from.

        Removed classes are never drawn; new classes are appended. ``resize_classes`` of a loss
        calls it. An error changes nothing.

        Args:
            num_classes: at least 1.
            rows: ``[A, D]``, the rows of the A new classes in the class table, for a sampler that
                follows the table. None: not known.
            bias: ``[num_classes]``, the biases of all classes, or None.

        Raises:
            ValueError: num_classes is below 1, or below the number of samples without replacement.
            TypeError: num_classes is not an int, or the sampler does not define ``plan_resize``.
        """
        num_classes = check_count(type(self).__name__, "num_classes", num_classes, 1)
        (self.plan_growth(num_classes, rows, bias) or self.plan_resize(num_classes, rows, bias))()

    @torch.jit.unused
    def plan_growth(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Optional[Callable[[], None]]:
        """Returns a function that grows the sampler in O(new classes), for :meth:`resize`.

        Args:
            num_classes: the new number of classes.
            rows: ``[A, D]``, the rows of the A new classes, or None.
            bias: ``[A]``, the biases of the new classes only, or None.

        Returns:
            A function that does the resize and cannot fail. None if only :meth:`plan_resize` can do
            it, which is the default for a sampler that follows the table.
        """
        return None if self.follows_table else self.plan_resize(num_classes, rows, bias)

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Callable[[], None]:
        """Checks everything that can fail in a :meth:`resize`, and returns a function that does it.

        Override in custom samplers that support resizing. The returned function must set
        ``num_classes``.

        Args:
            num_classes: the new number of classes.
            rows: ``[A, D]``, the rows of the A new classes, or None.
            bias: ``[num_classes]``, the biases of all classes, or None.

        Returns:
            A function that does the resize and cannot fail.

        Raises:
            TypeError: the sampler does not support resizing.
        """
        raise TypeError(f"{type(self).__name__}: expected a sampler that defines plan_resize, got "
                        "one whose number of classes is fixed")

    @torch.jit.unused
    def forget(self, ids: Tensor) -> None:
        """Discards the counts of classes that are reused for other items, as by
        :class:`xsoftmax.IdTable`.

        Args:
            ids: int64 ``[R]`` in [0, N).
        """

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> Optional["Sampler"]:
        """Returns a copy of the sampler that also excludes the classes ``ids``, int64 [E].

        Returns:
            The sampler, or None if it cannot exclude classes; the expected counts of head classes
            and samples then add up.
        """
        return None

    @torch.jit.unused
    def _claim(self, owner: str) -> None:
        """Marks the sampler as used by a loss. A sampler counts the steps of one loss only."""
        if self._owner:
            raise ValueError(f"{owner}: expected a sampler that no other module uses, got a "
                             f"{type(self).__name__} that belongs to a {self._owner}: make a "
                             "second one")
        self._owner = owner

    @classmethod
    def for_table(cls, num_classes: int, num_samples: int, *, dim: int, bias: bool,
                  **options: Any) -> "Sampler":
        """Creates a sampler for a class table of width ``dim``, with or without a bias.

        A loss calls it for a sampler given by name. ``options`` are passed to the constructor.
        """
        return cls(num_classes, num_samples, **options)


class DescribedSampler(Sampler):
    """Base class of built-in samplers, which consist of a description and tensors; C++ operators
    draw from them.

    A user's subclass that overrides :meth:`sample`, :meth:`log_count` or :meth:`prepare` is treated
    as written in Python.
    """
    def __init__(self, num_classes: int, num_samples: int, *, shared: bool = True,
                 distinct: bool = False):
        super().__init__(num_classes, num_samples, shared=shared, distinct=distinct)
        library = __name__.rpartition(".")[0]
        self._is_overridden = any(not cls.__module__.startswith(library) and name in cls.__dict__
                                  for cls in type(self).__mro__
                                  for name in ("sample", "log_count", "prepare")
                                  if issubclass(cls, DescribedSampler))

    def _describe(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} does not define _describe")

    @torch.jit.export
    def describe(self) -> str:
        return "" if self._is_overridden else self._describe()

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        return self._draw(queries, target, generator)

    def _draw(self, queries: Tensor, target: Optional[Tensor],
              generator: Optional[torch.Generator]) -> List[CandidateSet]:
        if not torch.jit.is_scripting():
            check_generator("sample", generator)
        ids, log_count, target_log_count, distinct = torch.ops.xsoftmax.sampler_sample(
            queries, target, self.state_tensors(), self._describe(), generator, self.training,
            self._first_query)
        sets: List[CandidateSet] = []
        for k, part_ids in enumerate(ids):
            has_target = target is not None and target_log_count[k].dim() == target.dim()
            sets.append(
                CandidateSet(part_ids, log_count[k], target_log_count[k] if has_target else None,
                             distinct[k]))
        return sets

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.xsoftmax.sampler_log_count(queries, ids, self.state_tensors(),
                                                    self._describe())


_REGISTRY: Dict[str, Type[Sampler]] = {}


def register(name: str) -> Callable[[Type[Sampler]], Type[Sampler]]:
    """Class decorator that registers a sampler under a name, so that ``sampler=name`` of a loss
    creates one by :meth:`Sampler.for_table`.

    Raises:
        ValueError: the name is taken.
        TypeError: the class does not derive from :class:`Sampler`.
    """
    def add(cls: Type[Sampler]) -> Type[Sampler]:
        if not (isinstance(cls, type) and issubclass(cls, Sampler)):
            raise TypeError(f"register: expected a class that derives from Sampler, got {cls!r}")
        if name in _REGISTRY:
            raise ValueError(f"register: expected a name that is not taken, got {name!r}")
        _REGISTRY[name] = cls
        return cls

    return add


def sampler_names() -> str:
    """Returns the registered names, formatted for error messages."""
    return ", ".join(f'"{name}"' for name in sorted(_REGISTRY))


def make_sampler(name: str, num_classes: int, num_samples: Optional[int] = None, *, dim: int = 0,
                 bias: bool = False, **options: Any) -> Sampler:
    """Creates a sampler by name.

    Args:
        name: "uniform", "log_uniform", "unigram" (requires ``counts=``), "in_batch", "midx",
            "midx_exact", "midx_spread", "midx_learnable", "lsh", "sphere", "rff", or a name
            registered with :func:`register`.
        num_classes: N >= 1.
        num_samples: None: the default of the sampler. "uniform", "log_uniform" and "unigram" have
            no default; "in_batch" only takes None.
        dim: the width D of the class table; required by samplers that follow the table.
        bias: whether the class table has a bias.
        options: options of the constructor, such as shared, distinct and exclude.

    Raises:
        ValueError: the name is unknown, num_samples is missing or not allowed, or the constructor
            raises it.
        TypeError: the constructor does not have an option, or an option has another type.
    """
    if name not in _REGISTRY:
        raise ValueError(f"make_sampler: expected one of {sampler_names()}, got {name!r}")
    count = () if num_samples is None else (num_samples,)
    return _REGISTRY[name].for_table(num_classes, *count, dim=dim, bias=bias, **options)


describe_argument(
    "sampler", lambda: f"one of {sampler_names()}, a Sampler, or None where the "
    "candidates are "
    "head_classes or the negatives of each call")
