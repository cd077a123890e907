"""Label trees: trees whose leaves are the classes."""

import os
from os import PathLike
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

from .._core import long_work
from .._core.checks import as_tensor, check_bool, check_count
from .._core.files import open_regular, replace_file
from .._core.memory import move_table
from .._core.options import option_text
from .._core.ranks import SingleProcess, digest, ranks_of
from .._core.sparse import canonical, sparse_tensors, tensor_of
from .._core.typing import Module, Numbers

if TYPE_CHECKING:
    import scipy.sparse

Nested = Sequence[Union[int, "Nested"]]


class LabelTree(Module):
    """A tree whose leaves are the classes 0 .. N - 1, stored as tensors.

    Used by :class:`BeamTreeLoss`, :class:`HierarchicalSoftmaxLoss`, :class:`HierarchicalMatcher`
    and :class:`XRLinear`.

    Nodes are numbered breadth-first: node 0 is the root, and the children of a node have
    consecutive numbers. Each node except the root identifies the edge that leads to it: edge e ends
    in node e + 1. The tree may have any shape: leaves at any depth, nodes with one child, a single
    node.

    Build one with :meth:`from_vectors`, :meth:`from_frequencies`, :meth:`huffman`,
    :meth:`from_parents`, :meth:`from_nested`, :meth:`balanced` or :meth:`random`. Each of these
    methods lists the errors that it raises.

    Attributes:
        first_child: int64 buffer [V + 1], with V the number of nodes. The children of node v are
            ``first_child[v]`` .. ``first_child[v + 1] - 1``.
        parent: int64 buffer [V], the parent of each node; -1 for the root.
        node_class: int64 buffer [V], the class of each leaf; -1 for inner nodes.
        class_node: int64 buffer [N], the leaf of each class.
        num_classes: N.
        num_nodes: V.
        num_edges: V - 1.
        depth: the number of layers below the root.
        arity: the largest number of children of a node.
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
        self.layer_sizes, self.group_sizes = torch.ops.xsoftmax.label_tree_layers(
            self.first_child).tolist()
        self.depth = len(self.layer_sizes)
        self.arity = max(self.group_sizes, default=0)

    def tables(self) -> List[Tensor]:
        """Returns the buffers in the order in which operators take them."""
        return [self.first_child, self.parent, self.node_class, self.class_node]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # to_empty() discards the values of all tensors. Training could not restore those of a tree.
        tables: Dict[str, Any] = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, table in tables.items():
            self._buffers[name] = move_table("LabelTree", table, self._buffers[name])
        return self

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        tables: Dict[str, Any] = {name: state_dict.get(prefix + name) for name in self._buffers}
        is_complete = all(
            isinstance(table, Tensor) and table.shape == getattr(self, name).shape
            and table.dtype == torch.int64 and not table.is_meta for name, table in tables.items())
        if is_complete:
            problem = _find_problem(list(tables.values()))
            if problem:
                error_msgs.append(f"LabelTree: expected {prefix}* to hold a tree, got {problem}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        self._measure()  # a different tree may have the same number of nodes

    @staticmethod
    def from_parents(parents: Union[Tensor, Sequence[int]],
                     classes: Union[Tensor, Sequence[int], None] = None) -> "LabelTree":
        """Builds a tree from the parent of each node. Nodes may be numbered in any order.

        Args:
            parents: int64 [V], at least one node; -1 for the root.
            classes: int64 [V], the class of each leaf, and -1 for inner nodes. None: the leaves
                receive the classes in the order of their nodes.

        Raises:
            ValueError: no root or several, a cycle, a parent that is not a node, a leaf without a
                class, a class that is missing or occurs twice, or a wrong shape.
            TypeError: parents or classes are not int64 numbers.
        """
        class_ids = None if classes is None else _as_int64("from_parents", "classes", classes)
        return LabelTree._from_nodes((_as_int64("from_parents", "parents", parents), class_ids))

    @staticmethod
    def from_nested(nested: Nested) -> "LabelTree":
        """Builds a tree from nested lists of class ids.

        Args:
            nested: lists of lists and ints, such as ``[[0, 3], [1, [2, 4]]]``. The same list object
                may occur only once.

        Raises:
            ValueError: an empty list, a list object that occurs twice, or a class that is below 0,
                missing or occurs twice.
            TypeError: an element is neither a list nor an int.
        """
        parents: List[int] = []
        classes: List[int] = []
        queue, list_ids = [(nested, -1)], set()
        for part, parent in queue:  # the loop appends to it
            node = len(parents)
            parents.append(parent)
            if isinstance(part, (list, tuple)):
                if not part:
                    raise ValueError("LabelTree.from_nested: expected lists that hold something, "
                                     "got an empty one")
                if id(part
                      ) in list_ids:  # a list inside itself would never end; else a class repeats
                    raise ValueError("LabelTree.from_nested: expected each list in one place, got "
                                     "one that is in two, or within itself")
                list_ids.add(id(part))
                classes.append(-1)
                queue.extend((child, node) for child in part)
            elif isinstance(part, int) and not isinstance(part, bool):
                if not 0 <= part < 2**63:
                    raise ValueError("LabelTree.from_nested: expected classes in [0, 2^63), got "
                                     f"{part}")
                classes.append(part)
            else:
                raise TypeError("LabelTree.from_nested: expected lists and ints, got "
                                f"{type(part).__name__}")
        return LabelTree.from_parents(parents, classes)

    @staticmethod
    def balanced(order: Union[Tensor, Sequence[int], int], arity: int = 10) -> "LabelTree":
        """Builds a balanced tree of ceil(log_arity N) layers whose leaves, from left to right, are
        the classes in the given order.

        Each inner node splits its classes into at most ``arity`` parts whose sizes differ by at
        most 1 (Han et al., 2018, appendix C).

        Args:
            order: int64 [N], a permutation of the classes; or an int N, for the classes in order of
                their ids.
            arity: the largest number of children of a node, at least 2.

        Raises:
            ValueError: there are no classes, ``order`` is not a permutation, or arity is below 2.
            TypeError: ``order`` does not hold int64 numbers, or arity is not an int.
        """
        if isinstance(order, (int, np.integer)) and not isinstance(order, bool):
            order = torch.arange(
                check_count("LabelTree.balanced", "the number of classes", order, 1))
        order = _as_int64("balanced", "order", order)  # type: ignore[arg-type]
        return LabelTree._from_nodes(
            torch.ops.xsoftmax.label_tree_balanced(
                order, check_count("LabelTree.balanced", "arity", arity, None)))

    @staticmethod
    def random(num_classes: int, arity: int = 10,
               generator: Optional[torch.Generator] = None) -> "LabelTree":
        """Builds a :meth:`balanced` tree with the classes in random order.

        Args:
            num_classes: N >= 1.
            arity: the largest number of children of a node, at least 2.
            generator: a CPU generator. None: torch's default generator.

        Raises:
            ValueError, TypeError: as :meth:`balanced`
        """
        return LabelTree.balanced(
            torch.randperm(check_count("LabelTree.random", "num_classes", num_classes, 1),
                           generator=generator), arity)

    @staticmethod
    def from_vectors(
        vectors: Union[Tensor, "scipy.sparse.csr_matrix"], arity: int = 10, iterations: int = 10,
        generator: Optional[torch.Generator] = None, *, max_leaf_size: Optional[int] = None,
        spherical: bool = True, balanced: bool = True,
        group: Union["torch.distributed.ProcessGroup", "torch.distributed.DeviceMesh", None] = None
    ) -> "LabelTree":
        """Builds a tree that places similar classes close to each other, by recursive K-means.

        K-means splits the classes into ``arity`` clusters, and then each cluster again. The leaves
        of that tree, from left to right, become the leaves of a :meth:`balanced` tree (Han et al.,
        2018, appendix C).

        With ``max_leaf_size``, recursive balanced 2-means instead builds clusters of at most that
        many classes, and as few layers above them as nodes of at most ``arity`` children allow (Yu
        et al., 2022, section 2.1). :class:`HierarchicalMatcher` and :class:`XRLinear` use this
        tree.

        Args:
            vectors: floating-point tensor or array [N, D], finite: one vector per class, such as
                the mean feature vector of its examples, or its row of a trained output layer. With
                ``max_leaf_size`` also a scipy sparse matrix.
            arity: the largest number of children of a node, at least 2.
            iterations: the number of iterations of each K-means run, at least 1.
            generator: a CPU generator. None: torch's default generator.
            max_leaf_size: the largest number of classes in a cluster, at least 1; or None.
            spherical: normalise the cluster centres, so that only directions matter; the vectors
                should then be normalised too. Applies only with ``max_leaf_size``.
            balanced: whether siblings have equal sizes. False: each class goes to the closer of two
                centres, so clusters of similar classes stay together, and the tree has more nodes
                and more layers (as in Bonsai; Khandagale et al., 2020). Requires
                ``max_leaf_size`` and no ``group``.
            group: a process group whose ranks share the work: one with a CPU backend, or a
                one-dimensional DeviceMesh. All ranks pass the same arguments. The result is the
                tree that a single process builds with the generator of the first rank. Requires
                ``max_leaf_size`` and a sparse matrix.

        Raises:
            ValueError: vectors are empty, not finite or not two-dimensional; an option is out of
                range; or arguments differ between ranks.
            TypeError: vectors have an unsupported type or dtype; a sparse matrix is passed without
                ``max_leaf_size``, or ``group`` without either; or an option has the wrong type.
        """
        owner = "LabelTree.from_vectors"
        arity, iterations = check_count(owner, "arity", arity,
                                        None), check_count(owner, "iterations", iterations, 1)
        leaf_size = 0 if max_leaf_size is None else check_count(owner, "max_leaf_size",
                                                                max_leaf_size, 1)
        options = {
            "arity": arity, "iterations": iterations, "max_leaf_size": leaf_size,
            "spherical": spherical, "balanced": check_bool(owner, "balanced", balanced)
        }
        if group is not None and not balanced:
            raise ValueError(f"{owner}: expected balanced=True with a group, got False")
        if leaf_size > 0 and getattr(vectors, "format", None) is not None:
            ranks = ranks_of(owner, group)
            rows = ranks.run_together(
                lambda: sparse_tensors(canonical(owner, "vectors", vectors), owner))
            ranks.check_equal(
                lambda: {"vectors": f"{list(vectors.shape)} (digest {digest(*rows)})", **options})
            return LabelTree._from_clusters(rows, vectors.shape[1], options, generator, ranks)
        if group is not None:
            raise TypeError(f"{owner}: expected max_leaf_size and a scipy sparse matrix with "
                            f"group, got {type(vectors).__name__}" +
                            ("" if leaf_size > 0 else " without max_leaf_size"))
        if isinstance(vectors, np.ndarray):
            vectors = tensor_of(vectors)
        if not isinstance(vectors, Tensor):
            raise TypeError(f"{owner}: expected vectors as a tensor, an array or, with "
                            "max_leaf_size, a scipy sparse matrix, "
                            f"got {type(vectors).__name__}")
        return LabelTree._from_nodes(
            long_work.run("tree", torch.ops.xsoftmax.label_tree_from_vectors, _draw_seed(generator),
                          vectors, option_text(**options)))

    @staticmethod
    def _from_clusters(rows: Tuple[Tensor, Tensor,
                                   Tensor], features: int, options: Dict[str, Union[int, bool]],
                       generator: Optional[torch.Generator], ranks: SingleProcess) -> "LabelTree":
        """Builds the tree of clusters. rows, features and options are the same on all ranks."""
        ops, text = torch.ops.xsoftmax, option_text(**options)
        seed = ranks.share_first(_draw_seed(generator))
        if ranks.size == 1:
            return LabelTree._from_nodes(
                long_work.run("tree", ops.label_tree_clusters, seed, *rows, features, text))
        order, cuts = torch.arange(len(rows[0]) - 1, dtype=torch.int32), torch.tensor(0)
        while cuts >= 0:
            share, cuts = ranks.run_together(
                lambda: long_work.run("tree", ops.label_tree_cuts, seed, rows, features, order,
                                      int(cuts), ranks.rank, ranks.size, text))
            order = ranks.sum(share)
        return LabelTree._from_nodes(
            ops.label_tree_of_clusters(order, options["arity"], options["max_leaf_size"]))

    @staticmethod
    def from_frequencies(counts: Numbers, subsets: int) -> "LabelTree":
        """Builds a two-layer tree: ``subsets`` nodes with nearly equal sums of counts, and below
        them the classes in order of decreasing count (Han et al., 2018, section 5).

        Args:
            counts: [N], any real dtype, finite and non-negative.
            subsets: the number of nodes of the first layer, in [1, N].

        Raises:
            ValueError: counts or subsets violate the conditions above.
            TypeError: counts are not numbers, or subsets is not an int.
        """
        subsets = check_count("LabelTree.from_frequencies", "subsets", subsets, None)
        return LabelTree._from_nodes(
            torch.ops.xsoftmax.label_tree_equal_mass(
                as_tensor("LabelTree.from_frequencies", "counts", counts), subsets))

    @staticmethod
    def huffman(counts: Numbers, arity: int = 2) -> "LabelTree":
        """Builds the Huffman tree: the tree with the smallest expected depth of a class that occurs
        with the given frequencies (Huffman, 1952).

        Args:
            counts: the class frequencies [N], any real dtype, finite and non-negative.
            arity: the largest number of children of a node, at least 2.

        Raises:
            ValueError: counts or arity violate the conditions above.
            TypeError: counts are not numbers, or arity is not an int.
        """
        arity = check_count("LabelTree.huffman", "arity", arity, None)
        return LabelTree._from_nodes(
            torch.ops.xsoftmax.label_tree_huffman(as_tensor("LabelTree.huffman", "counts", counts),
                                                  arity))

    @staticmethod
    def _from_nodes(nodes: Tuple[Tensor, Optional[Tensor]]) -> "LabelTree":
        return LabelTree(*torch.ops.xsoftmax.label_tree(*nodes))

    @torch.jit.unused
    def clone(self) -> "LabelTree":
        """Returns a copy of the tree with copies of its buffers."""
        return LabelTree(*(table.clone() for table in self.tables()))

    @torch.jit.unused
    def save(self, path: Union[str, "PathLike[str]"]) -> None:
        """Saves the tree to a file with torch.save. On an error an existing file is left unchanged.

        Args:
            path: the file to write; read it back with :meth:`load`.

        Raises:
            IsADirectoryError, ValueError: ``path`` is a folder, or a FIFO, socket or device.
            OSError, RuntimeError: the file cannot be written.
        """
        with replace_file("LabelTree.save", path) as draft:
            torch.save(self.state_dict(), draft)

    @staticmethod
    def load(path: Union[str, "PathLike[str]"]) -> "LabelTree":
        """Loads and validates a tree saved by :meth:`save`.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: the file does not exist, is a
                folder, or cannot be read.
            ValueError: the file does not hold a tree, or is a FIFO, socket or device.
        """
        try:
            file = open_regular("LabelTree.load", path)
        except PermissionError as error:
            raise PermissionError(f"LabelTree.load: cannot read {os.fspath(path)}: "
                                  f"{error.strerror}") from None
        try:
            with file:
                state = torch.load(file, map_location="cpu", weights_only=True)
        # torch.load raises many types for a foreign file, and may advise weights_only=False
        except Exception as error:
            raise ValueError("LabelTree.load: expected a file of LabelTree.save, got another one, "
                             f"or a part of one: {path}") from error
        names = ("first_child", "parent", "node_class", "class_node")
        if not isinstance(state, dict) or not all(
                isinstance(state.get(name), Tensor) for name in names):
            raise ValueError("LabelTree.load: expected a file of LabelTree.save, got another one: "
                             f"{path}")
        tables = [state[name] for name in names]
        is_plain = all(
            table.layout == torch.strided and not table.is_meta and table.is_contiguous()
            for table in tables)
        # an expanded tensor can store one number and claim any size
        problem = _find_problem(tables) if is_plain else "tables that are not dense and contiguous"
        if problem:
            raise ValueError(f"LabelTree.load: expected a tree, got {problem}: {path}")
        return LabelTree(*tables)

    @torch.jit.export
    def path(self, ids: Tensor) -> Tensor:
        """Returns the path from the root to each class, without the root.

        Args:
            ids: int64 [*], classes in [0, N).

        Returns:
            int64 [*, depth], the nodes of each path, padded with -1 after the leaf.

        Raises:
            TypeError: ids are not int64.
            IndexError: an id is not in [0, N) (checked on the CPU).
        """
        return torch.ops.xsoftmax.label_tree_path(self.class_node, self.parent, ids, self.depth)

    def extra_repr(self) -> str:
        return (f"num_classes={self.num_classes}, num_nodes={self.num_nodes}, depth={self.depth}, "
                f"arity={self.arity}")

    @torch.jit.unused
    def plot(self, names: Optional[Sequence[str]] = None, ax: Any = None) -> Any:
        """Draws a tree of at most 500 nodes with matplotlib, and returns the axes.

        Args:
            names: names of the classes, to label the leaves. None: the class ids.
            ax: the axes to draw on. None: new axes.

        Raises:
            ValueError: the tree has more than 500 nodes.
        """
        from .._core.plot import plot_tree

        return plot_tree(self, names, ax)


def _draw_seed(generator: Optional[torch.Generator]) -> Tensor:
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=generator)


def _find_problem(tables: List[Tensor]) -> str:
    """Returns why the tables do not form a tree, or "" if they do."""
    try:
        torch.ops.xsoftmax.check_label_tree(tables)
    except (ValueError, IndexError, TypeError, RuntimeError) as error:
        return str(error).removeprefix("check_label_tree: expected a tree, got ")
    return ""


def _as_int64(name: str, argument: str, values: Union[Tensor, Sequence[int]]) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"LabelTree.{name}: expected {argument} as int64 numbers, got "
                        f"{type(values).__name__} ({error})") from error
    # torch.as_tensor([]) is float32
    return tensor if tensor.numel() > 0 else tensor.to(torch.int64)
