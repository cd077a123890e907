"""Gradients of batches that do not fit into memory."""

import contextlib
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


def _batch_size(owner: str, number: int, inputs: Any) -> int:
    sizes = {tensor.shape[0] for tensor in tree_flatten(inputs)[0] if isinstance(tensor, Tensor) and tensor.dim() > 0}
    if len(sizes) != 1:
        raise ValueError(f"{owner}: expected inputs of tower {number} to hold tensors of one batch size, got {sorted(sizes) if sizes else 'no tensor'}")
    return sizes.pop()


def _chunks(inputs: Any, size: int, chunk: int) -> Iterator[Tuple[slice, Any]]:
    for begin in range(0, max(size, 1), chunk):
        part = slice(begin, min(begin + chunk, size))
        yield part, tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, inputs)


def _call(tower: Callable[..., Tensor], inputs: Any) -> Tensor:
    if isinstance(inputs, dict):
        return tower(**inputs)
    return tower(*inputs) if isinstance(inputs, (tuple, list)) else tower(inputs)


class _RandomState:
    """Of the CPU and of the devices in use, so that a second pass drops out what the first did."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def cached_step(loss: Callable[..., Tensor], towers: Sequence[Tuple[Callable[..., Tensor], Any]], *args: Any, chunk_size: int,
                backward: Callable[[Tensor], None] = Tensor.backward, **kwargs: Any) -> Tensor:
    """The gradients of ``loss(*[tower(inputs) for tower, inputs in towers], *args, **kwargs)``, with the activations of one chunk of one tower in memory.

    Each tower runs over its chunks without gradient; the loss of all their vectors gives the gradient of each vector; then each chunk runs again, and its
    backward pass begins with these (GradCache: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021). The
    gradients are those of one step up to rounding, for the time of one more forward pass::

        value = xs.cached_step(loss, [(query_tower, query_features), (item_tower, item_features)], item_id, chunk_size=256)
        optimizer.step()

    Dropout drops the same in both passes. A layer whose output depends on the rest of the batch, such as BatchNorm in train(), sees chunks, and counts them
    twice.

    Args:
        loss: a scalar of vectors ``[Q, D]`` of each tower, then ``args`` and ``kwargs``; called once.
        towers: each with its inputs: a tensor, or a tuple or dict (named arguments) of tensors of one first dimension; what is no tensor goes to each chunk
            as it is. A DistributedDataParallel synchronises with its last chunk.
        chunk_size: rows of a chunk, above 0.
        backward: how the backward pass of the loss begins: ``lambda value: scaler.scale(value).backward()`` beside a GradScaler.

    Returns:
        The loss, without gradient. The gradients of all parameters have grown by those of the step; after an error perhaps by a part of them: zero them then.

    Raises:
        ValueError: a chunk_size below 1, inputs of several batch sizes, a tower that gives no row for each of its inputs.
    """
    owner = "cached_step"
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"{owner}: expected chunk_size of at least 1, got {chunk_size!r}")
    sizes = [_batch_size(owner, number, inputs) for number, (_, inputs) in enumerate(towers)]
    states: List[List[_RandomState]] = []
    vectors: List[Tensor] = []
    for number, ((tower, inputs), size) in enumerate(zip(towers, sizes)):
        states.append([])
        parts = []
        with torch.no_grad():
            for part, chunk in _chunks(inputs, size, chunk_size):
                states[-1].append(_RandomState())
                parts.append(_call(tower, chunk))
                if parts[-1].dim() < 1 or parts[-1].shape[0] != part.stop - part.start:
                    raise ValueError(f"{owner}: expected tower {number} to give {part.stop - part.start} rows for as many inputs, got shape "
                                     f"{list(parts[-1].shape)}")
        vectors.append(torch.cat(parts).requires_grad_())
    value = loss(*vectors, *args, **kwargs)
    backward(value)
    after = _RandomState()
    try:
        for (tower, inputs), size, of_vectors, before in zip(towers, sizes, vectors, states):
            if of_vectors.grad is None:  # the loss does not depend on it
                continue
            for (part, chunk), state in zip(_chunks(inputs, size, chunk_size), before):
                state.restore()
                alone = part.stop < size and hasattr(tower, "no_sync")
                with tower.no_sync() if alone else contextlib.nullcontext():  # type: ignore[attr-defined]
                    made = _call(tower, chunk)
                    if made.requires_grad:
                        made.backward(of_vectors.grad[part].to(made.dtype))
    finally:
        after.restore()  # also after an error: the next step must not draw what this one drew
    return value.detach()
