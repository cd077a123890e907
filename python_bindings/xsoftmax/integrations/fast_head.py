"""Generation that reads only a part of the head of a Transformers model."""

import functools
import math
import threading
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin, logits_process

from .._core.checks import check_count
from .._core.options import logit_options, option_text
from ..retrieval import SearchIndex
from .heads import find_bias, read_transform
from .logits import UnsupportedHeadError

# Processors that remove the tokens that end a text.
_REMOVE_ENDS = (logits_process.MinLengthLogitsProcessor,
                logits_process.MinNewTokensLengthLogitsProcessor)
_SHORT = (torch.bfloat16, torch.float16)
_MARGIN, _SHORT_MARGIN = 1, 8  # extra tokens that show ties; 16-bit logits are often equal
_STATES = 512  # hidden states after which the index is built again for them
_NUCLEUS = 256  # tokens among which a sample is proved to be in top_p
_LARGEST = 2.0**100  # that a search index allows


class _Call:
    """A call of ``generate`` whose tokens can be searched.

    Attributes:
        wanted, depth: the numbers of best tokens that a step needs, and searches for.
        temperature, top_p: of a sample from all tokens; wanted is then 0.
        transform: what the model does to the logits, as options of ``transform_logits``, if
            :meth:`FastHead.check` found that it does.
        is_checked: whether :meth:`FastHead.check` was called; all tokens are scored until then.
        first_logits: the last logits before the check.
    """
    def __init__(self, wanted: int, depth: int, temperature: float = 1.0,
                 top_p: float = 1.0) -> None:
        self.wanted, self.depth, self.is_checked = wanted, depth, False
        self.temperature, self.top_p = temperature, top_p
        self.transform = ""
        self.first_logits: Optional[Tensor] = None


class FastHead:
    """The head of a model during :func:`fast_head`.

    Attributes:
        k: the largest ``top_k`` of sampling that is read from the index.
        fast_steps, dense_steps: the numbers of hidden states, one per sequence and step, whose
            tokens came from the index, and for which all tokens were scored. The latter include the
            prompt's where the model scores all of its positions, and those of calls outside of
            ``generate``, but not those of a compiled model.
        cells_read: the number of cells of the index that the fast steps read, out of
            ``fast_steps * num_cells``.
        num_cells: the number of cells of the index.
    """
    def __init__(self, linear: nn.Linear, k: int, transform: str) -> None:
        self.linear, self.k, self.transform = linear, k, transform
        self.fast_steps = self.dense_steps = self.cells_read = self.num_cells = 0
        self._calls: Dict[int, _Call] = {}  # by thread
        self._index: Optional[SearchIndex] = None
        self._sums: Optional[List[Tensor]] = None  # of the table, when it was last compared
        self._is_moderate = True
        self._states: List[Tensor] = []  # the first hidden states since the index was built
        self._num_states = 0
        self._lock = threading.RLock()  # of the index, the states and the counts

    def __getstate__(self) -> Dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()

    def index(self) -> SearchIndex:
        """Returns the index of the current weights; builds it if they have changed, and a second
        time for the first hidden states that were searched."""
        weight, bias = self.linear.weight, self.linear.bias
        with self._lock:
            if self._index is None or not self._index._is_current(weight, bias):
                self._sums = _sums_of(self.linear)
                self._index, self._states, self._num_states = SearchIndex(weight, bias), [], 0
            elif self._states and self._num_states >= _STATES:
                states, self._states = torch.cat(self._states), []
                self._index = SearchIndex(weight, bias, queries=states)
            self.num_cells = self._index.num_cells
            return self._index

    def _is_searchable(self) -> bool:
        """Returns whether an index can be built: all weights are finite and not huge. Notices
        writes that PyTorch does not count, such as those through ``.data``."""
        sums = _sums_of(self.linear)
        with self._lock:
            if self._sums is None or not all(map(torch.equal, sums, self._sums)):
                self._index, self._sums = None, sums
                self._is_moderate = all(
                    bool((part.abs() < _LARGEST).all())
                    for part in (self.linear.weight, self.linear.bias) if part is not None)
            return self._is_moderate

    def _is_cast(self) -> bool:
        """Returns whether autocast rounds the weights to other values than those of the index."""
        device = self.linear.weight.device.type
        return torch.is_autocast_enabled(device) and (torch.get_autocast_dtype(device)
                                                      != self.linear.weight.dtype)

    def _count(self, fast: int, dense: int, cells: int = 0) -> None:
        with self._lock:
            self.fast_steps += fast
            self.dense_steps += dense
            self.cells_read += cells

    def _keep_states(self, queries: Tensor) -> None:
        with self._lock:
            if self._num_states < _STATES:
                self._states.append(queries.detach().clone())
                self._num_states += len(queries)

    def answer(self, hidden: Tensor, score_all: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the logits [*, N] of hidden states [*, D]: -inf except for the best tokens, or,
        if a step needs the others too, all of them by ``score_all``."""
        if torch.compiler.is_compiling():
            return score_all(hidden)
        call = self._calls.get(threading.get_ident())
        queries = hidden.reshape(-1, hidden.shape[-1])
        found = None if call is None else self._search(call, hidden, queries)
        if found is not None:
            return found.reshape(*hidden.shape[:-1], -1)
        self._count(0, len(queries))
        logits = score_all(hidden)
        if call is not None and not call.is_checked:
            call.first_logits = logits.detach()
        return logits

    def _search(self, call: _Call, hidden: Tensor, queries: Tensor) -> Optional[Tensor]:
        """Returns the logits [Q, N] of the best tokens, or None if the step needs others too."""
        is_step = hidden.dim() < 3 or hidden.shape[-2] == 1
        if not call.is_checked or call.depth >= self.linear.out_features or not is_step or (
                torch.is_grad_enabled() and hidden.requires_grad) or self._is_cast():
            return None
        if call.wanted == 0:
            # Noise for all tokens is cheaper than their scores for few queries, or long ones.
            is_cheaper = len(queries) * 64 <= queries.shape[1] or queries.shape[1] >= 1024
            return self._sample(call, queries) if is_cheaper else None
        found = self.index().search(queries, call.depth, None, None)
        if not found.certified.all():  # a hidden state that is not finite
            return None
        self._keep_states(queries)
        # Multiplied again as the head does, for the same rounding.
        ids = found.ids[0] if len(queries) == 1 else found.ids.unique()
        bias = None if self.linear.bias is None else self.linear.bias.index_select(0, ids)
        scores = nn.functional.linear(queries, self.linear.weight.index_select(0, ids), bias)
        if call.depth > call.wanted:  # another token may equal the last one that is needed
            best = torch.ops.xsoftmax.transform_logits(
                scores.topk(call.depth, sorted=True).values, call.transform)
            last, next_one = best[:, call.wanted - 1], best[:, -1]
            # The model may compute a scale and a cap in another order.
            rounding = 8 * torch.finfo(best.dtype).eps if call.transform else 0.0
            if (next_one >= last - rounding * last.abs()).any():
                return None
        self._count(len(queries), 0, int(found.cells_read.sum()))
        logits = scores.new_full((len(queries), self.linear.out_features), -torch.inf)
        return logits.index_copy_(1, ids, scores)

    def _sample(self, call: _Call, queries: Tensor) -> Optional[Tensor]:
        """Returns logits [Q, N] that are -inf except for the token that torch.multinomial will
        draw, or None if a token may be outside of top_p.

        torch.multinomial divides the probabilities by exponential noise, and takes the largest.
        With the same noise, that token has the largest sum of its logit and Gumbel noise.
        """
        # The noise of several calls would be the same, and they would depend on each other.
        if len(self._calls) > 1:
            return None
        index = self.index()
        generator = torch.Generator("cpu")
        generator.set_state(torch.get_rng_state())
        noise = torch.empty(len(queries), self.linear.out_features, dtype=torch.float32,
                            device="cpu")
        noise.exponential_(generator=generator).log_().mul_(-call.temperature)
        ids, cells_read, certified = torch.ops.xsoftmax.perturbed_argmax(
            queries, index.weight, index.bias, index.tensors, noise)
        if not certified.all():
            return None
        self._keep_states(queries)
        if call.top_p < 1 and not self._are_in_nucleus(call, queries, ids):
            return None
        self._count(len(queries), 0, int(cells_read.sum()))
        logits = queries.new_full(noise.shape, -torch.inf)
        return logits.scatter_(1, ids[:, None], 0.0)

    def _are_in_nucleus(self, call: _Call, queries: Tensor, ids: Tensor) -> bool:
        """Returns whether the tokens that score higher than each of these have a probability below
        top_p together. Probabilities are relative to the sum over the best _NUCLEUS tokens, which
        the sum over all tokens is not below."""
        found = self.index().search(queries, min(_NUCLEUS, self.linear.out_features), None, None)
        prob = (found.scores.double() / call.temperature).softmax(1)
        is_token = found.ids == ids[:, None]
        better = (prob.cumsum(1) - prob).masked_fill(~is_token, 0).sum(1)
        margin = 1e-5  # the model sums in float32
        return bool((is_token.any(1) & (better < call.top_p - margin)).all())

    def check(self, scores: Tensor) -> None:
        """Compares the first logits of a call with those that the model returned, [Q, N]. A model
        may scale or cap its logits, as its configuration says. If it changes them in another way,
        all tokens are scored; for a sample from all tokens, and in 16 bits, where capped values are
        equal more often, also if it changes them at all."""
        call = self._calls.get(threading.get_ident())
        if call is None or call.is_checked or call.first_logits is None:
            return
        logits, call.first_logits, call.is_checked = call.first_logits, None, True
        logits = (logits[:, -1] if logits.dim() == 3 else logits).to(scores.device, scores.dtype)
        if scores.shape == logits.shape:
            if torch.equal(scores, logits):
                return
            if self.transform and call.wanted > 0 and self.linear.weight.dtype not in _SHORT and (
                    torch.allclose(scores,
                                   torch.ops.xsoftmax.transform_logits(logits, self.transform))):
                # Scaled or capped, different logits may be equal.
                call.transform = self.transform
                call.depth = max(call.depth, call.wanted + _MARGIN)
                return
        self.end_call()
        warnings.warn(
            "fast_head: the model changes the logits after its head in a way that may change "
            "the best tokens, so all tokens are scored", stacklevel=2)

    def begin_call(self, config: Any, processors: List[Any]) -> None:
        """Begins a call of ``generate`` on this thread, if its tokens can be searched."""
        self.end_call()
        has_scores = config.return_dict_in_generate and (config.output_scores
                                                         or config.output_logits)
        if (config.num_beams or 1) > 1 or has_scores:
            return
        call = self._plan(config, processors)
        if call is not None and self._is_searchable():
            self._calls[threading.get_ident()] = call

    def _plan(self, config: Any, processors: List[Any]) -> Optional[_Call]:
        """Returns a call whose tokens can be searched, or None if steps need all scores."""
        is_short = self.linear.weight.dtype in _SHORT
        wanted, temperature, top_p, has_ends = 1, 1.0, 1.0, False
        for processor in processors:
            kind = type(processor)
            if getattr(processor, "filter_value", -math.inf) != -math.inf:
                return None  # tokens that it removes may still be drawn
            if kind is logits_process.TopKLogitsWarper and top_p == 1:
                # Processors that follow see the same -inf as with all logits.
                wanted += processor.top_k - 1
                margin = _SHORT_MARGIN if is_short else _MARGIN
                return _Call(wanted, wanted + margin) if processor.top_k <= self.k else None
            if kind in _REMOVE_ENDS:
                wanted += processor.eos_token_id.numel()
                has_ends = True
            elif kind is logits_process.TemperatureLogitsWarper and top_p == 1:
                temperature *= processor.temperature
            elif kind is logits_process.TopPLogitsWarper and top_p == 1:
                top_p = processor.top_p
            else:
                return None
        if not config.do_sample:
            return _Call(wanted, wanted + (_SHORT_MARGIN if is_short else 0))
        # A sample from all tokens: in 16 bits, rounding decides between many of them.
        if has_ends or self.linear.weight.dtype != torch.float32 or not (
                self.linear.weight.device.type == "cpu"):
            return None
        return _Call(0, 1, temperature, top_p)

    def end_call(self) -> None:
        self._calls.pop(threading.get_ident(), None)


class _Check(logits_process.LogitsProcessor):
    """Calls FastHead.check."""
    def __init__(self, head: FastHead) -> None:
        self.head = head

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.head.check(scores)
        return scores


def _sums_of(linear: nn.Linear) -> List[Tensor]:
    """Returns a sum of the bits of each row, its product with a random vector, and a copy of the
    bias, to notice changes. The sum shows any change of a single number, and the product the
    changes that leave a sum of bits as it is: other orders and signs. Together they take about the
    time of the logits of one or two hidden states."""
    weight = linear.weight.detach().contiguous()
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    is_wide = all(place * weight.itemsize % 8 == 0
                  for place in (weight.shape[1], weight.storage_offset()))
    sums = weight.view(torch.int64 if is_wide else sizes[weight.itemsize]).sum(1)
    random = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.autocast(weight.device.type, enabled=False):
        products = nn.functional.linear(random.to(weight), weight)
    # As bits, so that NaN equals NaN.
    found = [sums, products.view(sizes[weight.itemsize])]
    return found if linear.bias is None else [*found, linear.bias.detach().clone()]


def _blank(mixin: Any, base: Any) -> Any:
    derived = _derive(mixin, base)
    return derived.__new__(derived)


class _Derived:
    """A base of the mixins below, whose classes are made by :func:`_derive`."""

    _mixin: Type[Any]
    _slow_class: Type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Lets the module be pickled, although no other process knows its class."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_blank, (self._mixin, self._slow_class), *reduced[2:])


class _FastLinear(_Derived):
    """Mixin that lets a FastHead answer; :func:`_derive` derives from both."""

    _fast_head: FastHead

    def forward(self, input: Tensor) -> Tensor:
        return self._fast_head.answer(input, super().forward)  # type: ignore[misc]


class _FastModel(_Derived):
    """Mixin for greedy decoding and sampling; :func:`_derive` derives from both."""

    _fast_head: FastHead

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """The loop of these two modes in ``generate``. Other modes do not call it."""
        head = self._fast_head
        processors, config = kwargs.get("logits_processor"), kwargs.get("generation_config")
        if self.get_output_embeddings() is not head.linear:  # type: ignore[attr-defined]
            warnings.warn(
                "fast_head: the model has another head than the one that became fast, so all "
                "tokens are scored: call slow_head, then fast_head again", stacklevel=2)
        elif processors is not None and config is not None:
            head.begin_call(config, processors)
            kwargs["logits_processor"] = logits_process.LogitsProcessorList(
                [_Check(head), *processors])
        try:
            return super()._sample(*args, **kwargs)  # type: ignore[misc]
        finally:
            head.end_call()


@functools.cache
def _derive(mixin: Any, base: Any) -> Any:
    return type(base.__name__, (mixin, base), {
        "_mixin": mixin, "_slow_class": base, "__module__": base.__module__, "__doc__": base.__doc__
    })


def fast_head(model: Any, k: int = 50) -> FastHead:
    """Makes ``generate()`` find the next tokens by certified search, without scoring all tokens::

        head = xs.integrations.transformers.fast_head(model)
        tokens = model.generate(**inputs, max_new_tokens=200)
        head.fast_steps, head.dense_steps
        xs.integrations.transformers.slow_head(model)

    Each step needs only the best tokens: one for greedy decoding, ``top_k`` for sampling. They are
    found as in :meth:`xsoftmax.LinearLoss.search`, which proves that no other token scores higher.
    A sample from all tokens is the one with the largest sum of logit and Gumbel noise, and is found
    in the same way. The tokens, and with the same random state the samples, are those of the
    unchanged model, except where scores differ by less than the rounding of its head. A step whose
    ``top_k``-th score occurs twice scores all tokens, and so does a greedy one if the model caps
    its logits and the best ones are equal.

    - Greedy decoding, and sampling with ``top_k`` of at most k, use the index; temperature,
      ``top_p``, ``min_p`` and others that Transformers applies after ``top_k``, and a minimum
      length, included.
    - Sampling without ``top_k`` (``top_k=0``) uses it on a CPU in float32, with temperature and
      ``top_p``, for a few sequences at once: as many as a 64th of the hidden width, any number from
      a width of 1,024. A step scores all tokens while another call of ``generate()`` runs, and if a
      sample is not proved to be in ``top_p``.
    - Beams, assisted and custom generation, penalties, banned and forced tokens, custom logits
      processors, compiled models, and ``output_scores`` or ``output_logits`` need the scores of
      other tokens; then all are scored, as without this call, and also under autocast, which rounds
      the weights.
    - Calls of the model outside of ``generate()`` are as before. A stopping criterion or streamer
      that calls the model inside of it receives the logits of the best tokens only.
    - The first step of a call scores all tokens and checks that the model returns its head's
      logits, or scales and caps them as its configuration says; in 16 bits and without ``top_k``,
      their values. Otherwise a warning says so, and all are scored.
    - The index is built in the first call, a second time after 512 hidden states, since it is
      faster for states like those that it knows, and again after the weights have changed. While
      one of them is not finite or above 2^100, all tokens are scored.
    - A fast model can be copied and pickled. ``save_pretrained`` saves a plain one.

    How much it saves depends on the weights: see ``head.cells_read`` and :doc:`/howto/retrieval`.

    Args:
        model: a PreTrainedModel that generates; changed in place.
        k: the largest ``top_k`` that is read from the index, at least 1.

    Returns:
        The head, with counts of steps.

    Raises:
        UnsupportedHeadError: (a TypeError) the head is not an nn.Linear, or is followed by a bias.
        ValueError: the head is fast already.
        TypeError: the model cannot generate.
    """
    owner = f"fast_head of {type(model).__name__}"
    check_count(owner, "k", k, 1)
    if isinstance(model, _FastModel):
        raise ValueError(f"{owner}: expected a model whose head is not fast yet, got one that is")
    if not isinstance(model, GenerationMixin) or not hasattr(model, "_sample"):
        raise TypeError(
            f"{owner}: expected a PreTrainedModel that generates, such as the base model "
            "of a PeftModel")
    linear = model.get_output_embeddings()
    if isinstance(linear, _FastLinear):
        raise ValueError(
            f"{owner}: expected a head that is not fast yet, got that of another model")
    kind: Any = getattr(linear, "_base_class", type(linear))  # of a replaced head: its class before
    if not isinstance(linear, nn.Linear) or kind.forward is not nn.Linear.forward or (
            "forward" in vars(linear)):
        raise UnsupportedHeadError(f"{owner}: expected its head as a plain nn.Linear, got "
                                   f"{type(linear).__name__}")
    name = next(key for key, module in model.named_modules() if module is linear)
    if find_bias(model, name, linear) is not None:
        raise UnsupportedHeadError(f"{owner}: expected a head that no bias follows, got one with a "
                                   "bias after it")
    scale, cap = (read_transform(model.config).get(name) for name in ("logit_scale", "softcap"))
    scale = 1.0 if scale is None else scale
    head = FastHead(linear, k, option_text(**logit_options(scale, cap)) if scale > 0 else "")
    parts: List[Tuple[Any, Any]] = [(linear, _FastLinear), (model, _FastModel)]
    for module, mixin in parts:
        object.__setattr__(module, "_fast_head", head)
        old_class: Any = type(module)
        module.__class__ = _derive(mixin, old_class)
    return head


def slow_head(model: Any) -> None:
    """Undoes :func:`fast_head`.

    Raises:
        ValueError: the head is not fast.
    """
    if not isinstance(model, _FastModel):
        raise ValueError(f"slow_head of {type(model).__name__}: expected a model of fast_head, got "
                         "another")
    parts: List[Any] = [model._fast_head.linear, model]
    for module in parts:
        module.__class__ = module._slow_class
        del module._fast_head
