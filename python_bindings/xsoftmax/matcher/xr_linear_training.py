"""Training of XRLinear: checks of examples, layers, negatives and progress."""

import warnings
from typing import Any, Callable, List, Optional, Sequence, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

from .._core import long_work
from .._core.ranks import SingleProcess
from .._core.sparse import (canonical, index_tensors, sparse_tensors, tensor_of)
from ..trees.label_tree import LabelTree

if TYPE_CHECKING:
    import scipy.sparse

Matrix = Union["scipy.sparse.csr_matrix", "scipy.sparse.csr_array"]
Progress = Callable[[int, int, int, int], None]

_NEGATIVES = ("tfn", "man", "user")


class Layers:
    """The layers of a tree. For each layer, ``first_child`` holds the offsets of the children of
    each node of the layer above, and ``above`` the node that is an ancestor of each label (or the
    label's own node). ``labels`` [L] lists the labels in the order of the last layer."""
    def __init__(self, tree: LabelTree):
        sizes = tree.layer_sizes or [1]  # a one-node tree: its label is placed below an added root
        ends = np.cumsum([1, *sizes])
        self.first_child, self.above = [], []
        if not tree.layer_sizes:
            self.first_child, self.above, self.labels = [torch.tensor([0, 1])
                                                         ], [np.zeros(1, np.int32)
                                                             ], torch.zeros(1, dtype=torch.int64)
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
            self.above.insert(0, (node - ends[depth]).to(torch.int32).numpy())
            node = tree.parent[node]

    def lists(self, depth: int, pairs: Matrix,
              weights: Optional[np.ndarray] = None) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Returns, for each node of a layer, the rows with a label at or below it, as offsets and
        rows, and the largest weight of each such row."""
        import scipy.sparse as sp

        nodes = len(self.labels) if depth + 1 == len(
            self.first_child) else len(self.first_child[depth + 1]) - 1
        data = np.ones(pairs.nnz, np.float32) if weights is None else weights
        columns = sp.csr_matrix((data, self.above[depth][pairs.indices], pairs.indptr),
                                shape=(pairs.shape[0], nodes)).tocsc()
        rows, offsets, data = columns.indices, columns.indptr.astype(np.int64), columns.data
        # keep each row once per node: duplicates are adjacent
        first = np.ones(len(rows), bool)
        first[1:] = rows[1:] != rows[:-1]
        first[offsets[:-1][offsets[:-1] < len(rows)]] = True
        if not first.all():
            starts = np.flatnonzero(first)
            data = data if weights is None else np.maximum.reduceat(data, starts)
            offsets = np.concatenate([[0], np.cumsum(first)])[offsets]
            rows = rows[starts]
        costs = None if weights is None else torch.from_numpy(data.astype(np.float32))
        return torch.from_numpy(offsets), torch.from_numpy(rows.astype(np.int32, copy=False)), costs


class Watch:
    """Runs the training of layers and reports its progress."""
    def __init__(self, progress: Union[bool, Progress], layers: int):
        self.progress, self.layers, self.bar = progress, layers, None

    def __enter__(self) -> "Watch":
        if self.progress is True:
            from tqdm import tqdm

            self.bar = tqdm(total=100 * self.layers, unit="%", disable=None,
                            bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}")
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, layer: int, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.set_description(f"layer {layer + 1} of {self.layers}", refresh=False)
            self.bar.n = 100 * layer + 100 * done // max(total, 1)
            self.bar.refresh()
        elif callable(self.progress):
            self.progress(layer, self.layers, done, total)

    def run(self, layer: int, op: Callable[..., Tuple[Tensor, ...]], *args:
            Any) -> Tuple[Tensor, ...]:
        is_quiet = self.bar is None and not callable(self.progress)
        return long_work.run(
            f"layer {layer + 1}", op, *args,
            show=None if is_quiet else lambda done, total: self.show(layer, done, total))


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


def mine_negatives(parts: List[List[Tensor]], X: Matrix, bias: float, transform: str, beam: int,
                   ranks: SingleProcess) -> Tuple[Tensor, Tensor]:
    """Returns, for each node of the last trained layer, the rows whose beam search reaches it."""
    import scipy.sparse as sp

    nodes = int(parts[-1][0][-1])
    first, last = ranks.split_work(X.shape[0],
                                   lambda: torch.from_numpy(np.diff(X.indptr).astype(np.int64) + 1))

    def search() -> Tuple[Tensor, Tensor, Tensor]:
        model = torch.classes.xsoftmax.XRLinear(X.shape[1], bias, transform, torch.arange(nodes),
                                                parts)
        rows = sparse_tensors(X if ranks.size == 1 else X[first:last])
        return long_work.run("beams", model.predict, *rows, None, 0, beam, beam, "", "", None)

    offsets, labels, _ = ranks.run_together(search)
    offsets, labels = count_offsets(ranks.gather(offsets.diff())), ranks.gather(labels)
    columns = sp.csr_matrix((np.ones(len(labels), np.int8), labels.numpy(), offsets.numpy()),
                            shape=(X.shape[0], nodes)).tocsc()
    return index_tensors(columns)


def count_offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def estimate_work(rows: Tuple[Tensor, Tensor, Tensor], first_child: Tensor, offsets: Tensor,
                  parent_rows: Tensor) -> Tensor:
    """Estimates the work of each parent: the non-zeros of its rows (plus one per row), times its
    number of children."""
    numbers = count_offsets((rows[0].diff() + 1)[parent_rows])
    return numbers[offsets].diff() * first_child.diff()


def join_chunks(chunk: Tensor, feature: Tensor, row: Tensor, child: Tensor, value: Tensor,
                dtype: Optional[torch.dtype], ranks: SingleProcess) -> List[Tensor]:
    """Returns the whole layer, gathered from the shares of all ranks."""
    value = narrow_weights(value, dtype, ranks)  # before sending it
    return [
        count_offsets(ranks.gather(chunk.diff())),
        *(ranks.gather(part) for part in (feature, row, child, value))
    ]


def unite_lists(lists: List[Tuple[Tensor, Tensor]], rows: int) -> Tuple[Tensor, Tensor]:
    """Returns, for each node, the union of its rows in all lists."""
    import scipy.sparse as sp

    if len(lists) == 1:
        return lists[0][0], lists[0][1]
    nodes = len(lists[0][0]) - 1
    columns = sum(
        sp.csc_matrix((np.ones(len(of), np.int8), of.numpy(), offsets.numpy()), shape=(rows, nodes))
        for offsets, of in lists)
    columns.sort_indices()
    return index_tensors(columns)


def narrow_weights(values: Tensor, dtype: Optional[torch.dtype], ranks: SingleProcess) -> Tensor:
    if dtype == torch.float32:
        return values
    limits = torch.finfo(torch.float16)
    sizes = values.abs()
    ends = torch.stack([sizes.min(), -sizes.max()]) if len(sizes) > 0 else torch.tensor(
        [limits.max, -limits.smallest_normal])
    # all ranks choose the same dtype for the layer
    smallest, largest = (ranks.gather(ends[None]).amin(0) * torch.tensor([1, -1])).tolist()
    if smallest >= limits.smallest_normal and largest <= limits.max:
        return values.to(torch.float16)
    if dtype == torch.float16:
        raise ValueError(f"XRLinear.train: expected weights in [{limits.smallest_normal:.2g}, "
                         f"{limits.max:.0f}] for dtype float16, "
                         f"got {smallest:.2g} to {largest:.2g}")
    return values


def select_labels(only: Union[Tensor, Sequence[int], np.ndarray], labels: int) -> Tensor:
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
