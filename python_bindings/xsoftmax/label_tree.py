"""Trees whose leaves are the classes."""

from os import PathLike
from typing import List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn

from ._checks import check_count
from ._memory import moved_table
from ._sparse import checked, sparse_tensors

Nested = Sequence[Union[int, "Nested"]]


class LabelTree(nn.Module):
    """A tree whose leaves are the classes 0 .. N - 1, as tensors: the tree of a beam tree, a hierarchical softmax, a hierarchical matcher.

    Nodes are numbered breadth-first: node 0 is the root, and the children of a node stand together. A node other than the root stands for
    the edge that leads to it: edge e ends in node e + 1. Any shape will do: leaves at any depth, nodes with one child, a single node.

    Made by :meth:`from_vectors`, :meth:`from_frequencies`, :meth:`huffman`, :meth:`from_parents`, :meth:`from_nested`, :meth:`balanced` or
    :meth:`random`.

    Buffers, all int64: ``first_child`` [V + 1], node v has the children ``first_child[v]`` .. ``first_child[v + 1] - 1``; ``parent`` [V],
    -1 for the root; ``node_class`` [V], the class of a leaf, else -1; ``class_node`` [N], the leaf of a class.
    """

    layer_sizes: List[int]
    group_sizes: List[int]

    def __init__(self, first_child: Tensor, parent: Tensor, node_class: Tensor, class_node: Tensor):
        super().__init__()
        self.register_buffer("first_child", first_child)
        self.register_buffer("parent", parent)
        self.register_buffer("node_class", node_class)
        self.register_buffer("class_node", class_node)
        self.num_classes = class_node.numel()
        self.num_nodes = parent.numel()
        self.num_edges = self.num_nodes - 1
        self._measure()

    def _measure(self) -> None:
        # Breadth-first: a layer ends where the children of the layer above do.
        children = self.first_child.diff()
        sizes, groups, begin, end = [], [], 0, 1
        while end < self.num_nodes:
            groups.append(int(children[begin:end].max()))
            begin, end = end, int(self.first_child[end])
            sizes.append(end - begin)
        self.layer_sizes, self.group_sizes = sizes, groups
        self.depth = len(sizes)
        self.arity = max(groups, default=0)

    def _apply(self, fn, recurse=True):
        # to_empty() drops the values of all tensors; those of a tree are none that training could restore.
        tables = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, table in tables.items():
            self._buffers[name] = moved_table("LabelTree", table, self._buffers[name])
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        tables = {name: state_dict.get(prefix + name) for name in self._buffers}
        whole = all(isinstance(table, Tensor) and table.shape == self._buffers[name].shape and table.dtype == torch.int64 and not table.is_meta
                    for name, table in tables.items())
        if whole:
            try:
                made = torch.ops.xsoftmax.label_tree(tables["parent"].cpu(), tables["node_class"].cpu())
                same = all(torch.equal(one, tables[name].cpu()) for one, name in zip(made, ("first_child", "parent", "node_class", "class_node")))
                problem = None if same else "tables that contradict each other"
            except (ValueError, IndexError) as error:
                problem = str(error)
            if problem is not None:
                error_msgs.append(f"LabelTree: expected {prefix}* to hold a tree, got {problem}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._measure()  # another tree may have as many nodes

    @staticmethod
    def from_parents(parents: Union[Tensor, Sequence[int]], classes: Union[Tensor, Sequence[int], None] = None) -> "LabelTree":
        """Of nodes in any numbering: the parent of each, -1 for the root.

        Args:
            parents: [V] int64.
            classes: [V] int64, the class of each leaf and -1 for other nodes. None: the leaves are the classes in the order of their nodes.

        Raises:
            ValueError: two roots or none, a cycle, a parent that is no node, a leaf without a class, a class twice or left out.
        """
        parents = _int64("from_parents", "parents", parents)
        if classes is None:
            inside = (parents >= 0) & (parents < parents.numel())  # what else is wrong is said below
            leaf = torch.ones(parents.shape, dtype=torch.bool).index_fill_(0, parents[inside], False)
            classes = torch.where(leaf, leaf.cumsum(0) - 1, -1)
        return LabelTree._of((parents, _int64("from_parents", "classes", classes)))

    @staticmethod
    def from_nested(nested: Nested) -> "LabelTree":
        """Of lists in lists, whose numbers are the classes: ``from_nested([[0, 3], [1, [2, 4]]])``. A list stands in one place."""
        parents, classes, open_, seen = [], [], [(nested, -1)], set()
        for part, parent in open_:  # which grows
            node = len(parents)
            parents.append(parent)
            if isinstance(part, (list, tuple)):
                if not part:
                    raise ValueError("LabelTree.from_nested: expected lists that hold something, got an empty one")
                if id(part) in seen:  # within itself, where this would not end, or a class twice
                    raise ValueError("LabelTree.from_nested: expected each list in one place, got one that is in two, or within itself")
                seen.add(id(part))
                classes.append(-1)
                open_.extend((child, node) for child in part)
            elif isinstance(part, int) and not isinstance(part, bool):
                if not 0 <= part < 2**63:
                    raise ValueError(f"LabelTree.from_nested: expected classes in [0, 2^63), got {part}")
                classes.append(part)
            else:
                raise TypeError(f"LabelTree.from_nested: expected lists and ints, got {type(part).__name__}")
        return LabelTree.from_parents(parents, classes)

    @staticmethod
    def balanced(order: Union[Tensor, Sequence[int], int], arity: int = 10) -> "LabelTree":
        """The classes of ``order`` (a permutation, or their number) as leaves from left to right, in ceil(log_arity N) layers: every inner
        node cuts its own into at most ``arity`` parts whose sizes differ by at most 1 (CANE paper, appendix C)."""
        if isinstance(order, (int, np.integer)) and not isinstance(order, bool):
            order = torch.arange(_at_least("balanced", "the number of classes", int(order), 1))
        return LabelTree._of(torch.ops.xsoftmax.label_tree_balanced(_int64("balanced", "order", order), _int("balanced", "arity", arity)))

    @staticmethod
    def random(num_classes: int, arity: int = 10, generator: Optional[torch.Generator] = None) -> "LabelTree":
        """:meth:`balanced`, the classes in random order."""
        return LabelTree.balanced(torch.randperm(_at_least("random", "num_classes", num_classes, 1), generator=generator), arity)

    @staticmethod
    def from_vectors(vectors: Union[Tensor, "scipy.sparse.csr_matrix"], arity: int = 10, iterations: int = 10,  # noqa: F821
                     generator: Optional[torch.Generator] = None, *, max_leaf_size: Optional[int] = None, spherical: bool = True) -> "LabelTree":
        """:meth:`balanced`, with near classes near each other: recursive K-means with ``arity`` clusters, whose leaves are then laid from
        left to right into a balanced tree (CANE paper, appendix C).

        With ``max_leaf_size``: clusters of at most so many classes, below as few layers of at most ``arity`` children as those take, cut by
        balanced 2-means (PECOS paper, section 2.1): the tree of a hierarchical matcher.

        Args:
            vectors: [N, D], floating, finite: a vector for each class, such as the mean of the features of its examples, or the rows of a
                trained output layer. Beside ``max_leaf_size`` a scipy CSR matrix, too.
            iterations: of each K-means.
            spherical: beside ``max_leaf_size``: centres are normalised, so that directions count; the vectors should be, too.
        """
        arity, iterations = _int("from_vectors", "arity", arity), _at_least("from_vectors", "iterations", iterations, 1)
        if isinstance(vectors, np.ndarray):
            vectors = torch.from_numpy(vectors)
        if isinstance(vectors, Tensor) and (not vectors.is_floating_point() or vectors.layout != torch.strided or vectors.dim() != 2):
            raise TypeError(f"LabelTree.from_vectors: expected dense vectors [N, D] of a floating dtype, got {list(vectors.shape)}, "
                            f"{str(vectors.dtype).removeprefix('torch.')}, {vectors.layout}")
        if max_leaf_size is not None:
            seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=generator)
            return LabelTree._of(torch.ops.xsoftmax.label_tree_clusters(
                seed, *_sparse_rows(vectors), vectors.shape[1], arity, _at_least("from_vectors", "max_leaf_size", max_leaf_size, 1),
                iterations, spherical))
        if not isinstance(vectors, Tensor):
            raise TypeError(f"LabelTree.from_vectors: expected vectors to be a tensor, got {type(vectors).__name__}")
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, generator=generator)
        order = torch.ops.xsoftmax.label_tree_kmeans_order(seed, vectors, arity, iterations)
        return LabelTree.balanced(order, arity)

    @staticmethod
    def from_frequencies(counts: Tensor, subsets: int) -> "LabelTree":
        """One layer of ``subsets`` nodes with nearly the same sum of counts; below them the classes, by falling count (CANE paper,
        section 5).

        Args:
            counts: [N], of any number type, none below 0.
        """
        return LabelTree._of(torch.ops.xsoftmax.label_tree_equal_mass(_counts("from_frequencies", counts),
                                                                              _int("from_frequencies", "subsets", subsets)))

    @staticmethod
    def huffman(counts: Tensor, arity: int = 2) -> "LabelTree":
        """The tree of the least expected depth when classes come with frequencies ``counts`` [N] (Huffman, 1952)."""
        return LabelTree._of(torch.ops.xsoftmax.label_tree_huffman(_counts("huffman", counts), _int("huffman", "arity", arity)))

    @staticmethod
    def _of(nodes: Tuple[Tensor, Tensor]) -> "LabelTree":
        return LabelTree(*torch.ops.xsoftmax.label_tree(*nodes))

    @torch.jit.unused
    def clone(self) -> "LabelTree":
        """The same tree, with buffers of its own."""
        return LabelTree(self.first_child.clone(), self.parent.clone(), self.node_class.clone(), self.class_node.clone())

    @torch.jit.unused
    def save(self, path: Union[str, PathLike]) -> None:
        """For :meth:`load`, by torch.save."""
        torch.save(self.state_dict(), path)

    @staticmethod
    def load(path: Union[str, PathLike]) -> "LabelTree":
        """What :meth:`save` wrote, checked."""
        try:
            state = torch.load(path, weights_only=True)
        except OSError:
            raise
        except Exception as error:  # whatever torch.load meets in a file that it did not write
            raise ValueError(f"LabelTree.load: expected a file of LabelTree.save, got another one: {path} ({error})") from error
        names = ("first_child", "parent", "node_class", "class_node")
        if not isinstance(state, dict) or not all(isinstance(state.get(name), Tensor) for name in names):
            raise ValueError(f"LabelTree.load: expected a file of LabelTree.save, got another one: {path}")
        tree = LabelTree.from_parents(state["parent"], state["node_class"])
        if not all(torch.equal(state[name], getattr(tree, name)) for name in names):
            raise ValueError(f"LabelTree.load: expected a tree, got tables that contradict each other: {path}")
        return tree

    @torch.jit.export
    def path(self, ids: Tensor) -> Tensor:
        """The nodes from below the root to each class of ``ids`` [*] in [0, N): [*, depth], -1 behind the leaf."""
        node = torch.ops.xsoftmax.label_tree_nodes(self.class_node, ids, -(1 << 62))  # no id is ignored
        up = [node]
        for _ in range(self.depth - 1):
            node = torch.where(node > 0, self.parent[node.clamp_min(0)], -1)
            up.append(node)
        path = torch.stack(up[::-1], -1)[..., : self.depth]
        path = torch.where(path > 0, path, -1)
        # Shallow leaves begin with -1: those go behind.
        order = (path < 0).to(torch.int8).argsort(dim=-1, stable=True)
        return path.gather(-1, order)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, num_nodes={self.num_nodes}, depth={self.depth}, arity={self.arity}"

    @torch.jit.unused
    def plot(self, names: Optional[Sequence[str]] = None, ax=None):
        """Draws a tree of at most 500 nodes with matplotlib, and returns the axes.

        Args:
            names: of the classes, for the leaves; None: their ids.
        """
        import matplotlib.pyplot as plt
        from matplotlib.collections import LineCollection

        if self.num_nodes > 500:
            raise ValueError(f"LabelTree.plot: expected a tree of at most 500 nodes, got {self.num_nodes}")
        if names is not None and len(names) != self.num_classes:
            raise ValueError(f"LabelTree.plot: expected names of {self.num_classes} classes, got {len(names)}")
        first, parent, classes = self.first_child.tolist(), self.parent.tolist(), self.node_class.tolist()
        depth = [0] * self.num_nodes
        for v in range(1, self.num_nodes):
            depth[v] = depth[parent[v]] + 1
        x, leaves, open_ = [0.0] * self.num_nodes, 0, [(0, False)]
        while open_:
            v, done = open_.pop()
            if done:
                x[v] = (x[first[v]] + x[first[v + 1] - 1]) / 2
            elif classes[v] >= 0:
                x[v], leaves = float(leaves), leaves + 1
            else:
                open_ += [(v, True), *((child, False) for child in reversed(range(first[v], first[v + 1])))]
        if ax is None:
            _, ax = plt.subplots(figsize=(max(4.0, 0.22 * leaves), 1.5 + 0.7 * self.depth), layout="constrained")
        ax.add_collection(LineCollection([[(x[parent[v]], -depth[parent[v]]), (x[v], -depth[v])] for v in range(1, self.num_nodes)],
                                         colors="0.6", linewidths=0.8))
        inner = [v for v in range(self.num_nodes) if classes[v] < 0]
        ax.plot([x[v] for v in inner], [-depth[v] for v in inner], "o", color="0.3", markersize=3)
        for v in range(self.num_nodes):
            if classes[v] >= 0:
                ax.annotate(str(classes[v] if names is None else names[classes[v]]), (x[v], -depth[v]), ha="center", va="top", fontsize=7,
                            rotation=0 if names is None else 90, xytext=(0, -2), textcoords="offset points")
        ax.margins(0.02, 0.15)
        ax.set_axis_off()
        return ax


def _sparse_rows(vectors: Union[Tensor, "scipy.sparse.csr_matrix"]) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: F821
    """Offsets int64, columns int32 and values float32 of the rows."""
    if isinstance(vectors, Tensor):
        rows = vectors.detach().to("cpu", torch.float32)
        there = rows != 0
        columns = torch.arange(rows.shape[1], dtype=torch.int32).expand(rows.shape)[there]
        return torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)]), columns, rows[there]
    if getattr(vectors, "format", None) != "csr":
        raise TypeError(f"LabelTree.from_vectors: expected vectors to be a tensor, an array or a scipy CSR matrix, got {type(vectors).__name__}")
    return sparse_tensors(checked("LabelTree.from_vectors", "vectors", vectors))


def _int(name: str, argument: str, value: int) -> int:
    return check_count(f"LabelTree.{name}", argument, value, None)


def _int64(name: str, argument: str, values: Union[Tensor, Sequence[int]]) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"LabelTree.{name}: expected {argument} as int64 numbers, got {type(values).__name__} ({error})") from error
    if tensor.dtype != torch.int64 and tensor.numel() > 0:
        raise TypeError(f"LabelTree.{name}: expected {argument} of dtype int64, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.to("cpu", torch.int64)


def _counts(name: str, counts: Union[Tensor, Sequence[float]]) -> Tensor:
    tensor = torch.as_tensor(counts)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"LabelTree.{name}: expected counts that are numbers, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.detach().to("cpu", torch.float64)


def _at_least(name: str, argument: str, value: int, least: int) -> int:
    return check_count(f"LabelTree.{name}", argument, value, least)
