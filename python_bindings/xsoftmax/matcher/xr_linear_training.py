"""Training of XRLinear: checks of examples, layers, negatives and progress."""

import time
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

from .._core import long_work
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

_NEGATIVES = ("tfn", "man", "user")


class Layers:
    """The layers of a tree. For each layer, ``first_child`` holds the offsets of the children of
    each node of the layer above, and ``above`` the node that is an ancestor of each label (or the
    label's own node). ``labels`` [L] lists the labels in the order of the last layer."""
    def __init__(self, tree: LabelTree):
        sizes = tree.layer_sizes or [1]  # a one-node tree: its label is placed below an added root
        ends = np.cumsum([1, *sizes])
        self.first_child: List[Tensor] = []
        self.above: List[Tensor] = []
        if not tree.layer_sizes:
            self.first_child, self.above = [torch.tensor([0,
                                                          1])], [torch.zeros(1, dtype=torch.int32)]
            self.labels = torch.zeros(1, dtype=torch.int64)
            return
        for depth in range(len(sizes)):
            begin, end = (ends[depth - 1], ends[depth]) if depth > 0 else (0, 1)
            self.first_child.append(tree.first_child[begin:end + 1] - end)
        inner_classes = tree.node_class[:ends[-2]]
        if (inner_classes >= 0).any():
            raise ValueError(
                "XRLinear.train: expected a tree with all labels on its last layer, "
                "as LabelTree.from_vectors makes with "
                f"max_leaf_size, got label {int(inner_classes[inner_classes >= 0][0])} above it")
        self.labels = tree.node_class[ends[-2]:].clone()
        node = tree.class_node
        for depth in reversed(range(len(sizes))):
            self.above.insert(0, (node - ends[depth]).to(torch.int32))
            node = tree.parent[node]

    def num_nodes(self, depth: int) -> int:
        return len(self.labels) if depth + 1 == len(
            self.first_child) else len(self.first_child[depth + 1]) - 1

    def lists(self, depth: int, pairs: Pairs,
              weights: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
        """Returns, for each node of a layer, the rows with a label at or below it, as offsets and
        rows, and the largest weight of each such row."""
        return torch.ops.xsoftmax.node_rows([pairs[0]], [pairs[1]], [self.above[depth]],
                                            self.num_nodes(depth), weights)


class Watch:
    """Reports the progress of training: each layer's own, with the time that is left for it."""
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
    schemes: List[List[str]]
    """The names of the negatives of each layer."""
    pairs: Pairs
    """Examples and labels."""
    relevance: Optional[Tensor]
    user_negatives: Optional[Pairs]
    options: List[str]
    """Options of each layer."""
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
        """Returns ranges of layers that are still to be trained, each together: all up to the next
        layer whose rows are those that beams reach ("man"), or each layer alone."""
        begin, end = len(self.parts), len(self.schemes)
        starts = [
            depth for depth in range(begin, end)
            if depth == begin or one_by_one or "man" in self.schemes[depth]
        ]
        return list(zip(starts, [*starts[1:], end]))

    def train(self, first: int, last: int, watch: Watch) -> None:
        """Trains the layers from ``first`` to ``last - 1``."""
        start = time.perf_counter()
        depths, ranks = range(first, last), self.ranks
        mined = self._mine() if first > 0 and "man" in self.schemes[first] else None

        def train_share() -> Any:
            parents: List[Pairs] = []
            labels: List[Tuple[Tensor, Tensor, Tensor]] = []
            for depth in depths:
                parents.append(self._parents(depth, mined if depth == first else None, labels))
                labels.append(self.layers.lists(depth, self.pairs, self.relevance))
            match_end = time.perf_counter()
            work: List[int] = []
            shares: List[str] = []
            for depth, (offsets, numbers) in zip(depths, parents):
                first_child = self.layers.first_child[depth]
                begin, end = ranks.split_work(
                    len(offsets) - 1,
                    lambda: estimate_work(self.rows, first_child, offsets, numbers))
                shares.append(f"{self.options[depth]},first_parent={begin},last_parent={end}")
                work.append(int((offsets.diff() * first_child.diff())[begin:end].sum()))
            trained = watch.run(first, work, self.rows, self.features,
                                [self.layers.first_child[depth]
                                 for depth in depths], [part for each in parents for part in each],
                                [part for each in labels for part in each[:2]],
                                [] if self.relevance is None else [each[2] for each in labels],
                                [part for depth in depths for part in self.initial[depth]], shares)
            return trained, labels, [len(each[1]) for each in parents], match_end

        trained, labels, num_rows, match_end = ranks.run_together(train_share)
        *layer_parts, tasks = trained
        busy = [float(tasks[tasks[:, 0] == i, 3].sum()) for i in range(len(depths))]
        for i, depth in enumerate(depths):
            *share, counters = layer_parts[6 * i:6 * i + 6]
            parts = join_chunks(share, self.dtype, ranks)
            self.parts.append([self.layers.first_child[depth], *parts])
            num_sweeps, num_unconverged, num_weights = ranks.sum(counters).tolist()
            self.stats.append({
                "nodes": len(labels[i][0]) - 1, "rows": num_rows[i], "weights": len(parts[-1]),
                "weights before the threshold": int(num_weights), "sweeps": int(num_sweeps),
                "unconverged": int(num_unconverged)
            })
        # Layers that are trained together share the seconds as they share the threads.
        end = time.perf_counter()
        seconds = [[(match_end - start) / len(depths), (end - match_end) * each / (sum(busy) or 1)]
                   for each in busy]
        slowest = ranks.gather(torch.tensor([seconds], dtype=torch.float64)).amax(0).tolist()
        for stats, (matching, training) in zip(self.stats[first:], slowest):
            stats.update({"seconds of matching": matching, "seconds": training})

    def _parents(self, depth: int, mined: Optional[Pairs], labels: List[Any]) -> Pairs:
        """Returns the training rows of each node above a layer."""
        if depth == 0:
            count = len(self.rows[0]) - 1
            return torch.tensor([0, count]), torch.arange(count, dtype=torch.int32)
        scheme, above = self.schemes[depth], self.layers.above[depth - 1]
        if scheme == ["tfn"]:
            return (labels[-1] if labels else self.layers.lists(depth - 1, self.pairs))[:2]
        matrices = [] if mined is None else [
            (*mined, torch.arange(self.layers.num_nodes(depth - 1), dtype=torch.int32))
        ]
        if "tfn" in scheme:
            matrices.append((*self.pairs, above))
        if "user" in scheme and self.user_negatives is not None:
            matrices.append((*self.user_negatives, above))
        return torch.ops.xsoftmax.node_rows(*map(list, zip(*matrices)),
                                            self.layers.num_nodes(depth - 1))[:2]

    def _mine(self) -> Pairs:
        """Returns the nodes of the last trained layer that the beam search of each row reaches."""
        offsets, columns, values = self.rows
        nodes, ranks = int(self.parts[-1][0][-1]), self.ranks
        first, last = ranks.split_work(len(offsets) - 1, lambda: offsets.diff() + 1)
        begin, end = int(offsets[first]), int(offsets[last])
        share = offsets[first:last + 1] - begin, columns[begin:end], values[begin:end]
        found, labels, _ = ranks.run_together(lambda: self.search(self.parts, nodes, share))
        return count_offsets(ranks.gather(found.diff())), ranks.gather(labels).to(torch.int32)


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
            "XRLinear.train: X holds ones alone and Y fractions, as if they had been "
            "swapped: "
            "X is [n, D], examples by features; Y is [n, L], and each of its values that "
            "is "
            "not 0 is a label", stacklevel=3)
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


def split_schemes(negatives: Union[str, Sequence[str]], depth: int,
                  user_negatives: Optional[Matrix]) -> List[List[str]]:
    texts = [negatives] * depth if isinstance(negatives, str) else list(negatives)
    if len(texts) != depth:
        raise ValueError(f"XRLinear.train: expected negatives for {depth} layers, as the tree has, "
                         f"got {len(texts)}")
    schemes = [str(scheme).split("+") for scheme in texts]
    for scheme, text in zip(schemes, texts):
        if not set(scheme) <= set(_NEGATIVES):
            raise ValueError("XRLinear.train: expected negatives as \"tfn\", \"man\", \"user\" or "
                             f"several joined by +, got {text!r}")
        if "user" in scheme and user_negatives is None:
            raise ValueError(f"XRLinear.train: expected user_negatives beside negatives={text!r}, "
                             "got none")
    if user_negatives is not None and not any("user" in scheme for scheme in schemes):
        raise ValueError("XRLinear.train: expected negatives with \"user\" beside user_negatives, "
                         "got " + repr(negatives))
    return schemes


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
    texts = [names or ""] if names is None or isinstance(names, str) else list(names)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"XRLinear.predict: expected {option} as a name or a list of names, got "
                        f"{names!r}")
    return ",".join(texts)


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
    selection = tensor_of(only) if isinstance(
        only, np.ndarray) else torch.as_tensor(only if isinstance(only, Tensor) else list(only))
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
