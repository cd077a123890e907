"""Extreme multi-label classification by sparse linear classifiers down a tree of labels."""

import json
import time
import warnings
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

from . import _long_work, label_vectors
from ._checks import check_count
from ._files import open_regular
from ._options import option_text
from ._ranks import Alone, digest, ranks_of
from ._sparse import canonical, csr_matrix, index_tensors, query_tensors, sparse_tensors, tensor_of
from .label_tree import LabelTree

if TYPE_CHECKING:
    import scipy.sparse

Matrix = Union["scipy.sparse.csr_matrix", "scipy.sparse.csr_array"]
Progress = Callable[[int, int, int, int], None]

_LOSSES = ("hinge", "logistic", "squared_hinge")
_NEGATIVES = ("tfn", "man", "user")
_FEW = 256  # queries, which take no time that anybody would interrupt


class XRLinear:
    r"""XR-Linear: a tree of labels with a sparse linear classifier for each of its nodes (Yu et al., 2022, section 3).

    A beam search looks up the labels of a query x [D]. A node c below p, which x reaches with the score s_p, has the score::

        s_c = s_p * e^{-max(0, 1 - w_c.x - b_c)^3}

    and on each layer the ``beam`` best nodes go on. :meth:`predict` takes other transforms of w.x and other combinations with the parent's score.

    Made by :meth:`train` or :meth:`load`. ``model`` is the torch class ``torch.classes.xsoftmax.XRLinear``: an attribute of a module that is scripted, and in
    C++ ``xsoftmax::XRLinear``. ``stats``: for each layer, what its training took. ``notes``: anything that JSON has, kept with a saved model.

    Shapes and dtypes: examples X [n, D] and labels Y [n, L], scipy sparse; scores float32 [n, L]. Errors as :meth:`train`, :meth:`predict` and :meth:`load`.
    """

    def __init__(self, model: Any, stats: Sequence[Dict[str, float]] = (), notes: Optional[Dict[str, Any]] = None):
        self.model, self.stats, self.notes = model, list(stats), dict(notes or {})
        self.num_features, self.num_labels, self.depth = model.features(), model.num_labels(), model.depth()
        self.bias, self.transform = model.bias(), model.transform()

    @staticmethod
    def train(X: Matrix, Y: Matrix, *, tree: Optional[LabelTree] = None, arity: int = 16, max_leaf_size: int = 100,
              negatives: Union[str, Sequence[str]] = "tfn", user_negatives: Optional[Matrix] = None, beam: int = 10,
              loss: str = "squared_hinge", positive_cost: float = 1.0, negative_cost: float = 1.0, relevance: Optional[Matrix] = None,
              tolerance: float = 0.1, sweeps: int = 100, bias: float = 1.0, threshold: float = 0.1, max_weights: Optional[int] = None,
              initial: Optional["XRLinear"] = None, dtype: Optional[torch.dtype] = None, generator: Optional[torch.Generator] = None,
              progress: Union[bool, Progress] = False,
              group: Union["torch.distributed.ProcessGroup", "torch.distributed.DeviceMesh", None] = None) -> "XRLinear":
        r"""Trains a model: a linear classifier for each node of a tree, layer after layer from the top.

        Each node p has some of the rows as its training set (``negatives``). The classifier of a child c of p is, over these rows::

            min_w  |w|^2 / 2 + sum_i C_i loss(y_i w.x_i)        y_i = 1 where a label below c is right, else -1

        It is found by dual coordinate descent (Hsieh et al., 2008). The model is the same for any number of threads.

        Args:
            X: [n, D], scipy sparse, of finite real numbers: an example a row. Values are taken in float32. Rows of length 1 suit the defaults.
            Y: [n, L], scipy sparse: the labels of each example are its non-zeros.
            tree: over the L labels, all on its last layer. None: ``LabelTree.from_vectors(label_vectors.pifa(X, Y), arity,
                max_leaf_size=max_leaf_size)``.
            negatives: which rows are the training set of p. ``"tfn"`` (teacher forcing): those with a label below p. ``"man"`` (matcher aware): those whose
                beam, with the layers trained so far, reaches p. ``"user"``: those that ``user_negatives`` [n, L] pairs with a label below
                p. Or several joined by ``+``, such as ``"tfn+man"``. One for all layers, or a list with one for each layer; the first layer
                has all rows.
            beam: of the search for ``"man"``.
            loss: ``"squared_hinge"``, ``max(0, 1 - m)^2``; ``"hinge"``, ``max(0, 1 - m)``; ``"logistic"``, ``log(1 + e^-m)``, whose model
                has the transform ``"sigmoid"``, the others ``"l3-hinge"``.
            positive_cost, negative_cost: C_i where y_i is 1 or -1; above 0.
            relevance: [n, L], non-negative, a number for each pair of Y: multiplies positive_cost. Of an inner node: the largest of the
                labels below it.
            tolerance: above 0. A classifier is done when the projected gradients of a sweep differ by no more, and are no further from 0.
            sweeps: at most so many passes over the rows, at least 1.
            bias: the value of one more feature, which every row and query has; 0: no such feature.
            threshold: weights nearer to 0 are dropped. Rows much longer than 1 have small weights, and need a smaller threshold.
            max_weights: after that, each classifier keeps at most so many weights, at least 1. None: all.
            initial: a model with the same tree and features, whose weights training begins from. Training takes fewer sweeps where these weights are nearly the
                answer: trained to a smaller tolerance, with threshold=0 and dtype=torch.float32. Else it takes more sweeps than without.
            dtype: of the weights that are kept: torch.float16 or torch.float32. None: float16, unless a weight is too small or too large
                for it. Training is in float32.
            generator: for the tree and the orders in which rows are visited.
            progress: True: a bar by tqdm. Or called with (layer, layers, done, total).
            group: the ranks that train the model together: a process group with a backend for the CPU (``torch.distributed.group.WORLD``), or a
                DeviceMesh of one dimension. All ranks call this with the same arguments and get the same model, that of one process, from the first
                rank's generator. The tree is cut and each layer trained in parts, neighbours in a layer, of about the same work (rows times their
                non-zeros times siblings); a rank receives the whole of each layer. A bar and warnings are the first rank's, a function is called
                with the rank's share of a layer. ``stats``: of all ranks, the seconds those of the slowest. None: one process.

        Returns:
            The model.

        Raises:
            ValueError: shapes that do not fit; numbers that are not finite; an option out of range; a tree with labels above its last layer; an ``initial`` of
                another tree; arguments that differ between ranks. The message names the argument, and both values where ranks differ.
            TypeError: X or Y is not a scipy sparse matrix of real numbers; an option of another type.
            RuntimeError: another rank failed; the message says how.
        """
        ranks = ranks_of("XRLinear.train", group)

        def checked() -> Tuple[Dict[str, Any], str]:
            nonlocal X, Y, relevance, user_negatives, arity, max_leaf_size, sweeps, beam, max_weights
            X, Y = _checked_examples(X, Y)
            if loss not in _LOSSES:
                raise ValueError(f"XRLinear.train: expected loss as one of {list(_LOSSES)}, got {loss!r}")
            if dtype not in (None, torch.float16, torch.float32):
                raise ValueError(f"XRLinear.train: expected dtype as torch.float16, torch.float32 or None, got {dtype}")
            if relevance is not None:
                relevance = _relevance(relevance, Y)
            if user_negatives is not None:
                user_negatives = _pairs("user_negatives", user_negatives, Y.shape)
            for name, value, kind in (("tree", tree, LabelTree), ("initial", initial, XRLinear)):
                if value is not None and not isinstance(value, kind):
                    raise TypeError(f"XRLinear.train: expected {name} as {kind.__name__} or None, got {type(value).__name__}")
            if tree is None:
                arity = check_count("XRLinear.train", "arity", arity, 2)
                max_leaf_size = check_count("XRLinear.train", "max_leaf_size", max_leaf_size, 1)
            elif tree.num_classes != Y.shape[1]:
                raise ValueError(f"XRLinear.train: expected a tree of {Y.shape[1]} labels, as Y has, got one of {tree.num_classes}")
            sweeps, beam = check_count("XRLinear.train", "sweeps", sweeps, 1), check_count("XRLinear.train", "beam", beam, 1)
            max_weights = None if max_weights is None else check_count("XRLinear.train", "max_weights", max_weights, 1)
            settings = dict(loss=loss, bias=bias, positive_cost=positive_cost, negative_cost=negative_cost, tolerance=tolerance, sweeps=sweeps,
                            threshold=threshold, max_weights=max_weights)
            return settings, option_text(**settings)

        def facts() -> Dict[str, Any]:
            of_tree = f"{arity} children and {max_leaf_size} labels of a leaf" if tree is None else f"digest {digest(*tree.tables())}"
            return {"X": f"{list(X.shape)} (digest {digest(*rows)})", "Y": f"{list(Y.shape)} (digest {digest(*index_tensors(Y))})",
                    "relevance": relevance is not None and f"digest {digest(tensor_of(relevance))}",
                    "user_negatives": user_negatives is not None and f"digest {digest(*index_tensors(user_negatives))}",
                    "initial": initial is not None and f"digest {digest(*(part for layer in initial._parts() for part in layer))}",
                    "tree": of_tree, "negatives": negatives if isinstance(negatives, str) else list(negatives), "beam": beam, "dtype": dtype,
                    **settings}

        settings, options = ranks.do(checked)
        rows = sparse_tensors(X, "XRLinear.train")
        ranks.check_alike(facts)
        if tree is None:
            vectors = ranks.do(lambda: sparse_tensors(label_vectors.pifa(X, Y)))
            tree = LabelTree._of_clusters(vectors, X.shape[1], {"arity": arity, "iterations": 10, "max_leaf_size": max_leaf_size, "spherical": True},
                                          generator, ranks)
        layers = _Layers(tree)
        schemes = _schemes(negatives, len(layers.first_child), user_negatives)
        transform = "sigmoid" if loss == "logistic" else "l3-hinge"
        begin = [[]] * len(schemes) if initial is None else initial._parts_for(layers, X.shape[1])
        options += f",seed={int(ranks.first(torch.randint(0, 2**63 - 1, (), generator=generator)))}"

        parts: List[List[Tensor]] = []
        stats = []
        lists: Any = None
        with _Watch(progress if ranks.rank == 0 or callable(progress) else False, len(schemes)) as watch:
            for depth, scheme in enumerate(schemes):
                started = time.perf_counter()
                mined = [_mined(parts, X, bias, transform, beam, ranks)] if depth > 0 and "man" in scheme else []

                def train_share() -> Any:
                    if depth == 0:
                        parents = torch.tensor([0, X.shape[0]]), torch.arange(X.shape[0], dtype=torch.int32)
                    else:
                        found = mined + ([lists] if "tfn" in scheme else [])
                        if "user" in scheme:
                            found.append(layers.lists(depth - 1, user_negatives)[:2])
                        parents = _united(found, X.shape[0])
                    *right, costs = layers.lists(depth, Y, relevance)
                    matched = time.perf_counter()
                    first, last = ranks.deal(len(parents[0]) - 1, lambda: _work(rows, layers.first_child[depth], *parents))
                    share = f"{options},first_parent={first},last_parent={last}"
                    made = watch.run(depth, torch.ops.xsoftmax.linear_layer_train, rows, X.shape[1], layers.first_child[depth], parents, right, costs,
                                     begin[depth], share)
                    return made, right, len(parents[1]), matched

                (*made, figures), lists, of_parents, matched = ranks.do(train_share)
                made = _joined(*made, dtype, ranks)  # type: ignore[call-arg]
                parts.append([layers.first_child[depth], *made])
                swept, unconverged, before = ranks.sum(figures).tolist()
                stats.append({"nodes": len(lists[0]) - 1, "rows": of_parents, "weights": len(made[-1]), "weights before the threshold": int(before),
                              "sweeps": int(swept), "unconverged": int(unconverged), "seconds of matching": matched - started,
                              "seconds": time.perf_counter() - matched})
        for name in ("seconds of matching", "seconds"):
            for one, slowest in zip(stats, ranks.gather(torch.tensor([[one[name] for one in stats]], dtype=torch.float64)).amax(0).tolist()):
                one[name] = slowest
        for depth, one in enumerate(stats if ranks.rank == 0 else []):
            if one["weights"] < one["nodes"] <= one["weights before the threshold"]:
                length = float(np.median(np.sqrt(np.asarray(X.power(2, dtype=np.float64).sum(1)).ravel())))
                warnings.warn(f"XRLinear.train: threshold={threshold} leaves the {one['nodes']} classifiers of layer {depth + 1} "
                              f"{one['weights']} weights; rows are of length {length:.3g} (median), and the default suits a length of 1: see "
                              "label_vectors.unit_rows", stacklevel=2)
        return XRLinear(torch.classes.xsoftmax.XRLinear(X.shape[1], bias, transform, layers.labels, parts), stats)

    def predict(self, X: Union[Matrix, Tensor, np.ndarray], topk: int = 10, beam: int = 10, *, dense: Union[Tensor, np.ndarray, None] = None,
                only: Union[Tensor, Sequence[int], None] = None, transform: Optional[str] = None, combiner: Optional[str] = None) -> Matrix:
        """The ``topk`` best labels of each row that the beam finds, as a matrix of their scores.

        Args:
            X: [n, D] of real numbers, finite: scipy sparse, a tensor of layout torch.sparse_csr, or a dense tensor or array. Values are taken in float32.
            topk: labels of each row, at least 0.
            beam: nodes of a layer whose children are scored, at least 1.
            dense: [n, d], tensor or array, beside a sparse X of D - d features: the last d features.
            only: the labels among which the best are wanted: their ids in [0, L), or a bool mask [L]. None: all.
            transform: of w.x: ``"l1-hinge"`` .. ``"l6-hinge"``, ``e^-max(0, 1 - w.x)^p``; ``"sigmoid"``; ``"identity"``; ``"log-l1-hinge"`` ..
                ``"log-l6-hinge"`` and ``"log-sigmoid"``, the logs of those. None: the transform of the model.
            combiner: of that and the parent's score: ``"multiply"``, ``"add"``, or ``"last"``, which leaves the parent's score out. None: ``"add"`` for logs
                and ``"identity"``, else ``"multiply"``.

        Returns:
            A scipy CSR matrix [n, L], float32: the entries of a row stand best first. A row has fewer than ``topk`` where the beam has found fewer. The search
            adds logs, so the order is right where float32 rounds scores to 0 or 1. No entry is 0, which sparse formats drop: scores that float32 has no
            normal number for are reported as the smallest ones, 2^-126 and those after it, in order.

        Raises:
            ValueError: another number of features or rows; numbers that are not finite; topk, beam, transform or combiner out of range; a mask of another
                shape.
            TypeError: X or dense is no matrix of real numbers; topk or beam is not an int; ``only`` is of another dtype; dense beside a dense X.
            IndexError: an id of ``only`` is not in [0, L).
        """
        found = self._predict(X, topk, beam, dense, only, transform, combiner)
        return csr_matrix(*found, (len(found[0]) - 1, self.num_labels))

    def topk(self, X: Union[Matrix, Tensor, np.ndarray], k: int = 10, beam: int = 10, *, dense: Union[Tensor, np.ndarray, None] = None,
             only: Union[Tensor, Sequence[int], None] = None, transform: Optional[str] = None,
             combiner: Optional[str] = None, exclude: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        """The k best labels of each row that the beam finds, as tensors, best first.

        Args:
            X: [n, D], as in :meth:`predict`.
            k: labels of each row, at least 0.
            beam, dense, only, transform, combiner: as in :meth:`predict`.
            exclude: int64 [n, E]: the labels that each row does not want, -1 for none. The beam should have room for them.

        Returns:
            (scores float32 [n, k], labels int64 [n, k]), 0 and -1 where fewer than k labels are found.

        Raises:
            ValueError, TypeError, IndexError: as :meth:`predict`; an ``exclude`` of another shape or dtype, or with an id that is not in [0, L) or -1
        """
        wanted = k if exclude is None else k + exclude.shape[-1]
        offsets, labels, scores = self._predict(X, wanted, beam, dense, only, transform, combiner)
        counts = offsets.diff()
        there = torch.arange(wanted) < counts.unsqueeze(1)
        values = torch.zeros(len(counts), wanted).masked_scatter_(there, scores)
        ids = torch.full((len(counts), wanted), -1, dtype=torch.int64).masked_scatter_(there, labels)
        if exclude is None:
            return values, ids
        values, ids = torch.ops.xsoftmax.exclude_topk(values, ids, exclude, self.num_labels, k)
        return values.masked_fill_(ids < 0, 0.0), ids

    def _predict(self, X: Any, topk: int, beam: int, dense: Any, only: Any, transform: Any, combiner: Any) -> Tuple[Tensor, Tensor, Tensor]:
        if getattr(X, "format", None) is not None:
            parts, width = query_tensors("XRLinear.predict", "X", X), X.shape[1]
            block = None if dense is None else _block(dense, X.shape[0])
        elif isinstance(X, Tensor) and X.layout == torch.sparse_csr:
            width = X.shape[1]
            parts = X.crow_indices(), X.col_indices(), X.values().to(torch.float32)
            block = None if dense is None else _block(dense, X.shape[0])
        else:
            if dense is not None:
                raise TypeError(f"XRLinear.predict: expected X as a scipy sparse matrix beside dense, got {type(X).__name__}")
            block, width = _block(X, None), 0
            parts = torch.zeros(len(block) + 1, dtype=torch.int64), torch.empty(0, dtype=torch.int32), torch.empty(0)
        if width + (0 if block is None else block.shape[1]) != self.num_features:
            raise ValueError(f"XRLinear.predict: expected {self.num_features} features, got {width}"
                             + ("" if block is None else f" and {block.shape[1]} dense ones"))
        if only is not None:
            only = _chosen(only, self.num_labels)
        topk, beam = check_count("XRLinear.predict", "topk", topk, None), check_count("XRLinear.predict", "beam", beam, None)
        arguments = *parts, block, width, topk, beam, transform or "", combiner or "", only
        return self.model.predict(*arguments) if len(parts[0]) <= _FEW else _long_work.run("predict", self.model.predict, *arguments)

    def save(self, path: Union[str, "PathLike[str]"]) -> None:
        """Writes a folder for :meth:`load`. It takes the place of an older model as a whole or not at all.

        Raises:
            RuntimeError: the folder cannot be written.
        """
        self.model.save(fspath(path), json.dumps({"xsoftmax": "XRLinear", "features": self.num_features, "labels": self.num_labels,
                                                  "layers": self.stats, "notes": self.notes}, indent=1))

    @staticmethod
    def load(path: Union[str, "PathLike[str]"]) -> "XRLinear":
        """What :meth:`save` wrote, checked. The weights stay in the file, mapped into memory: processes that load it share them.

        Raises:
            FileNotFoundError: no model there. ValueError: not one, or a damaged one, or of another version; its file is a FIFO, a socket or a device.
        """
        if not (Path(path) / "model.bin").exists() or (Path(path) / "model.bin").is_dir():
            raise FileNotFoundError(f"XRLinear.load: expected the folder of a model, found no model.bin: {path}")
        open_regular("XRLinear.load", Path(path) / "model.bin").close()
        model = torch.ops.xsoftmax.xr_linear_load(fspath(path))
        text = model.notes()
        try:
            notes = json.loads(text)
            return XRLinear(model, notes["layers"], notes["notes"])
        except (ValueError, KeyError, TypeError, RecursionError):  # a model that C++ has saved
            return XRLinear(model, notes={"text": text} if text else None)

    def __repr__(self) -> str:
        return (f"XRLinear(num_features={self.num_features}, num_labels={self.num_labels}, depth={self.depth}, "
                f"weights={self.model.num_weights()})")

    def _parts(self) -> List[List[Tensor]]:
        return [self.model.layer(i) for i in range(self.depth)]

    def _parts_for(self, layers: "_Layers", features: int) -> List[List[Tensor]]:
        parts = self._parts()
        same = (len(parts) == len(layers.first_child) and features == self.num_features and torch.equal(self.model.labels(), layers.labels)
                and all(torch.equal(part[0], first) for part, first in zip(parts, layers.first_child)))
        if not same:
            raise ValueError("XRLinear.train: expected initial with the features of X and the same tree, got a model of others")
        return parts


class _Layers:
    """The layers of a tree: ``first_child`` of each, where the children of a node of the layer above begin, and ``above``, the node on each
    layer that a label is below."""

    def __init__(self, tree: LabelTree):
        sizes = tree.layer_sizes or [1]  # a tree of one node: one label, below a root of its own
        ends = np.cumsum([1, *sizes])
        self.first_child, self.above = [], []
        if not tree.layer_sizes:
            self.first_child, self.above, self.labels = [torch.tensor([0, 1])], [np.zeros(1, np.int32)], torch.zeros(1, dtype=torch.int64)
            return
        for depth in range(len(sizes)):
            begin, end = (ends[depth - 1], ends[depth]) if depth > 0 else (0, 1)
            self.first_child.append(tree.first_child[begin : end + 1] - end)
        inner = tree.node_class[: ends[-2]]
        if (inner >= 0).any():
            raise ValueError(f"XRLinear.train: expected a tree with all labels on its last layer, as LabelTree.from_vectors makes with "
                             f"max_leaf_size, got label {int(inner[inner >= 0][0])} above it")
        self.labels = tree.node_class[ends[-2] :].clone()
        node = tree.class_node
        for depth in reversed(range(len(sizes))):
            self.above.insert(0, (node - ends[depth]).to(torch.int32).numpy())
            node = tree.parent[node]

    def lists(self, depth: int, pairs: Matrix, weights: Optional[np.ndarray] = None) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Of each node of a layer the rows with a label below it, and the largest of their weights."""
        import scipy.sparse as sp

        nodes = len(self.labels) if depth + 1 == len(self.first_child) else len(self.first_child[depth + 1]) - 1
        data = np.ones(pairs.nnz, np.float32) if weights is None else weights
        columns = sp.csr_matrix((data, self.above[depth][pairs.indices], pairs.indptr), shape=(pairs.shape[0], nodes)).tocsc()
        rows, offsets, data = columns.indices, columns.indptr.astype(np.int64), columns.data
        first = np.ones(len(rows), bool)  # a row once a node: equal ones stand together
        first[1:] = rows[1:] != rows[:-1]
        first[offsets[:-1][offsets[:-1] < len(rows)]] = True
        if not first.all():
            starts = np.flatnonzero(first)
            data = data if weights is None else np.maximum.reduceat(data, starts)
            offsets = np.concatenate([[0], np.cumsum(first)])[offsets]
            rows = rows[starts]
        costs = None if weights is None else torch.from_numpy(data.astype(np.float32))
        return torch.from_numpy(offsets), torch.from_numpy(rows.astype(np.int32, copy=False)), costs


class _Watch:
    """Trains layers while someone looks on."""

    def __init__(self, progress: Union[bool, Progress], layers: int):
        self.progress, self.layers, self.bar = progress, layers, None

    def __enter__(self) -> "_Watch":
        if self.progress is True:
            from tqdm import tqdm

            self.bar = tqdm(total=100 * self.layers, unit="%", disable=None, bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}")
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

    def run(self, layer: int, op: Callable[..., Tuple[Tensor, ...]], *args: Any) -> Tuple[Tensor, ...]:
        quiet = self.bar is None and not callable(self.progress)
        return _long_work.run(f"layer {layer + 1}", op, *args, show=None if quiet else lambda done, total: self.show(layer, done, total))


def _checked_examples(X: Matrix, Y: Matrix) -> Tuple[Matrix, Matrix]:
    """X and Y of a training, canonical; the caller's own are left as they are."""
    fractions = getattr(getattr(Y, "dtype", None), "kind", "") == "f"
    given, X, Y = Y, canonical("XRLinear.train", "X", X), _pairs("Y", Y)
    if X.shape[0] != Y.shape[0]:
        raise ValueError(f"XRLinear.train: expected X and Y with as many rows, got {X.shape[0]} and {Y.shape[0]}: X is [n, D], here "
                         f"{list(X.shape)}, Y is [n, L], here {list(Y.shape)}")
    if fractions and X.nnz > 1 and (X.data == 1).all() and (np.mod(given.tocsr().data, 1) != 0).any():
        warnings.warn("XRLinear.train: X holds ones alone and Y fractions, as if they had been swapped: "
                      "X is [n, D], examples by features; Y is [n, L], and each of its values that is "
                      "not 0 is a label", stacklevel=3)
    return X, Y


def _pairs(argument: str, Y: Matrix, shape: Optional[Tuple[int, int]] = None, kind: str = "labels") -> Matrix:
    """CSR in canonical form."""
    Y = canonical("XRLinear.train", argument, Y, kind)
    if shape is not None and Y.shape != shape:
        raise ValueError(f"XRLinear.train: expected {argument} of shape {list(shape)}, as Y, got {list(Y.shape)}")
    if Y.shape[1] == 0:
        raise ValueError(f"XRLinear.train: expected {argument} with at least one label, got none")
    return Y


def _relevance(relevance: Matrix, Y: Matrix) -> np.ndarray:
    """The relevance of each pair of Y, in its order."""
    relevance = _pairs("relevance", relevance, Y.shape, "weights")
    if (relevance.data < 0).any():
        raise ValueError(f"XRLinear.train: expected relevance of at least 0, got {relevance.data[relevance.data < 0][0]}")
    if relevance.nnz != Y.nnz or (relevance.indptr != Y.indptr).any() or (relevance.indices != Y.indices).any():
        raise ValueError(f"XRLinear.train: expected relevance for the {Y.nnz} pairs of Y and no others, got {relevance.nnz}")
    return relevance.data


def _schemes(negatives: Union[str, Sequence[str]], depth: int, user_negatives: Optional[Matrix]) -> List[List[str]]:
    each = [negatives] * depth if isinstance(negatives, str) else list(negatives)
    if len(each) != depth:
        raise ValueError(f"XRLinear.train: expected negatives for {depth} layers, as the tree has, got {len(each)}")
    schemes = [str(scheme).split("+") for scheme in each]
    for scheme, said in zip(schemes, each):
        if not set(scheme) <= set(_NEGATIVES):
            raise ValueError(f"XRLinear.train: expected negatives as \"tfn\", \"man\", \"user\" or several joined by +, got {said!r}")
        if "user" in scheme and user_negatives is None:
            raise ValueError(f"XRLinear.train: expected user_negatives beside negatives={said!r}, got none")
    if user_negatives is not None and not any("user" in scheme for scheme in schemes):
        raise ValueError("XRLinear.train: expected negatives with \"user\" beside user_negatives, got " + repr(negatives))
    return schemes


def _mined(parts: List[List[Tensor]], X: Matrix, bias: float, transform: str, beam: int, ranks: Alone) -> Tuple[Tensor, Tensor]:
    """Of each node of the last layer so far the rows whose beam reaches it."""
    import scipy.sparse as sp

    nodes = int(parts[-1][0][-1])
    first, last = ranks.deal(X.shape[0], lambda: torch.from_numpy(np.diff(X.indptr).astype(np.int64) + 1))

    def search() -> Tuple[Tensor, Tensor, Tensor]:
        model = torch.classes.xsoftmax.XRLinear(X.shape[1], bias, transform, torch.arange(nodes), parts)
        rows = sparse_tensors(X if ranks.size == 1 else X[first:last])
        return _long_work.run("beams", model.predict, *rows, None, 0, beam, beam, "", "", None)

    offsets, found, _ = ranks.do(search)
    offsets, found = _offsets(ranks.gather(offsets.diff())), ranks.gather(found)
    columns = sp.csr_matrix((np.ones(len(found), np.int8), found.numpy(), offsets.numpy()), shape=(X.shape[0], nodes)).tocsc()
    return index_tensors(columns)


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _work(rows: Tuple[Tensor, Tensor, Tensor], first_child: Tensor, offsets: Tensor, of_parents: Tensor) -> Tensor:
    """An estimate for each parent: what its rows hold, for each of its children."""
    numbers = _offsets((rows[0].diff() + 1)[of_parents])
    return numbers[offsets].diff() * first_child.diff()


def _joined(chunk: Tensor, feature: Tensor, more: Tensor, child: Tensor, value: Tensor, dtype: Optional[torch.dtype], ranks: Alone) -> List[Tensor]:
    """The layer, of the shares of all ranks."""
    value = _narrow(value, dtype, ranks)  # before it travels
    return [_offsets(ranks.gather(chunk.diff())), *(ranks.gather(part) for part in (feature, more, child, value))]


def _united(lists: List[Tuple[Tensor, Tensor]], rows: int) -> Tuple[Tensor, Tensor]:
    """Of each node the rows of any of the lists."""
    import scipy.sparse as sp

    if len(lists) == 1:
        return lists[0][0], lists[0][1]
    nodes = len(lists[0][0]) - 1
    columns = sum(sp.csc_matrix((np.ones(len(of), np.int8), of.numpy(), offsets.numpy()), shape=(rows, nodes)) for offsets, of in lists)
    columns.sort_indices()
    return index_tensors(columns)


def _narrow(values: Tensor, dtype: Optional[torch.dtype], ranks: Alone) -> Tensor:
    if dtype == torch.float32:
        return values
    limits = torch.finfo(torch.float16)
    sizes = values.abs()
    ends = torch.stack([sizes.min(), -sizes.max()]) if len(sizes) > 0 else torch.tensor([limits.max, -limits.smallest_normal])
    smallest, largest = (ranks.gather(ends[None]).amin(0) * torch.tensor([1, -1])).tolist()  # one dtype for all weights of the layer
    if smallest >= limits.smallest_normal and largest <= limits.max:
        return values.to(torch.float16)
    if dtype == torch.float16:
        raise ValueError(f"XRLinear.train: expected weights in [{limits.smallest_normal:.2g}, {limits.max:.0f}] for dtype float16, "
                         f"got {smallest:.2g} to {largest:.2g}")
    return values


def _chosen(only: Union[Tensor, Sequence[int], np.ndarray], labels: int) -> Tensor:
    wanted = tensor_of(only) if isinstance(only, np.ndarray) else torch.as_tensor(only if isinstance(only, Tensor) else list(only))
    if wanted.dtype == torch.bool:
        if wanted.shape != (labels,):
            raise ValueError(f"XRLinear.predict: expected only as a mask of shape [{labels}], got {list(wanted.shape)}")
        return wanted.nonzero().squeeze(1)
    if wanted.dtype == torch.uint8:
        raise TypeError("XRLinear.predict: expected only as ids of labels or a mask of bool, got uint8, which may be either")
    if wanted.numel() > 0 and (wanted.is_floating_point() or wanted.is_complex()):
        raise TypeError(f"XRLinear.predict: expected only as ids of labels or a mask, got dtype {str(wanted.dtype).removeprefix('torch.')}")
    return wanted.to("cpu", torch.int64)


def _block(dense: Union[Tensor, np.ndarray], rows: Optional[int]) -> Tensor:
    if not isinstance(dense, (Tensor, np.ndarray)):
        raise TypeError(f"XRLinear.predict: expected X as a scipy sparse matrix, a tensor or an array, got {type(dense).__name__}")
    block = (tensor_of(dense) if isinstance(dense, np.ndarray) else dense).detach().to("cpu", torch.float32)
    if block.dim() != 2 or (rows is not None and len(block) != rows):
        raise ValueError(f"XRLinear.predict: expected dense features of shape [{'n' if rows is None else rows}, d], got {list(block.shape)}")
    return block
