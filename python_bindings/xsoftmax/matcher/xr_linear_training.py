"""Training of XRLinear: checks of examples, layers, negatives and progress."""

import time
import warnings
from dataclasses import dataclass
from typing import (Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, TYPE_CHECKING,
                    Union)

import numpy as np
import torch
from torch import Tensor

from .._core import long_work
from .._core.checks import as_ids
from .._core.ranks import SingleProcess
from .._core.sparse import canonical, index_tensors, tensor_of
from ..trees.label_tree import LabelTree

if TYPE_CHECKING:
    import scipy.sparse

Matrix = Union["scipy.sparse.csr_matrix", "scipy.sparse.csr_array"]
Progress = Callable[[int, int, int, int], None]
Pairs = Tuple[Tensor, Tensor]  # the offsets and columns of a matrix
Names = Union[str, Sequence[str], None]  # one for all layers, or one per layer
Only = Union[Tensor, Sequence[int], Matrix, None]

_MATCHER_AWARE = 2  # csrc/tree/label_layers.h


class Layers:
    """The layers of a tree (csrc/tree/label_layers.h)."""
    def __init__(self, tree: LabelTree):
        self.first_child, self.label_nodes, self.labels = torch.ops.xsoftmax.label_layers(
            tree.tables(), tree.layer_sizes)

    def num_nodes(self, depth: int) -> int:
        return int(self.first_child[depth][-1])

    def lists(self, depth: int, pairs: Pairs,
              weights: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
        """Returns, for each node of a layer, the rows with a label at or below it, as offsets and
        rows, and the largest weight of each such row."""
        return torch.ops.xsoftmax.node_rows([pairs[0]], [pairs[1]], [self.label_nodes[depth]],
                                            self.num_nodes(depth), weights)


class Watch:
    """Reports the progress and the remaining time of the current layer."""
    def __init__(self, progress: Union[bool, Progress], layers: int):
        self.progress, self.layers, self.bar, self.layer = progress, layers, None, -1

    def __enter__(self) -> "Watch":
        if self.progress is True:
            from tqdm import tqdm

            self.bar = tqdm(total=100, unit="%", disable=None,
                            bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}")
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, layer: int, done: int, total: int) -> None:
        if self.bar is not None:
            if layer != self.layer:
                self.bar.reset()
                self.bar.set_description(f"layer {layer + 1} of {self.layers}", refresh=False)
            self.layer, self.bar.n = layer, 100 * done // max(total, 1)
            self.bar.refresh()
        elif callable(self.progress):
            self.progress(layer, self.layers, done, total)

    def run(self, first: int, work: List[int], *args: Any) -> List[Tensor]:
        """Calls linear_layers_train for the layers from ``first`` on, each with its work. The
        operator works on them in order."""
        ends, ended = np.cumsum(work), 0

        def show(done: int, total: int) -> None:
            nonlocal ended
            while ended < len(work) and done >= ends[ended]:  # each layer reports its end
                self.show(first + ended, work[ended], work[ended])
                ended += 1
            if ended < len(work):
                self.show(first + ended, done - int(ends[ended]) + work[ended], work[ended])

        is_quiet = self.bar is None and not callable(self.progress)
        name = f"layer {first + 1}" if len(
            work) == 1 else f"layers {first + 1} to " + str(first + len(work))
        return long_work.run(name, torch.ops.xsoftmax.linear_layers_train, *args,
                             show=None if is_quiet else show)


@dataclass
class LayerTraining:
    """Trains the layers of a model."""

    rows: Tuple[Tensor, Tensor, Tensor]
    """The examples."""
    features: int
    layers: Layers
    negatives: List[int]
    """The rules of each layer (csrc/tree/label_layers.h)."""
    pairs: Pairs
    """Examples and labels."""
    relevance: Optional[Tensor]
    user_negatives: Optional[Pairs]
    options: str
    """Options of the operator."""
    initial: List[List[Tensor]]
    """Parts of each layer, or empty lists."""
    search: Callable[..., Tuple[Tensor, Tensor, Tensor]]
    """search(parts, nodes, rows): returns the nodes that the beam of each row reaches."""
    dtype: Optional[torch.dtype]
    ranks: SingleProcess

    def __post_init__(self) -> None:
        self.parts: List[List[Tensor]] = []
        self.stats: List[Dict[str, float]] = []

    def runs(self, one_by_one: bool) -> List[Tuple[int, int]]:
        """Returns the remaining layers as ranges that are trained in one call. A range ends before
        each layer with "man" negatives; ``one_by_one``: every layer is a range."""
        begin, end = len(self.parts), len(self.negatives)
        starts = [
            depth for depth in range(begin, end)
            if depth == begin or one_by_one or self.negatives[depth] & _MATCHER_AWARE
        ]
        return list(zip(starts, [*starts[1:], end]))

    def train(self, first: int, last: int, watch: Watch) -> None:
        """Trains the layers from ``first`` to ``last - 1``."""
        start = time.perf_counter()
        ranks, depths = self.ranks, range(first, last)
        reached = self._reached_nodes() if self.negatives[first] & _MATCHER_AWARE else []

        def train_share() -> Any:
            parents = [self._parent_rows(depth, reached) for depth in depths]
            labels = [self.layers.lists(depth, self.pairs, self.relevance) for depth in depths]
            match_end = time.perf_counter()
            shares, work = zip(*map(self._share, depths, parents))
            trained = watch.run(first, list(work), self.rows, self.features,
                                self.layers.first_child[first:last], flatten(parents),
                                flatten([each[:2] for each in labels]),
                                [] if self.relevance is None else [each[2] for each in labels],
                                flatten(self.initial[first:last]), list(shares))
            return trained, [len(each[1]) for each in parents], match_end

        (*layer_parts, tasks), num_rows, match_end = ranks.run_together(train_share)
        for depth, rows in zip(depths, num_rows):
            *share, counters = layer_parts[6 * (depth - first):6 * (depth - first) + 6]
            self._add_layer(depth, rows, share, counters)
        # The seconds of a call are split between its layers by the time of their tasks.
        busy = [float(tasks[tasks[:, 0] == i, 3].sum()) for i in range(len(depths))]
        matching = (match_end - start) / len(depths)
        second = (time.perf_counter() - match_end) / (sum(busy) or 1)
        slowest = ranks.gather(
            torch.tensor([[[matching, second * each] for each in busy]],
                         dtype=torch.float64)).amax(0).tolist()
        for stats, seconds in zip(self.stats[first:], slowest):
            stats.update(zip(("seconds of matching", "seconds"), seconds))

    def _share(self, depth: int, parents: Pairs) -> Tuple[str, int]:
        """Returns the options of this rank's part of a layer, and its work."""
        first_child = self.layers.first_child[depth]
        begin, end = self.ranks.split_work(
            len(parents[0]) - 1, lambda: estimate_work(self.rows, first_child, *parents))
        work = int((parents[0].diff() * first_child.diff())[begin:end].sum())
        return f"{self.options},first_parent={begin},last_parent={end}", work

    def _add_layer(self, depth: int, rows: int, share: List[Tensor], counters: Tensor) -> None:
        parts = join_chunks(share, self.dtype, self.ranks)
        self.parts.append([self.layers.first_child[depth], *parts])
        num_sweeps, num_unconverged, num_weights = self.ranks.sum(counters).tolist()
        self.stats.append({
            "nodes": self.layers.num_nodes(depth), "rows": rows, "weights": len(parts[-1]),
            "weights before the threshold": int(num_weights), "sweeps": int(num_sweeps),
            "unconverged": int(num_unconverged)
        })

    def _parent_rows(self, depth: int, reached: Sequence[Tensor]) -> Pairs:
        """Returns the training rows of each node above a layer."""
        above = max(depth - 1, 0)  # ignored for the first layer, whose parent is the root
        return torch.ops.xsoftmax.parent_rows(self.negatives[depth], self.pairs, self.user_negatives
                                              or [], reached, self.layers.label_nodes[above],
                                              self.layers.num_nodes(above))

    def _reached_nodes(self) -> Pairs:
        """Returns the nodes of the last trained layer that the beam of each row reaches."""
        offsets, columns, values = self.rows
        nodes, ranks = int(self.parts[-1][0][-1]), self.ranks
        first, last = ranks.split_work(len(offsets) - 1, lambda: offsets.diff() + 1)
        begin, end = int(offsets[first]), int(offsets[last])
        share = offsets[first:last + 1] - begin, columns[begin:end], values[begin:end]
        found, labels, _ = ranks.run_together(lambda: self.search(self.parts, nodes, share))
        return count_offsets(ranks.gather(found.diff())), ranks.gather(labels).to(torch.int32)


def flatten(lists: Iterable[Sequence[Tensor]]) -> List[Tensor]:
    return [tensor for each in lists for tensor in each]


def check_examples(X: Matrix, Y: Matrix) -> Tuple[Matrix, Matrix]:
    """Returns X and Y in canonical form; the caller's matrices are not modified."""
    has_fractions = getattr(getattr(Y, "dtype", None), "kind", "") == "f"
    original_Y, X, Y = Y, canonical("XRLinear.train", "X", X), check_pairs("Y", Y)
    if X.shape[0] != Y.shape[0]:
        raise ValueError(f"XRLinear.train: expected X and Y with as many rows, got {X.shape[0]} "
                         f"and {Y.shape[0]}: X is [n, D], here "
                         f"{list(X.shape)}, Y is [n, L], here {list(Y.shape)}")
    if has_fractions and X.nnz > 1 and (X.data == 1).all() and (np.mod(original_Y.tocsr().data, 1)
                                                                != 0).any():
        warnings.warn(
            "XRLinear.train: X has only ones and Y has fractions, as if they had been swapped: "
            "X is [n, D], examples by features; Y is [n, L], and each non-zero is a label",
            stacklevel=3)
    return X, Y


def check_pairs(argument: str, Y: Matrix, shape: Optional[Tuple[int, int]] = None,
                kind: str = "labels") -> Matrix:
    """Returns the matrix as CSR in canonical form, after checking its shape."""
    Y = canonical("XRLinear.train", argument, Y, kind)
    if shape is not None and Y.shape != shape:
        raise ValueError(f"XRLinear.train: expected {argument} of shape {list(shape)}, as Y, got "
                         f"{list(Y.shape)}")
    if Y.shape[1] == 0:
        raise ValueError(f"XRLinear.train: expected {argument} with at least one label, got none")
    return Y


def check_relevance(relevance: Matrix, Y: Matrix) -> np.ndarray:
    """Returns the relevance of each pair of Y, in the order of Y's entries."""
    relevance = check_pairs("relevance", relevance, Y.shape, "weights")
    if (relevance.data < 0).any():
        raise ValueError("XRLinear.train: expected relevance of at least 0, got "
                         f"{relevance.data[relevance.data < 0][0]}")
    if relevance.nnz != Y.nnz or (relevance.indptr != Y.indptr).any() or (relevance.indices
                                                                          != Y.indices).any():
        raise ValueError(f"XRLinear.train: expected relevance for the {Y.nnz} pairs of Y and no "
                         f"others, got {relevance.nnz}")
    return relevance.data


def count_offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def estimate_work(rows: Tuple[Tensor, Tensor, Tensor], first_child: Tensor, offsets: Tensor,
                  parent_rows: Tensor) -> Tensor:
    """Estimates the work of each parent: the non-zeros of its rows (plus one per row), times its
    number of children."""
    numbers = count_offsets((rows[0].diff() + 1)[parent_rows])
    return numbers[offsets].diff() * first_child.diff()


def join_chunks(share: List[Tensor], dtype: Optional[torch.dtype],
                ranks: SingleProcess) -> List[Tensor]:
    """Returns the chunk, feature, more, child and value of a layer, gathered from the shares of all
    ranks."""
    chunk, feature, more, child, value = share
    value = narrow_weights(value, dtype, ranks)  # before sending it
    return [
        count_offsets(ranks.gather(chunk.diff())),
        *(ranks.gather(part) for part in (feature, more, child, value))
    ]


def narrow_weights(values: Tensor, dtype: Optional[torch.dtype], ranks: SingleProcess) -> Tensor:
    if dtype is not None:  # as trained
        return values
    limits = torch.finfo(torch.float16)
    sizes = values.abs()
    ends = torch.stack([sizes.min(), -sizes.max()]) if len(sizes) > 0 else torch.tensor(
        [limits.max, -limits.smallest_normal])
    # all ranks choose the same dtype for the layer
    smallest, largest = (ranks.gather(ends[None]).amin(0) * torch.tensor([1, -1])).tolist()
    if smallest >= limits.smallest_normal and largest <= limits.max:
        return values.to(torch.float16)
    return values


def join_names(option: str, names: Names) -> str:
    """Returns the names of all layers as the operator takes them."""
    return "" if names is None else ",".join(check_names("XRLinear.predict", option, names))


def check_names(owner: str, option: str, names: Any) -> List[str]:
    """Returns a name, or a sequence of names, as a list."""
    texts = [names] if isinstance(names, str) else list(names) if isinstance(names,
                                                                             (list, tuple)) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{owner}: expected {option} as a name or a list of names, got {names!r}")
    return texts


def select_labels(only: Any, labels: int, rows: int) -> Tensor:
    """Returns the ids of labels, or a sparse CSR tensor [rows, labels]."""
    if isinstance(only, Tensor) and only.layout == torch.sparse_csr:
        return only
    if getattr(only, "format", None) is not None:
        only = canonical("XRLinear.predict", "only", only, "scores")  # a score may be 0
        if only.shape != (rows, labels):
            raise ValueError(f"XRLinear.predict: expected only of shape [{rows}, {labels}], the "
                             f"labels of each row, got {list(only.shape)}")
        with warnings.catch_warnings():  # that sparse CSR tensors are new
            warnings.simplefilter("ignore")
            offsets, columns = index_tensors(only)
            return torch.sparse_csr_tensor(offsets, columns.long(), torch.ones(only.nnz),
                                           size=only.shape, check_invariants=False)
    selection = as_ids("XRLinear.predict", "only",
                       list(only) if isinstance(only, (set, frozenset)) else only)
    if selection.layout != torch.strided:
        raise TypeError("XRLinear.predict: expected only as ids, a mask, a scipy sparse matrix or "
                        f"a sparse CSR tensor, got a tensor of layout {selection.layout}")
    if selection.dim() != 1:
        raise ValueError("XRLinear.predict: expected only as ids or a mask of one dimension, got "
                         f"shape {list(selection.shape)}")
    if selection.dtype == torch.bool:
        if selection.shape != (labels,):
            raise ValueError(f"XRLinear.predict: expected only as a mask of shape [{labels}], got "
                             f"{list(selection.shape)}")
        return selection.nonzero().squeeze(1)
    if selection.dtype == torch.uint8:
        raise TypeError("XRLinear.predict: expected only as ids of labels or a mask of bool, got "
                        "uint8, which may be either")
    if selection.numel() > 0 and (selection.is_floating_point() or selection.is_complex()):
        raise TypeError("XRLinear.predict: expected only as ids of labels or a mask, got dtype "
                        f"{str(selection.dtype).removeprefix('torch.')}")
    return selection.to("cpu", torch.int64)


def warn_unless_unit_length(offsets: Tensor, values: Tensor, dense: Optional[Tensor]) -> None:
    """Warns if the first query does not have length 1, for a model whose examples were scaled."""
    if len(offsets) < 2:
        return
    square = float(values[offsets[0]:offsets[1]].square().sum())
    square += 0.0 if dense is None else float(dense[0].square().sum())
    if square > 0 and abs(square - 1) > 0.01:
        warnings.warn(
            "XRLinear.predict: the model was trained on rows scaled to length 1 (xsoftmax train "
            f"--normalize), but the first query has length {square ** 0.5:.3g}: scale the queries "
            "with label_vectors.unit_rows", stacklevel=4)


def dense_block(dense: Union[Tensor, np.ndarray], rows: Optional[int]) -> Tensor:
    if not isinstance(dense, (Tensor, np.ndarray)):
        raise TypeError("XRLinear.predict: expected X as a scipy sparse matrix, a tensor or an "
                        f"array, got {type(dense).__name__}")
    block = (tensor_of(dense) if isinstance(dense, np.ndarray) else dense).detach().to(
        "cpu", torch.float32)
    if block.dim() != 2 or (rows is not None and len(block) != rows):
        raise ValueError("XRLinear.predict: expected dense features of shape "
                         f"[{'n' if rows is None else rows}, d], got {list(block.shape)}")
    return block
