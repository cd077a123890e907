"""Gradient caching, for batches that do not fit into memory."""

import contextlib
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


def _batch_size(owner: str, number: int, inputs: Any) -> int:
    sizes = {
        tensor.shape[0]
        for tensor in tree_flatten(inputs)[0] if isinstance(tensor, Tensor) and tensor.dim() > 0
    }
    if len(sizes) != 1:
        raise ValueError(f"{owner}: expected inputs of tower {number} to hold tensors of one batch "
                         f"size, got {sorted(sizes) if sizes else 'no tensor'}")
    return sizes.pop()


def _chunks(inputs: Any, size: int, chunk: int) -> Iterator[Tuple[slice, Any]]:
    for begin in range(0, max(size, 1), chunk):
        part = slice(begin, min(begin + chunk, size))
        yield part, tree_map(
            lambda leaf: leaf[part]
            if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, inputs)


def _call(tower: Callable[..., Tensor], inputs: Any) -> Tensor:
    if isinstance(inputs, dict):
        return tower(**inputs)
    return tower(*inputs) if isinstance(inputs, (tuple, list)) else tower(inputs)


class _RandomState:
    """Random states of the CPU and of initialised devices, so that the second pass drops the same
    elements as the first."""
    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all(
        ) if torch.cuda.is_available() and torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def cached_step(loss: Callable[..., Tensor], towers: Sequence[Tuple[Callable[..., Tensor], Any]],
                *args: Any, chunk_size: int, backward: Callable[[Tensor], None] = Tensor.backward,
                **kwargs: Any) -> Tensor:
    """Computes the gradients of a large batch with the activations of only one chunk of one tower
    in memory.

    Accumulates the same gradients, up to rounding, as::

        loss(*[tower(inputs) for tower, inputs in towers], *args, **kwargs).backward()

    at the cost of one more forward pass. Each tower first runs over its chunks without gradients.
    The loss of all vectors gives the gradient of each vector. Each chunk then runs again, and its
    backward pass starts from these gradients (GradCache: Gao et al., "Scaling Deep Contrastive
    Learning Batch Size under Memory Limited Setup", 2021).

    Dropout is the same in both passes. A layer whose output depends on the other examples of the
    batch, such as BatchNorm in train(), sees only a chunk, and updates its statistics twice.

    Args:
        loss: a function of one tensor ``[Q, D]`` per tower, then ``args`` and ``kwargs``, that
            returns a scalar. It is called once.
        towers: pairs of a tower and its inputs. The inputs are a tensor, a tuple of tensors, or a
            dict of tensors (keyword arguments), all of one first dimension. Values that are not
            tensors are passed to each chunk unchanged. A DistributedDataParallel tower synchronises
            gradients in its last chunk.
        chunk_size: rows per chunk, at least 1.
        backward: starts the backward pass of the loss. With a GradScaler: ``lambda value:
            scaler.scale(value).backward()``.

    Returns:
        The loss, detached. Gradients are accumulated in all parameters. After an error some may be
        accumulated already: zero them then.

    Raises:
        ValueError: chunk_size is below 1, the inputs of a tower have several batch sizes, or a
            tower does not return one row for each of its inputs.

    Example::

        value = xs.cached_step(
            loss,
            [(query_tower, query_features), (item_tower, item_features)],
            item_id,
            chunk_size=256,
        )
        optimizer.step()
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
                    raise ValueError(f"{owner}: expected tower {number} to give "
                                     f"{part.stop - part.start} rows for as many inputs, got shape "
                                     f"{list(parts[-1].shape)}")
        vectors.append(torch.cat(parts).requires_grad_())
    value = loss(*vectors, *args, **kwargs)
    backward(value)
    final_state = _RandomState()
    try:
        for (tower, inputs), size, tower_vectors, chunk_states in zip(towers, sizes, vectors,
                                                                      states):
            if tower_vectors.grad is None:  # the loss does not depend on it
                continue
            for (part, chunk), state in zip(_chunks(inputs, size, chunk_size), chunk_states):
                state.restore()
                skips_sync = part.stop < size and hasattr(tower, "no_sync")
                with tower.no_sync(  # type: ignore[attr-defined]
                ) if skips_sync else contextlib.nullcontext():
                    output = _call(tower, chunk)
                    if output.requires_grad:
                        output.backward(tower_vectors.grad[part].to(output.dtype))
    finally:
        final_state.restore()  # also after an error: the next step must not repeat random numbers
    return value.detach()
