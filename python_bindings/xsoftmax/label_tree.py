"""Trees whose leaves are the classes."""

import os
from os import PathLike
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

from . import _long_work
from ._checks import as_tensor, check_count
from ._files import open_regular, replaced
from ._memory import moved_table
from ._options import option_text
from ._ranks import Alone, digest, ranks_of
from ._sparse import canonical, sparse_tensors, tensor_of
from ._typing import Module, Numbers

if TYPE_CHECKING:
    import scipy.sparse

Nested = Sequence[Union[int, "Nested"]]


class LabelTree(Module):
    """A tree whose leaves are the classes 0 .. N - 1, as tensors: for :class:`BeamTreeLoss`, :class:`HierarchicalSoftmaxLoss`, :class:`HierarchicalMatcher`
    and :class:`XRLinear`.

    Nodes are numbered breadth-first: node 0 is the root, and the children of a node stand together. A node other than the root stands for the edge that leads
    to it: edge e ends in node e + 1. Any shape is allowed: leaves at any depth, nodes with one child, a single node.

    Made by :meth:`from_vectors`, :meth:`from_frequencies`, :meth:`huffman`, :meth:`from_parents`, :meth:`from_nested`, :meth:`balanced` or
    :meth:`random`.

    Buffers, all int64, with V the number of nodes: ``first_child`` [V + 1], node v has the children ``first_child[v]`` .. ``first_child[v + 1] - 1``;
    ``parent`` [V], -1 for the root; ``node_class`` [V], the class of a leaf, else -1; ``class_node`` [N], the leaf of a class.

    The methods that make a tree say which errors they raise.
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
        self.layer_sizes, self.group_sizes = torch.ops.xsoftmax.label_tree_layers(self.first_child).tolist()
        self.depth = len(self.layer_sizes)
        self.arity = max(self.group_sizes, default=0)

    def tables(self) -> List[Tensor]:
        """The tree as operators take it."""
        return [self.first_child, self.parent, self.node_class, self.class_node]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # to_empty() drops the values of all tensors; those of a tree are none that training could restore.
        tables: Dict[str, Any] = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, table in tables.items():
            self._buffers[name] = moved_table("LabelTree", table, self._buffers[name])
        return self

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        tables: Dict[str, Any] = {name: state_dict.get(prefix + name) for name in self._buffers}
        whole = all(isinstance(table, Tensor) and table.shape == getattr(self, name).shape and table.dtype == torch.int64 and not table.is_meta
                    for name, table in tables.items())
        if whole:
            problem = _problem(list(tables.values()))
            if problem:
                error_msgs.append(f"LabelTree: expected {prefix}* to hold a tree, got {problem}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._measure()  # another tree may have as many nodes

    @staticmethod
    def from_parents(parents: Union[Tensor, Sequence[int]], classes: Union[Tensor, Sequence[int], None] = None) -> "LabelTree":
        """Makes a tree of nodes in any numbering: the parent of each, -1 for the root.

        Args:
            parents: int64 [V], at least one node.
            classes: int64 [V], the class of each leaf and -1 for other nodes. None: the leaves are the classes in the order of their nodes.

        Raises:
            ValueError: two roots or none, a cycle, a parent that is no node, a leaf without a class, a class twice or left out, another shape.
            TypeError: parents or classes are not int64 numbers.
        """
        known = None if classes is None else _int64("from_parents", "classes", classes)
        return LabelTree._of((_int64("from_parents", "parents", parents), known))

    @staticmethod
    def from_nested(nested: Nested) -> "LabelTree":
        """Makes a tree of lists in lists, whose numbers are the classes: ``from_nested([[0, 3], [1, [2, 4]]])``. A list stands in one place.

        Raises:
            ValueError: an empty list, a list that stands in two places, a class below 0, twice or left out.
            TypeError: a part that is neither a list nor an int.
        """
        parents: List[int] = []
        classes: List[int] = []
        open_, seen = [(nested, -1)], set()
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
        """Makes a balanced tree: the classes of ``order`` as leaves from left to right, in ceil(log_arity N) layers.

        Every inner node cuts its classes into at most ``arity`` parts whose sizes differ by at most 1 (Han et al., 2018, appendix C).

        Args:
            order: int64 [N], a permutation of the classes; or N, for the classes in their order.
            arity: children of a node, at least 2.

        Raises:
            ValueError: no classes, an order that is no permutation, an arity below 2.
            TypeError: order is not of int64 numbers, or arity is not an int.
        """
        if isinstance(order, (int, np.integer)) and not isinstance(order, bool):
            order = torch.arange(check_count("LabelTree.balanced", "the number of classes", order, 1))
        order = _int64("balanced", "order", order)  # type: ignore[arg-type]
        return LabelTree._of(torch.ops.xsoftmax.label_tree_balanced(order, check_count("LabelTree.balanced", "arity", arity, None)))

    @staticmethod
    def random(num_classes: int, arity: int = 10, generator: Optional[torch.Generator] = None) -> "LabelTree":
        """Makes a :meth:`balanced` tree with the classes in random order.

        Args:
            num_classes: N >= 1.
            arity: children of a node, at least 2.
            generator: on the CPU. None: torch's default one.

        Raises:
            ValueError, TypeError: as :meth:`balanced`
        """
        return LabelTree.balanced(torch.randperm(check_count("LabelTree.random", "num_classes", num_classes, 1), generator=generator), arity)

    @staticmethod
    def from_vectors(vectors: Union[Tensor, "scipy.sparse.csr_matrix"], arity: int = 10, iterations: int = 10,
                     generator: Optional[torch.Generator] = None, *, max_leaf_size: Optional[int] = None, spherical: bool = True,
                     group: Union["torch.distributed.ProcessGroup", "torch.distributed.DeviceMesh", None] = None) -> "LabelTree":
        """Makes a :meth:`balanced` tree with near classes near each other, by recursive K-means.

        K-means cuts the classes into ``arity`` clusters, and each cluster again. The leaves are then laid from left to right into a balanced tree (Han et al.,
        2018, appendix C).

        With ``max_leaf_size`` the tree has clusters of at most that many classes. Above them stand as few layers of at most ``arity`` children as that takes,
        cut by balanced 2-means (Yu et al., 2022, section 2.1). It is the tree of :class:`HierarchicalMatcher` and :class:`XRLinear`.

        Args:
            vectors: floating [N, D], finite, a tensor or an array: a vector for each class, such as the mean of the features of its examples, or the rows of a
                trained output layer. Beside ``max_leaf_size`` a scipy sparse matrix, too.
            arity: at least 2.
            iterations: of each K-means, at least 1.
            generator: on the CPU. None: torch's default one.
            max_leaf_size: at least 1, or None.
            spherical: beside ``max_leaf_size``: centres are normalised, so that directions count; the vectors should be normalised, too.
            group: beside ``max_leaf_size`` and a sparse matrix: a process group whose ranks share the work, all with the same arguments. The tree is that of
                one process with the first rank's generator. A process group with a backend for the CPU, or a DeviceMesh of one dimension.

        Raises:
            ValueError: no vectors, or vectors that are not finite or not of two dimensions; an option out of range; arguments that differ between ranks.
            TypeError: vectors of another type or dtype, a sparse matrix without ``max_leaf_size``, or group without one; an option of another type.
        """
        owner = "LabelTree.from_vectors"
        arity, iterations = check_count(owner, "arity", arity, None), check_count(owner, "iterations", iterations, 1)
        leaf_size = 0 if max_leaf_size is None else check_count(owner, "max_leaf_size", max_leaf_size, 1)
        options = {"arity": arity, "iterations": iterations, "max_leaf_size": leaf_size, "spherical": spherical}
        if leaf_size > 0 and getattr(vectors, "format", None) is not None:
            ranks = ranks_of(owner, group)
            rows = ranks.do(lambda: sparse_tensors(canonical(owner, "vectors", vectors), owner))
            ranks.check_alike(lambda: {"vectors": f"{list(vectors.shape)} (digest {digest(*rows)})", **options})
            return LabelTree._of_clusters(rows, vectors.shape[1], options, generator, ranks)
        if group is not None:
            raise TypeError(f"{owner}: expected max_leaf_size and a scipy sparse matrix beside group, got {type(vectors).__name__}"
                            + ("" if leaf_size > 0 else " without max_leaf_size"))
        if isinstance(vectors, np.ndarray):
            vectors = tensor_of(vectors)
        if not isinstance(vectors, Tensor):
            raise TypeError(f"{owner}: expected vectors as a tensor, an array or, beside max_leaf_size, a scipy sparse matrix, "
                            f"got {type(vectors).__name__}")
        return LabelTree._of(_long_work.run("tree", torch.ops.xsoftmax.label_tree_from_vectors, _seed(generator), vectors, option_text(**options)))

    @staticmethod
    def _of_clusters(rows: Tuple[Tensor, Tensor, Tensor], features: int, options: Dict[str, Union[int, bool]], generator: Optional[torch.Generator],
                     ranks: Alone) -> "LabelTree":
        """rows, features, options: the same on all ranks."""
        arity, iterations, leaf_size, spherical = options.values()
        seed, ops = ranks.first(_seed(generator)), torch.ops.xsoftmax
        if ranks.size == 1:
            return LabelTree._of(_long_work.run("tree", ops.label_tree_clusters, seed, *rows, features, arity, leaf_size, iterations, spherical))
        order, cuts, text = torch.arange(len(rows[0]) - 1, dtype=torch.int32), torch.tensor(0), option_text(**options)
        while cuts >= 0:
            share, cuts = ranks.do(lambda: _long_work.run("tree", ops.label_tree_cuts, seed, rows, features, order, int(cuts), ranks.rank, ranks.size, text))
            order = ranks.sum(share)
        return LabelTree._of(ops.label_tree_of_clusters(order, arity, leaf_size))

    @staticmethod
    def from_frequencies(counts: Numbers, subsets: int) -> "LabelTree":
        """Makes a tree of one layer of ``subsets`` nodes with nearly the same sum of counts, and below them the classes, by falling count (Han et al., 2018,
        section 5).

        Args:
            counts: [N] of any real dtype, finite, none below 0.
            subsets: in [1, N].

        Raises:
            ValueError: counts or subsets that are not as above.
            TypeError: counts are not numbers, or subsets is not an int.
        """
        subsets = check_count("LabelTree.from_frequencies", "subsets", subsets, None)
        return LabelTree._of(torch.ops.xsoftmax.label_tree_equal_mass(as_tensor("LabelTree.from_frequencies", "counts", counts), subsets))

    @staticmethod
    def huffman(counts: Numbers, arity: int = 2) -> "LabelTree":
        """Makes the tree of the least expected depth, for classes that come with the frequencies ``counts`` (Huffman, 1952).

        Args:
            counts: [N] of any real dtype, finite, none below 0.
            arity: children of a node, at least 2.

        Raises:
            ValueError: counts or arity that are not as above.
            TypeError: counts are not numbers, or arity is not an int.
        """
        arity = check_count("LabelTree.huffman", "arity", arity, None)
        return LabelTree._of(torch.ops.xsoftmax.label_tree_huffman(as_tensor("LabelTree.huffman", "counts", counts), arity))

    @staticmethod
    def _of(nodes: Tuple[Tensor, Optional[Tensor]]) -> "LabelTree":
        return LabelTree(*torch.ops.xsoftmax.label_tree(*nodes))

    @torch.jit.unused
    def clone(self) -> "LabelTree":
        """The same tree, with buffers of its own."""
        return LabelTree(*(table.clone() for table in self.tables()))

    @torch.jit.unused
    def save(self, path: Union[str, "PathLike[str]"]) -> None:
        """Writes a file for :meth:`load`, by torch.save. An error leaves an older file as it was.

        Raises:
            IsADirectoryError, ValueError: a folder, or a FIFO, socket or device, has the name.
            OSError, RuntimeError: the file cannot be written.
        """
        with replaced("LabelTree.save", path) as draft:
            torch.save(self.state_dict(), draft)

    @staticmethod
    def load(path: Union[str, "PathLike[str]"]) -> "LabelTree":
        """Reads and checks what :meth:`save` wrote.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: no file there, or one that cannot be read.
            ValueError: a file that does not hold a tree, or a FIFO, socket or device.
        """
        try:
            file = open_regular("LabelTree.load", path)
        except PermissionError as error:
            raise PermissionError(f"LabelTree.load: cannot read {os.fspath(path)}: {error.strerror}") from None
        try:
            with file:
                state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch.load meets in a file that it did not write; it advises to load what nobody checks
            raise ValueError(f"LabelTree.load: expected a file of LabelTree.save, got another one, or a part of one: {path}") from error
        names = ("first_child", "parent", "node_class", "class_node")
        if not isinstance(state, dict) or not all(isinstance(state.get(name), Tensor) for name in names):
            raise ValueError(f"LabelTree.load: expected a file of LabelTree.save, got another one: {path}")
        tables = [state[name] for name in names]
        plain = all(table.layout == torch.strided and not table.is_meta and table.is_contiguous() for table in tables)
        problem = _problem(tables) if plain else "tables that are not dense and contiguous"  # one number may stand for any size
        if problem:
            raise ValueError(f"LabelTree.load: expected a tree, got {problem}: {path}")
        return LabelTree(*tables)

    @torch.jit.export
    def path(self, ids: Tensor) -> Tensor:
        """The nodes from below the root to each class: ids int64 [*] in [0, N) -> int64 [*, depth], -1 behind the leaf.

        Raises:
            TypeError: ids are not int64.
            IndexError: an id is not in [0, N) (checked on the CPU).
        """
        return torch.ops.xsoftmax.label_tree_path(self.class_node, self.parent, ids, self.depth)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, num_nodes={self.num_nodes}, depth={self.depth}, arity={self.arity}"

    @torch.jit.unused
    def plot(self, names: Optional[Sequence[str]] = None, ax: Any = None) -> Any:
        """Draws a tree of at most 500 nodes with matplotlib, and returns the axes.

        Args:
            names: of the classes, for the leaves; None: their ids.
            ax: the axes to draw on. None: new ones.

        Raises:
            ValueError: a tree of more nodes.
        """
        from ._plot import plot_tree

        return plot_tree(self, names, ax)


def _seed(generator: Optional[torch.Generator]) -> Tensor:
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=generator)


def _problem(tables: List[Tensor]) -> str:
    """Returns what is wrong with the tables of a tree, or "" where they are one."""
    try:
        torch.ops.xsoftmax.check_label_tree(tables)
    except (ValueError, IndexError, TypeError, RuntimeError) as error:
        return str(error).removeprefix("check_label_tree: expected a tree, got ")
    return ""


def _int64(name: str, argument: str, values: Union[Tensor, Sequence[int]]) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"LabelTree.{name}: expected {argument} as int64 numbers, got {type(values).__name__} ({error})") from error
    return tensor if tensor.numel() > 0 else tensor.to(torch.int64)  # an empty list is of no dtype
