"""XR-Linear: extreme multi-label classification with sparse linear classifiers on a label tree."""

import json
import warnings
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from .._core import long_work
from .. import label_vectors
from .._core.checks import check_count, check_generator, check_tensor
from .._core.files import open_regular
from .._core.options import option_text
from .._core.ranks import digest, ranks_of
from .._core.sparse import (csr_matrix, index_tensors, query_tensors, sparse_tensors, tensor_of)
from ..trees.label_tree import LabelTree
from .xr_linear_resume import TrainingFile, TrainingState
from .xr_linear_training import (Layers, LayerTraining, Matrix, Progress, Watch, check_examples,
                                 check_names, check_pairs, check_relevance, join_names, Names, Only,
                                 select_labels, dense_block, warn_unless_unit_length)

_LOSSES = ("hinge", "logistic", "squared_hinge")
_FEW_QUERIES = 256  # predictions for fewer queries are too fast to need interrupt checks


class XRLinear:
    r"""XR-Linear: a label tree with a sparse linear classifier at each node (Yu et al., 2022,
    section 3).

    A beam search finds the labels of a query x [D]. For a node c with parent p, where s_p is the
    score of p for x, the score is::

        s_c = s_p * e^{-max(0, 1 - w_c.x - b_c)^3}

    On each layer, the search keeps the ``beam`` best nodes. :meth:`predict` also supports other
    transforms of w.x and other ways to combine the result with the parent's score.

    Create a model with :meth:`train` or :meth:`load`.

    Args:
        model: a ``torch.classes.xsoftmax.XRLinear`` (``xsoftmax::XRLinear`` in C++). It can be an
            attribute of a scripted module.
        stats: training statistics, one dict per layer.
        notes: any JSON-serialisable dict, saved with the model.

    Shapes and dtypes: examples X [n, D] and labels Y [n, L], scipy sparse; scores float32 [n, L].

    Errors as :meth:`train`, :meth:`predict` and :meth:`load`.
    """
    def __init__(self, model: Any, stats: Sequence[Dict[str, float]] = (),
                 notes: Optional[Dict[str, Any]] = None):
        self.model, self.stats, self.notes = model, list(stats), dict(notes or {})
        self.num_features, self.num_labels, self.depth = model.features(), model.num_labels(
        ), model.depth()
        self.bias, self.transform = model.bias(), model.transform()

    @staticmethod
    def train(X: Matrix, Y: Matrix, *, tree: Optional[LabelTree] = None, arity: int = 16,
              max_leaf_size: int = 100, negatives: Union[str, Sequence[str]] = "tfn",
              user_negatives: Optional[Matrix] = None, beam: int = 10, loss: str = "squared_hinge",
              positive_cost: float = 1.0, negative_cost: float = 1.0,
              relevance: Optional[Matrix] = None, tolerance: float = 0.1, sweeps: int = 100,
              bias: float = 1.0, threshold: float = 0.1, max_weights: Optional[int] = None,
              initial: Optional["XRLinear"] = None, dtype: Optional[torch.dtype] = None,
              generator: Optional[torch.Generator] = None, progress: Union[bool, Progress] = False,
              group: Union["torch.distributed.ProcessGroup", "torch.distributed.DeviceMesh",
                           None] = None, resume: Union[str, "PathLike[str]",
                                                       None] = None) -> "XRLinear":
        r"""Trains a model: one linear classifier per node of a label tree, layer by layer from the
        top.

        ``negatives`` selects the training rows of each node p. The classifier of a child c of p
        minimises, over these rows::

            min_w  |w|^2 / 2 + sum_i C_i loss(y_i w.x_i)

        where y_i = 1 if row i has a label at or below c, else -1. The solver is dual coordinate
        descent (Hsieh et al., 2008). The model has the same bits for any number of threads.

        Args:
            X: scipy sparse [n, D], one example per row, finite real numbers, converted to float32.
                The defaults suit rows of length 1.
            Y: scipy sparse [n, L]; the non-zeros of a row are the labels of that example.
            tree: a tree of the L labels, with all labels on its last layer. None:
                ``LabelTree.from_vectors(label_vectors.pifa(X, Y), arity,
                max_leaf_size=max_leaf_size)``.
            arity, max_leaf_size: of that default tree.
            negatives: the rule that selects the training rows of node p. ``"tfn"`` (teacher
                forcing): rows with a label below p. ``"man"`` (matcher-aware): rows whose beam
                search, with the layers trained so far, reaches p. ``"user"``: rows that
                ``user_negatives`` [n, L] pairs with a label below p. Join several with ``+``, such
                as ``"tfn+man"``. Pass one string for all layers or a list with one string per
                layer. The first layer always uses all rows.
            user_negatives: scipy sparse [n, L], the pairs of row and label for ``"user"``.
            beam: the beam width for ``"man"``.
            loss: ``"squared_hinge"``, ``max(0, 1 - m)^2``; ``"hinge"``, ``max(0, 1 - m)``; or
                ``"logistic"``, ``log(1 + e^-m)``. The transform of a logistic model is
                ``"sigmoid"``, that of the others ``"l3-hinge"``.
            positive_cost, negative_cost: C_i for y_i = 1 and for y_i = -1; above 0.
            relevance: scipy sparse [n, L], one non-negative number per pair of Y, which multiplies
                positive_cost. For an inner node, the largest number among the labels below it is
                used.
            tolerance: above 0. A classifier has converged when the projected gradients of one sweep
                differ by at most this much and are at most this far from 0.
            sweeps: the largest number of passes over the rows, at least 1.
            bias: the value of a constant feature that is added to every row and query; 0: no such
                feature.
            threshold: weights with a smaller absolute value are dropped. Rows much longer than 1
                lead to small weights and need a smaller threshold.
            max_weights: the largest number of weights that a classifier keeps after thresholding,
                at least 1. None: no limit.
            initial: a model with the same tree and features, whose weights are the starting point.
                This saves sweeps if those weights are close to the solution, that is, if the model
                was trained to a smaller tolerance with threshold=0 and dtype=torch.float32.
                Otherwise it takes more sweeps than a start from zero.
            dtype: the dtype of the stored weights, torch.float16 or torch.float32. None: float16 if
                all weights of a layer are in its normal range, else float32. The solver uses
                float32; with torch.float16, the weights of a node's children are converted when
                they are trained, and take half the memory from then on.
            generator: a CPU generator, for the tree and for the order in which rows are visited.
            progress: True shows a tqdm progress bar; a function is called with (layer, layers,
                done, total).
            group: a process group with a CPU backend (``torch.distributed.group.WORLD``), or a
                one-dimensional DeviceMesh, whose ranks train the model together. All ranks pass the
                same arguments and receive the same model: the one that a single process trains with
                the generator of the first rank. Ranks split the tree construction and each layer
                into contiguous parts of about equal work (rows times non-zeros times siblings), and
                every rank receives all of each layer. Only the first rank shows a progress bar and
                warnings; a progress function is called with the progress of its own rank. ``stats``
                are totals over all ranks, with the seconds of the slowest. None: one process.
            resume: path of a checkpoint. Training saves the tree and each finished layer to it, and
                continues from it if it exists; the result equals an uninterrupted run. All other
                arguments must be unchanged, except ``generator``, which is then ignored. Layers are
                trained one at a time, which uses many threads less efficiently. The file is not
                deleted. Not supported with ``group``. None: no checkpoint.

        Returns:
            The trained model.

        Raises:
            ValueError: shapes do not match; a number is not finite; an option is out of range; the
                tree has labels above its last layer; ``initial`` has a different tree; or arguments
                differ between ranks, or from those in the file ``resume``, in which case the
                message names the argument and both values.
            FileNotFoundError: there is no folder for the file ``resume``.
            TypeError: X or Y is not a scipy sparse matrix of real numbers, or an option has the
                wrong type.
            RuntimeError: another rank failed; the message gives its error.
        """
        ranks = ranks_of("XRLinear.train", group)

        def check_arguments() -> Tuple[Dict[str, Any], str]:
            nonlocal X, Y, relevance, user_negatives, arity, max_leaf_size, sweeps, beam
            nonlocal max_weights
            X, Y = check_examples(X, Y)
            check_names("XRLinear.train", "negatives", negatives)
            check_generator("XRLinear.train", generator)
            if not isinstance(progress, bool) and not callable(progress):
                raise TypeError("XRLinear.train: expected progress as a bool or a function, got "
                                f"{type(progress).__name__}")
            if loss not in _LOSSES:
                raise ValueError(f"XRLinear.train: expected loss as one of {list(_LOSSES)}, got "
                                 f"{loss!r}")
            if resume is not None and not isinstance(resume, (str, PathLike)):
                raise TypeError("XRLinear.train: expected resume as a path or None, got "
                                f"{type(resume).__name__}")
            if resume is not None and group is not None:
                raise ValueError("XRLinear.train: expected resume without group, got both")
            if dtype not in (None, torch.float16, torch.float32):
                raise ValueError("XRLinear.train: expected dtype as torch.float16, torch.float32 "
                                 f"or None, got {dtype}")
            if relevance is not None:
                relevance = check_relevance(relevance, Y)
            if user_negatives is not None:
                user_negatives = check_pairs("user_negatives", user_negatives, Y.shape)
            for name, value, kind in (("tree", tree, LabelTree), ("initial", initial, XRLinear)):
                if value is not None and not isinstance(value, kind):
                    raise TypeError(f"XRLinear.train: expected {name} as {kind.__name__} or None, "
                                    f"got {type(value).__name__}")
            if tree is None:
                arity = check_count("XRLinear.train", "arity", arity, 2)
                max_leaf_size = check_count("XRLinear.train", "max_leaf_size", max_leaf_size, 1)
            elif tree.num_classes != Y.shape[1]:
                raise ValueError(f"XRLinear.train: expected a tree of {Y.shape[1]} labels, as Y "
                                 f"has, got one of {tree.num_classes}")
            sweeps, beam = check_count("XRLinear.train", "sweeps", sweeps,
                                       1), check_count("XRLinear.train", "beam", beam, 1)
            max_weights = None if max_weights is None else check_count(
                "XRLinear.train", "max_weights", max_weights, 1)
            settings = dict(loss=loss, bias=bias, positive_cost=positive_cost,
                            negative_cost=negative_cost, tolerance=tolerance, sweeps=sweeps,
                            threshold=threshold, max_weights=max_weights,
                            half=dtype == torch.float16)
            return settings, option_text(**settings)

        def collect_facts() -> Dict[str, Any]:
            def of(*tensors: Tensor) -> str:
                return f"digest {digest(*tensors)}"

            return {
                "X": f"{list(X.shape)} ({of(*rows)})",
                "Y": f"{list(Y.shape)} ({of(*index_tensors(Y))})",
                "relevance": relevance is not None and of(tensor_of(relevance)),
                "user_negatives": user_negatives is not None and of(*index_tensors(user_negatives)),
                "initial": initial is not None and of(*(part for layer in initial._parts()
                                                        for part in layer)),
                "tree": f"{arity} children and {max_leaf_size} labels of a leaf"
                if tree is None else of(*tree.tables()),
                "negatives": negatives if isinstance(negatives, str) else list(negatives),
                "beam": beam, "dtype": dtype, **settings
            }

        settings, options = ranks.run_together(check_arguments)
        rows = sparse_tensors(X, "XRLinear.train")
        ranks.check_equal(collect_facts)
        file = None if resume is None else TrainingFile(resume, collect_facts())
        state = None if file is None else file.load()
        if state is not None:
            tree = LabelTree(*state.tree)
        elif tree is None:
            vectors = ranks.run_together(lambda: sparse_tensors(label_vectors.pifa(X, Y)))
            tree = LabelTree._from_clusters(vectors, X.shape[1],
                                            {"arity": arity, "max_leaf_size": max_leaf_size},
                                            generator, ranks)
        layers = Layers(tree)
        depth = len(layers.first_child)
        rules = torch.ops.xsoftmax.layer_negatives(
            [negatives] * depth if isinstance(negatives, str) else list(negatives), depth,
            user_negatives is not None)
        transform = "sigmoid" if loss == "logistic" else "l3-hinge"
        if state is None:
            seed = int(ranks.share_first(torch.randint(0, 2**63 - 1, (), generator=generator)))
            state = TrainingState(tree.tables(), seed, [], [])
            if file is not None:
                file.save(state)  # before hours of training, in case it cannot be written

        def search(parts: List[List[Tensor]], nodes: int, queries: Any) -> Any:
            matcher = torch.classes.xsoftmax.XRLinear(X.shape[1], bias, transform,
                                                      torch.arange(nodes), parts)
            return long_work.run("beams", matcher.predict, *queries, None, 0, beam, beam, "", "",
                                 None)

        training = LayerTraining(
            rows=rows, features=X.shape[1], layers=layers, negatives=rules, pairs=index_tensors(Y),
            relevance=None if relevance is None else tensor_of(relevance),
            user_negatives=None if user_negatives is None else index_tensors(user_negatives),
            options=f"{options},seed={state.seed}", initial=[[]] *
            len(rules) if initial is None else initial._parts_for(layers, X.shape[1]),
            search=search, dtype=dtype, ranks=ranks)
        training.parts, training.stats = state.parts, state.stats
        with Watch(progress if ranks.rank == 0 or callable(progress) else False,
                   len(rules)) as watch:
            for first, last in training.runs(one_by_one=file is not None):
                training.train(first, last, watch)
                if file is not None:
                    file.save(state)  # its parts and stats are those of `training`
        stats = training.stats
        for depth, layer_stats in enumerate(stats if ranks.rank == 0 else []):
            if layer_stats["weights"] < layer_stats["nodes"] <= layer_stats[
                    "weights before the threshold"]:
                length = float(
                    np.median(np.sqrt(np.asarray(X.power(2, dtype=np.float64).sum(1)).ravel())))
                warnings.warn(
                    f"XRLinear.train: threshold={threshold} leaves the {layer_stats['nodes']} "
                    f"classifiers of layer {depth + 1} "
                    f"{layer_stats['weights']} weights; rows are of length {length:.3g} "
                    "(median), and the default suits a length of 1: see "
                    "label_vectors.unit_rows", stacklevel=2)
        return XRLinear(
            torch.classes.xsoftmax.XRLinear(X.shape[1], bias, transform, layers.labels,
                                            training.parts), stats)

    def predict(self, X: Union[Matrix, Tensor, np.ndarray], topk: int = 10, beam: int = 10, *,
                dense: Union[Tensor, np.ndarray, None] = None, only: Only = None,
                transform: Names = None, combiner: Names = None) -> Matrix:
        """Returns the scores of the ``topk`` best labels that the beam search finds for each row.

        Args:
            X: real numbers [n, D], finite: scipy sparse, a tensor of layout torch.sparse_csr, or a
                dense tensor or array. Converted to float32.
            topk: the number of labels per row, at least 0.
            beam: the beam width: the number of nodes per layer whose children are scored, at least
                1.
            dense: tensor or array [n, d] with the last d features, in addition to a sparse X with
                the first D - d features.
            only: restricts the result to these labels: ids in [0, L), or a bool mask [L]; or
                restricts each row to its labels: a scipy sparse matrix or sparse CSR tensor [n, L],
                such as predictions of another model. All of these labels are scored, regardless of
                ``beam``. None: all labels.
            transform: the function applied to w.x: ``"l1-hinge"`` .. ``"l6-hinge"``,
                ``e^-max(0, 1 - w.x)^p``; ``"sigmoid"``; ``"identity"``; or their logarithms
                ``"log-l1-hinge"`` .. ``"log-l6-hinge"`` and ``"log-sigmoid"``. One name for all
                layers, or a list with one per layer. None: the transform of the model.
            combiner: combines the transformed score with that of the parent: ``"multiply"``,
                ``"add"``, or ``"last"``, which ignores the parent's score. One name for all layers,
                or a list with one per layer. None: ``"add"`` for logarithms and ``"identity"``,
                else ``"multiply"``. Yu et al. (2022, section 3) recommend ``"last"`` for the last
                layer, trained with ``"tfn+man"``, and ``"multiply"`` for the others.

        Returns:
            A scipy CSR matrix [n, L], float32. The entries of each row are ordered by decreasing
            score. A row has fewer than ``topk`` entries if the beam search finds fewer labels. The
            search adds logarithms, so the order is correct even if float32 scores round to 0 or 1.
            No entry is 0, because sparse formats drop zeros: scores below the smallest normal
            float32 number are reported as 2^-126 and the numbers directly above it, in order.

        Raises:
            ValueError: a wrong number of features or rows; a number is not finite; topk, beam,
                transform or combiner is out of range; or a mask has the wrong shape.
            TypeError: X or dense is not a matrix of real numbers; topk or beam is not an int;
                ``only`` has another dtype; or dense is passed together with a dense X.
            IndexError: an id of ``only`` is not in [0, L).
        """
        result = self._predict(X, topk, beam, dense, only, transform, combiner)
        return csr_matrix(*result, (len(result[0]) - 1, self.num_labels))

    def topk(self, X: Union[Matrix, Tensor, np.ndarray], k: int = 10, beam: int = 10, *,
             dense: Union[Tensor, np.ndarray,
                          None] = None, only: Only = None, transform: Names = None,
             combiner: Names = None, exclude: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        """Returns the k best labels that the beam search finds for each row as tensors, best first.

        Args:
            X: [n, D], as in :meth:`predict`.
            k: the number of labels per row, at least 0.
            beam, dense, only, transform, combiner: as in :meth:`predict`.
            exclude: int64 [n, E], labels that each row must not return, padded with -1. Choose a
                beam that is wide enough to find k others.

        Returns:
            (scores float32 [n, k], labels int64 [n, k]), padded with 0 and -1 if fewer than k
            labels are found.

        Raises:
            ValueError, TypeError, IndexError: as :meth:`predict`, and if ``exclude`` has the wrong
                shape or dtype, or an id that is not in [0, L) or -1
        """
        k = check_count("XRLinear.topk", "k", k, 0)
        if exclude is not None:
            check_tensor("XRLinear.topk", "exclude", exclude)
            if exclude.dim() != 2:
                raise ValueError("XRLinear.topk: expected exclude of shape [n, E], got "
                                 f"{list(exclude.shape)}")
        size = k if exclude is None else k + exclude.shape[-1]
        offsets, labels, scores = self._predict(X, size, beam, dense, only, transform, combiner)
        counts = offsets.diff()
        is_label = torch.arange(size) < counts.unsqueeze(1)
        values = torch.zeros(len(counts), size).masked_scatter_(is_label, scores)
        ids = torch.full((len(counts), size), -1,
                         dtype=torch.int64).masked_scatter_(is_label, labels)
        if exclude is None:
            return values, ids
        values, ids = torch.ops.xsoftmax.exclude_topk(values, ids, exclude, self.num_labels, k)
        return values.masked_fill_(ids < 0, 0.0), ids

    def _predict(self, X: Any, topk: int, beam: int, dense: Any, only: Any, transform: Any,
                 combiner: Any) -> Tuple[Tensor, Tensor, Tensor]:
        if getattr(X, "format", None) is not None:
            parts, width = query_tensors("XRLinear.predict", "X", X), X.shape[1]
            block = None if dense is None else dense_block(dense, X.shape[0])
        elif isinstance(X, Tensor) and X.layout == torch.sparse_csr:
            width = X.shape[1]
            parts = X.crow_indices(), X.col_indices(), X.values().to(torch.float32)
            block = None if dense is None else dense_block(dense, X.shape[0])
        else:
            if dense is not None:
                raise TypeError("XRLinear.predict: expected X as a scipy sparse matrix with "
                                f"dense, got {type(X).__name__}")
            block, width = dense_block(X, None), 0
            parts = torch.zeros(len(block) + 1,
                                dtype=torch.int64), torch.empty(0,
                                                                dtype=torch.int32), torch.empty(0)
        if width + (0 if block is None else block.shape[1]) != self.num_features:
            raise ValueError(
                f"XRLinear.predict: expected {self.num_features} features, got {width}" +
                ("" if block is None else f" and {block.shape[1]} dense ones"))
        if self.notes.get("normalize"):
            warn_unless_unit_length(parts[0], parts[2], block)
        if only is not None:
            only = select_labels(only, self.num_labels, len(parts[0]) - 1)
        topk, beam = check_count("XRLinear.predict", "topk", topk,
                                 None), check_count("XRLinear.predict", "beam", beam, None)
        arguments = *parts, block, width, topk, beam, join_names("transform",
                                                                 transform), join_names(
                                                                     "combiner", combiner), only
        return self.model.predict(*arguments) if len(parts[0]) <= _FEW_QUERIES else long_work.run(
            "predict", self.model.predict, *arguments)

    def save(self, path: Union[str, "PathLike[str]"]) -> None:
        """Saves the model to a folder. An older model there is replaced completely or, on an error,
        not at all.

        Args:
            path: the folder; read it back with :meth:`load`.

        Raises:
            RuntimeError: the folder cannot be written.
        """
        self.model.save(
            fspath(path),
            json.dumps(
                {
                    "xsoftmax": "XRLinear", "features": self.num_features,
                    "labels": self.num_labels, "layers": self.stats, "notes": self.notes
                }, indent=1))

    @staticmethod
    def load(path: Union[str, "PathLike[str]"]) -> "XRLinear":
        """Loads and validates a model saved by :meth:`save`. The weights are mapped from the file,
        so processes that load the same model share its memory.

        Raises:
            FileNotFoundError: the folder has no model.
            ValueError: the file is not a model, is damaged or has another version, or is a FIFO,
                socket or device.
        """
        if not (Path(path) / "model.bin").exists() or (Path(path) / "model.bin").is_dir():
            raise FileNotFoundError("XRLinear.load: expected the folder of a model, found no "
                                    f"model.bin: {path}")
        open_regular("XRLinear.load", Path(path) / "model.bin").close()
        model = torch.ops.xsoftmax.xr_linear_load(fspath(path))
        text = model.notes()
        try:
            notes = json.loads(text)
            return XRLinear(model, notes["layers"], notes["notes"])
        except (ValueError, KeyError, TypeError, RecursionError):  # a model saved from C++
            return XRLinear(model, notes={"text": text} if text else None)

    def __repr__(self) -> str:
        return (f"XRLinear(num_features={self.num_features}, num_labels={self.num_labels}, "
                f"depth={self.depth}, "
                f"weights={self.model.num_weights()})")

    def _parts(self) -> List[List[Tensor]]:
        return [self.model.layer(i) for i in range(self.depth)]

    def _parts_for(self, layers: "Layers", features: int) -> List[List[Tensor]]:
        parts = self._parts()
        is_same_tree = (len(parts) == len(layers.first_child) and features == self.num_features
                        and torch.equal(self.model.labels(), layers.labels) and all(
                            torch.equal(part[0], first)
                            for part, first in zip(parts, layers.first_child)))
        if not is_same_tree:
            raise ValueError("XRLinear.train: expected initial with the features of X and the same "
                             "tree, got a model of others")
        return parts
