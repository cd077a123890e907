"""Generation that reads only a part of the head of a Transformers model."""

import functools
import warnings
from typing import Any, List, Optional, Tuple, Type, cast

import torch
from torch import Tensor, nn
from transformers.generation import logits_process

from .._core.checks import check_count
from ..retrieval import SearchIndex, _version
from .heads import find_bias
from .logits import UnsupportedHeadError

# Processors that remove the tokens that end a text.
_REMOVE_ENDS = (logits_process.MinLengthLogitsProcessor,
                logits_process.MinNewTokensLengthLogitsProcessor)
_MARGIN = 8  # tokens more, since 16-bit logits are often equal


class FastHead:
    """The head of a model during :func:`fast_head`.

    Attributes:
        k: the largest ``top_k`` of sampling that is read from the index.
        fast_steps, dense_steps: the numbers of decoding steps, counted per sequence, whose tokens
            came from the index, and for which all tokens were scored.
        cells_read: the number of cells of the index that the fast steps read. All of them:
            ``fast_steps * num_cells``.
        num_cells: the number of cells of the index.
    """
    def __init__(self, linear: nn.Linear, k: int) -> None:
        self.linear, self.k = linear, k
        self.fast_steps = self.dense_steps = self.cells_read = self.num_cells = 0
        # The numbers of best tokens that a step of the current call needs, and searches for. None:
        # it needs the logits of all tokens.
        self._wanted = 0
        self._depth: Optional[int] = None
        # Of the first step of a call: whether it was taken, and its logits until check().
        self._is_checked, self._first_logits = False, cast(Optional[Tensor], None)
        self._versions: Optional[Tuple[Any, ...]] = None
        self._index: Optional[SearchIndex] = None

    def index(self) -> SearchIndex:
        """Returns the index of the current weights; builds it if they have changed."""
        versions = _version(self.linear.weight), _version(self.linear.bias)
        if self._index is None or versions != self._versions:
            self._index = SearchIndex(self.linear.weight, self.linear.bias)
            self._versions, self.num_cells = versions, self._index.num_cells
        return self._index

    def logits(self, hidden: Tensor) -> Optional[Tensor]:
        """Returns logits [*, N] of hidden states [*, D] that are -inf except for the best tokens.
        None: the current step needs the logits of all tokens."""
        classes = self.linear.out_features
        is_step = hidden.dim() < 3 or hidden.shape[-2] == 1
        if self._depth is None or self._depth >= classes or not is_step or (
                torch.is_grad_enabled() and (hidden.requires_grad or self.linear.training)):
            self.dense_steps += hidden[..., 0].numel() if self._depth is not None else 0
            return None
        if not self._is_checked:
            self._is_checked = True
            self.dense_steps += hidden[..., 0].numel()
            logits = nn.functional.linear(hidden, self.linear.weight, self.linear.bias)
            self._first_logits = logits.reshape(-1, classes)
            return logits
        queries = hidden.reshape(-1, hidden.shape[-1])
        found = self.index().search(queries, self._depth, None, None)
        if not found.certified.all():  # a hidden state that is not finite
            self.dense_steps += len(queries)
            return None
        # Multiplied again as the head does, for the same rounding.
        ids = found.ids.unique()
        bias = None if self.linear.bias is None else self.linear.bias[ids]
        scores = nn.functional.linear(queries, self.linear.weight[ids], bias)
        if self._may_tie(scores):
            self.dense_steps += len(queries)
            return None
        self.fast_steps += len(queries)
        self.cells_read += int(found.cells_read.sum())
        logits = scores.new_full((len(queries), classes), -torch.inf)
        logits[:, ids] = scores
        return logits.reshape(*hidden.shape[:-1], classes)

    def _may_tie(self, scores: Tensor) -> bool:
        """Whether the last of the found tokens may equal one that a step needs, in the rounding of
        16 bits."""
        if scores.dtype not in (torch.bfloat16, torch.float16):
            return False
        best = scores.topk(cast(int, self._depth), sorted=True).values
        return bool((best[:, -1] >= best[:, self._wanted - 1]).any())

    def check(self, scores: Tensor) -> None:
        """Compares the first logits [Q, N] of a call with what the model made of them. A model may
        scale or cap its logits; if it changes their order, all tokens are scored."""
        logits, self._first_logits = self._first_logits, None
        if logits is None or self._depth is None:
            return
        order = logits.to(scores).argsort(1)
        if scores.shape != logits.shape or (scores.gather(1, order).diff(dim=1) < 0).any():
            self._depth = None
            warnings.warn(
                "fast_head: the model changes the order of logits after its head, so all "
                "tokens are scored", stacklevel=2)

    def plan(self, config: Any, processors: List[Any]) -> None:
        """Sets the number of best tokens that decide each step of a call of ``generate``."""
        self._depth, self._is_checked, self._first_logits, wanted = None, False, None, 1
        has_scores = config.return_dict_in_generate and (config.output_scores
                                                         or config.output_logits)
        if (config.num_beams or 1) > 1 or has_scores:
            return
        ends = getattr(config, "eos_token_id", None)
        num_ends = len(ends) if isinstance(ends, (list, tuple)) else 1
        for processor in processors:
            if isinstance(processor, _REMOVE_ENDS):
                wanted += num_ends
            elif isinstance(processor, logits_process.TopKLogitsWarper):
                if processor.top_k > self.k:
                    return
                wanted += processor.top_k - 1
                break  # those that follow see the same -inf as with all logits
            elif not isinstance(processor, logits_process.TemperatureLogitsWarper):
                return
        else:
            if config.do_sample:
                return
        is_short = self.linear.weight.dtype in (torch.bfloat16, torch.float16)
        self._wanted, self._depth = wanted, wanted + (_MARGIN if is_short else 0)


class _Check(logits_process.LogitsProcessor):
    """Calls FastHead.check."""
    def __init__(self, head: FastHead) -> None:
        self.head = head

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.head.check(scores)
        return scores


class _FastLinear:
    """Mixin that lets a FastHead answer; :func:`_derive_linear` derives from both."""

    _fast_head: FastHead
    _slow_class: Type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        logits = self._fast_head.logits(input)
        return super().forward(input) if logits is None else logits  # type: ignore[misc]


class _FastModel:
    """Mixin that plans each call of ``generate``; :func:`_derive_model` derives from both."""

    _fast_head: FastHead
    _slow_class: Type[nn.Module]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._fast_head._depth = self._fast_head._first_logits = None

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(  # type: ignore[misc]
            generation_config, *args, **kwargs)
        self._fast_head.plan(generation_config, processors)
        processors.insert(0, _Check(self._fast_head))
        return processors


@functools.cache
def _derive(mixin: Any, base: Any) -> Any:
    return type(base.__name__, (mixin, base),
                {"_slow_class": base, "__module__": base.__module__, "__doc__": base.__doc__})


def fast_head(model: Any, k: int = 50) -> FastHead:
    """Makes ``generate()`` find the next tokens by certified search, without scoring all tokens::

        head = xs.integrations.transformers.fast_head(model)
        tokens = model.generate(**inputs, max_new_tokens=200)
        head.fast_steps, head.dense_steps
        xs.integrations.transformers.slow_head(model)

    Each step needs only the best tokens: one for greedy decoding, ``top_k`` for sampling. They are
    found as in :meth:`xsoftmax.LinearLoss.search`, which proves that no other token scores higher.
    The tokens, and with the same random state the samples, are those of the unchanged model, except
    where scores differ by less than the rounding of its head.

    - Greedy decoding, and sampling with ``top_k`` of at most k, use the index; temperature,
      ``top_p``, ``min_p`` and others that Transformers applies after ``top_k``, and a minimum
      length, included.
    - Beams, penalties, banned and forced tokens, own logits processors, and ``output_scores`` or
      ``output_logits`` need the scores of other tokens; then all are scored, as without this call.
    - Calls of the model outside of ``generate()`` are as before.
    - The first step of a call scores all tokens and checks that the model keeps the order of its
      head's logits, as scales and caps do. If it does not, a warning says so, and all are scored.
    - The index is built in the first call, and again after the weights have changed.

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
    linear = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not hasattr(model, "_get_logits_processor") or linear is None:
        raise TypeError(f"{owner}: expected a model that generates, with output embeddings")
    if not isinstance(linear, nn.Linear):
        raise UnsupportedHeadError(f"{owner}: expected its head as nn.Linear, got "
                                   f"{type(linear).__name__}")
    name = next(key for key, module in model.named_modules() if module is linear)
    if find_bias(model, name, linear) is not None:
        raise UnsupportedHeadError(f"{owner}: expected a head that no bias follows, got one with a "
                                   "bias after it")
    head = FastHead(linear, k)
    parts: List[Tuple[Any, Any]] = [(linear, _FastLinear), (model, _FastModel)]
    for module, mixin in parts:
        object.__setattr__(module, "_fast_head", head)
        kind: Any = type(module)
        module.__class__ = _derive(mixin, kind)
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
