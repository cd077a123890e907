"""The base class of samplers: a module that proposes classes and gives the expected count of each."""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple, Type

import torch
from torch import Tensor

from .._lazy_gradient import PLAIN
from .._arguments import describe_argument
from .._checks import check_count, check_generator
from .._memory import fill_empty, moved_table
from .._typing import Module


class CandidateSet(NamedTuple):
    """Classes to score, and the expected count of each: how often the proposal that the set is part of would hold it on average.

    A candidate weighs ``1 / expected count`` in an estimate of a sum over all classes. A proposal is a list of such sets.
    """

    ids: Tensor
    """int64, ``[M]`` shared by the batch, or ``[Q, M]`` private to each query."""
    log_count: Tensor
    """float32, the shape of ``ids``, or ``[Q, M]`` for shared ids whose counts depend on the query: ``log(M q)`` of independent draws,
    ``log pi`` of distinct ones, pi the inclusion probability, 0 of a class that is always there; of a union the sum over all its sets. +inf:
    takes no part."""
    target_log_count: Optional[Tensor]
    """float32, the shape of ``target``: the targets' log expected count in this set alone, -inf where it cannot contain them. None: not
    computed, for estimators that do not need it."""
    distinct: bool
    """Whether no class stands twice in a set."""


def _check_sets(sets: Any) -> None:
    if isinstance(sets, CandidateSet) or not isinstance(sets, (list, tuple)):
        raise TypeError(f"expected a list of CandidateSet, as Sampler.sample returns it, got {type(sets).__name__} without a list")
    for part in sets:
        if not isinstance(part, CandidateSet):
            raise TypeError(f"expected a list of CandidateSet, as Sampler.sample returns it, got {type(part).__name__} in the list")


def columns_of(sets: List[CandidateSet]) -> Tuple[List[Tensor], List[Tensor], List[Optional[Tensor]], List[bool]]:
    """A proposal as operators take it: ids, log_count, target_log_count and distinct of all sets."""
    if not torch.jit.is_scripting():
        _check_sets(sets)
    target_log_count: List[Optional[Tensor]] = []
    for part in sets:
        target_log_count.append(part.target_log_count)
    return [part.ids for part in sets], [part.log_count for part in sets], target_log_count, [part.distinct for part in sets]


def draw_seed(queries: Tensor, generator: Optional[torch.Generator]) -> Tensor:
    """One int64 from the torch generator (the default one of ``queries``' device where None is given), 0-dim, on that device."""
    if not torch.jit.is_scripting():
        check_generator("sample", generator)
        if generator is not None and generator.device.type != queries.device.type:
            raise ValueError(f"sample: expected generator on the queries' device {queries.device}, "
                             f"got one on {generator.device}")
    return torch.randint(0, 9223372036854775807, [], dtype=torch.int64, device=queries.device, generator=generator)


def one_set(drawn: Tuple[Tensor, Tensor, Tensor], target: Optional[Tensor], distinct: bool) -> List[CandidateSet]:
    """What an operator that draws returned (ids, log_count, target_log_count) as a proposal; the counts of targets where there are any."""
    ids, log_count, target_log_count = drawn
    return [CandidateSet(ids, log_count, None if target is None else target_log_count, distinct)]


OF_BATCH = -1
"""The number of draws of a sampler that takes what the batch holds."""


def unusable_tables(owner: str, prefix: str, saved: Dict[str, Any], may_be_infinite: Iterable[str] = ()) -> List[str]:
    """Returns the messages of ``load_state_dict`` for tables of a state dict that are no tensors, or hold a NaN or an infinity."""
    messages = []
    for name, table in saved.items():
        if not isinstance(table, Tensor):
            messages.append(f'While copying the parameter named "{prefix}{name}", expected torch.Tensor or Tensor-like object from checkpoint '
                            f"but received {type(table)}")
        elif type(table) in PLAIN and table.is_floating_point() and table.numel() > 0 and not table.is_meta:  # no fake tensor
            bad = table.isnan() if name in may_be_infinite else table.isfinite().logical_not()
            if bad.any():
                messages.append(f"{owner}: expected {prefix}{name} with finite values, got {table[bad][0].item()}")
    return messages


class KeepsTables(Module):
    """Base of modules whose buffers are tables: what a loss is cast to changes no value of them, and a state dict without them leaves them as they are."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # model.half() casts every floating tensor, to_empty() drops its values. These stay: only their device moves.
        tables = {name: table for name, table in self._buffers.items() if table is not None}
        learnt = {name: table.detach() for name, table in self._parameters.items() if table is not None}
        super()._apply(fn, recurse)
        for name, table in tables.items():
            self._buffers[name] = moved_table(type(self).__name__, table, self._buffers[name])
        for name, table in learnt.items():
            parameter: Any = self._parameters[name]
            parameter.data = moved_table(type(self).__name__, table, parameter.detach())
            parameter.grad = None if parameter.grad is None else parameter.grad.to(table.dtype)
        return self

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        if any(prefix + name in state_dict for name in (*self._buffers, *self._parameters)):
            fill_empty(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # The index of another sampler, or none: a checkpoint's class table loads into any loss.
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(prefix)]
        if not any(prefix + name in state_dict for name in (*self._buffers, *self._parameters)):
            missing_keys[:] = [key for key in missing_keys if not key.startswith(prefix)]


class Sampler(KeepsTables):
    """Base of all samplers. A sampler that a user writes defines :meth:`sample` and :meth:`log_count`, and :meth:`prepare` where it follows the class table.

    Args:
        num_classes: N >= 1.
        num_samples: draws for the batch (``shared``) or for each query, at least 0; OF_BATCH where the batch decides.
        shared: one set for the batch, or one for each query.
        distinct: whether no class stands twice in a set.

    Attributes:
        has_distinct, has_independent: whether some of its sets are distinct, or independent draws: more than one kind only in a union.
        default_estimator: the estimator that suits its draws, which a loss takes where none is named.
        follows_table: it defines :meth:`prepare`, and goes with losses that have a class table alone.

    Shapes: queries [Q, D] and target int64 [Q] or [Q, T] give sets of ids int64 [M], or [Q, M] for each query; see :meth:`sample`.

    Raises:
        ValueError: num_classes or num_samples out of range.
        TypeError: num_classes or num_samples is not an int.
    """

    num_classes: int
    num_samples: int
    shared: bool
    distinct: bool
    default_estimator: str
    follows_table: bool

    def __init__(self, num_classes: int, num_samples: int, *, shared: bool = True, distinct: bool = False):
        super().__init__()
        name = type(self).__name__
        self.num_classes = check_count(name, "num_classes", num_classes, 1)
        self.num_samples = OF_BATCH if num_samples == OF_BATCH else check_count(name, "num_samples", num_samples, 0)
        self.shared = bool(shared)
        self.distinct = bool(distinct)
        self.has_distinct, self.has_independent = self.distinct, not self.distinct
        self.default_estimator = "sampled_softmax"
        self.follows_table = False
        self._owner = ""
        self._first_query = 0

    def sample(self, queries: Tensor, target: Optional[Tensor] = None, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """Draws once: what one step proposes.

        Args:
            queries: floating ``[Q, D]``, zeros where a query does not count.
            target: int64 ``[Q]`` in [0, N), -1 where a query does not count (it then changes nothing for the others); or ``[Q, T]``, several classes of each
                query, of which the first says whether it counts. Where it is given, the sets have the expected counts of these classes as well. None: all
                queries count.
            generator: on the queries' device. None: torch's default one, which ``torch.manual_seed`` governs. A sampler draws one int64 from it in each call.

        Returns:
            A list of :class:`CandidateSet`: one, or of a union one or more for each part.

        Raises:
            ValueError: queries or targets of another shape; a generator on another device.
            TypeError: queries of no floating dtype, where the sampler reads them; a target that is not int64.
            IndexError: a target is not in [0, N) and not -1 (checked on the CPU).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define sample")

    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        """The log expected count of any classes in what :meth:`sample` proposes.

        Args:
            queries: floating ``[Q, D]``.
            ids: int64 ``[S]`` or ``[Q, P]``, in [0, N).

        Returns:
            float32: of ``ids [S]`` ``[S]``, or ``[Q, S]`` where it depends on the query; of ``ids [Q, P]`` ``[Q, P]``. -inf for a class that is never drawn.

        Raises:
            ValueError: another shape; a sampler whose counts only a draw knows, such as one of distinct private draws.
            TypeError: ids are not int64.
            IndexError: an id is not in [0, N) (checked on the CPU).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define log_count")

    def _seed(self, queries: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        """Of one draw. Private draws of a part of a batch are those of the whole, in which the part's first query is number ``_first_query``."""
        seed = draw_seed(queries, generator)
        return seed if self.shared or self._first_query == 0 else torch.stack([seed, torch.full_like(seed, self._first_query)])

    @torch.jit.export
    def describe(self) -> str:
        """The sampler as operators take it, beside :meth:`state_tensors` (``csrc/samplers/sampler_kind.h``). Empty where it is written in Python: a loss then
        calls :meth:`sample` in each step.
        """
        return ""

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        """All tensors of the sampler, in the order that operators ask for."""
        tensors: List[Tensor] = []
        return tensors

    @torch.jit.unused
    def refresh_due(self) -> bool:
        """Whether the next :meth:`prepare` follows the class table anew."""
        return False

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        """Whether the next step does what no CUDA graph captures (make_graphed_step).

        A sampler that follows the table in a way unknown here may do so in any step.
        """
        return (self.follows_table and type(self).refresh_due is Sampler.refresh_due) or self.refresh_due()

    @torch.jit.unused
    def _host_counters(self) -> List[Tensor]:
        """Tensors on the CPU that each step adds to."""
        return []

    @torch.jit.unused
    def _host_numbers(self) -> List[Tensor]:
        """Tensors on the CPU whose values a step reads, and a CUDA graph would keep (make_graphed_step)."""
        return []

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        """Brings a sampler that follows the class table up to date when its time has come. A loss calls it before it draws in train(). A static sampler has
        nothing to do.

        Args:
            weight: ``[N, D]``, the class table.
            bias: ``[N]`` or None.
            generator: as in :meth:`sample`.
        """

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Follows the class table at once, whatever the schedule says. A static sampler has nothing to do.

        Args:
            weight: ``[N, D]``, the class table.
            bias: ``[N]`` or None.

        Returns:
            Statistics by name; none of a static sampler.
        """
        stats: Dict[str, float] = {}
        return stats

    @torch.jit.unused
    def resize(self, num_classes: int, rows: Optional[Tensor] = None, bias: Optional[Tensor] = None) -> None:
        """Draws from ``num_classes`` classes from now on. Classes past the end are gone and never drawn; new classes stand behind the others. A loss calls it
        (``resize_classes``). An error changes nothing.

        Args:
            num_classes: at least 1.
            rows: ``[A, D]``, the rows of the A new classes in the class table, for a sampler that follows the table. None: not known.
            bias: ``[num_classes]``, the biases of all classes, or None.

        Raises:
            ValueError: num_classes below 1, or too few classes for the distinct draws.
            TypeError: num_classes is not an int, or the sampler does not define ``plan_resize``.
        """
        num_classes = check_count(type(self).__name__, "num_classes", num_classes, 1)
        (self.plan_growth(num_classes, rows, bias) or self.plan_resize(num_classes, rows, bias))()

    @torch.jit.unused
    def plan_growth(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Optional[Callable[[], None]]:
        """Plans a :meth:`resize` to more classes that costs O(the new classes).

        Args:
            num_classes: the new number of classes.
            rows: ``[A, D]``, the rows of the A new classes, or None.
            bias: ``[A]``, the biases of the new classes alone, or None.

        Returns:
            A function that does the resize and cannot fail. None where only :meth:`plan_resize` does it, as by default in a sampler that follows the table.
        """
        return None if self.follows_table else self.plan_resize(num_classes, rows, bias)

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Callable[[], None]:
        """Plans a :meth:`resize`: checks all that can go wrong. A sampler of a user defines it where its number of classes may change, and sets
        ``num_classes`` in the function.

        Args:
            num_classes: the new number of classes.
            rows: ``[A, D]``, the rows of the A new classes, or None.
            bias: ``[num_classes]``, the biases of all classes, or None.

        Returns:
            A function that does the resize and cannot fail.

        Raises:
            TypeError: the sampler does not define it.
        """
        raise TypeError(f"{type(self).__name__}: expected a sampler that defines plan_resize, got one whose number of classes is fixed")

    @torch.jit.unused
    def forget(self, ids: Tensor) -> None:
        """Forgets what a sampler has counted of classes that stand for something else from now on, as :class:`xsoftmax.IdTable` says.

        Args:
            ids: int64 ``[R]`` in [0, N).
        """

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> Optional["Sampler"]:
        """A sampler like this one that does not draw the classes ``ids`` (int64 [E]) either. None where the sampler cannot leave classes out: beside a head
        the expected counts then add up.
        """
        return None

    @torch.jit.unused
    def _claim(self, owner: str) -> None:
        """A sampler belongs to one loss, whose steps it counts."""
        if self._owner:
            raise ValueError(f"{owner}: expected a sampler that no other module uses, got a "
                             f"{type(self).__name__} that belongs to a {self._owner}: make a "
                             "second one")
        self._owner = owner

    @classmethod
    def for_table(cls, num_classes: int, num_samples: int, *, dim: int, bias: bool, **options: Any) -> "Sampler":
        """Makes a sampler for a class table of width ``dim``, with or without a bias. A loss calls it where a sampler is named by a string. ``options``: the
        constructor's.
        """
        return cls(num_classes, num_samples, **options)


class DescribedSampler(Sampler):
    """Base of the samplers of the library, which are a description and its tensors: operators in C++ draw. A class of a user that derives from one of them and
    defines :meth:`sample`, :meth:`log_count` or :meth:`prepare` is written in Python.
    """

    def __init__(self, num_classes: int, num_samples: int, *, shared: bool = True, distinct: bool = False):
        super().__init__(num_classes, num_samples, shared=shared, distinct=distinct)
        library = __name__.rpartition(".")[0]
        self._is_users = any(not cls.__module__.startswith(library) and name in cls.__dict__
                             for cls in type(self).__mro__ for name in ("sample", "log_count", "prepare") if issubclass(cls, DescribedSampler))

    def _describe(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} does not define _describe")

    @torch.jit.export
    def describe(self) -> str:
        return "" if self._is_users else self._describe()

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        return self._draw(queries, target, generator)

    def _draw(self, queries: Tensor, target: Optional[Tensor], generator: Optional[torch.Generator]) -> List[CandidateSet]:
        if not torch.jit.is_scripting():
            check_generator("sample", generator)
        ids, log_count, of_target, distinct = torch.ops.xsoftmax.sampler_sample(queries, target, self.state_tensors(), self._describe(), generator,
                                                                                self.training, self._first_query)
        sets: List[CandidateSet] = []
        for k, one in enumerate(ids):
            known = target is not None and of_target[k].dim() == target.dim()
            sets.append(CandidateSet(one, log_count[k], of_target[k] if known else None, distinct[k]))
        return sets

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.xsoftmax.sampler_log_count(queries, ids, self.state_tensors(), self._describe())


_REGISTRY: Dict[str, Type[Sampler]] = {}


def register(name: str) -> Callable[[Type[Sampler]], Type[Sampler]]:
    """A class decorator that gives a sampler a name: from then on ``sampler=name`` of a loss makes one, by its :meth:`Sampler.for_table`.

    Raises:
        ValueError: a name that is taken.
        TypeError: a class that does not derive from :class:`Sampler`.
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
    """Returns the names of samplers, as messages list them."""
    return ", ".join(f'"{name}"' for name in sorted(_REGISTRY))


def make_sampler(name: str, num_classes: int, num_samples: Optional[int] = None, *, dim: int = 0, bias: bool = False, **options: Any) -> Sampler:
    """Makes a sampler by name.

    Args:
        name: "uniform", "log_uniform", "unigram" (needs ``counts=``), "in_batch", "midx", "midx_exact", "midx_spread", "midx_learnable", "lsh", "sphere",
            "rff", or one that :func:`register` was given.
        num_classes: N >= 1.
        num_samples: None: as many as the sampler draws by default. "uniform", "log_uniform" and "unigram" have no default; "in_batch" takes None alone.
        dim, bias: the width D of the class table, and whether it has a bias. Samplers that follow the table need dim.
        options: of the constructor: shared, distinct, exclude, ...

    Raises:
        ValueError: a name that is not known, num_samples where there is a default or none where there is not, and what the constructor refuses.
        TypeError: an option that the constructor does not have, or one of another type.
    """
    if name not in _REGISTRY:
        raise ValueError(f"make_sampler: expected one of {sampler_names()}, got {name!r}")
    count = () if num_samples is None else (num_samples,)
    return _REGISTRY[name].for_table(num_classes, *count, dim=dim, bias=bias, **options)


describe_argument("sampler", lambda: f"one of {sampler_names()}, a Sampler, or None where the candidates are "
                                     "head_classes or the negatives of each call")
