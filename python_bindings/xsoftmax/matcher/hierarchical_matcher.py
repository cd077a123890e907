"""A hierarchical matcher: extreme multi-label classification on top of a neural encoder."""

from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from torch import Tensor
from torch.types import Device

from .._core.checks import check_count, check_tensor
from .._core.memory import device_of_values
from .._core.sparse import canonical
from ..tables.table_module import TableModule, make_linear
from ..trees.label_tree import LabelTree

_LOSSES = ("logistic", "squared_hinge")
_NEGATIVES = ("man", "tfn", "tfn+man")


@torch.library.register_fake("xsoftmax::shortlist")
def _fake_shortlist(parents: Tensor, targets: Tensor, first_child: Tensor, parent: Tensor,
                    most: Optional[int] = None) -> Any:
    size: Any
    if most is not None and parents.device.type == "cuda":
        size = parents.shape[0] * (parents.shape[1] + targets.shape[1]) * most
    else:
        size = torch.library.get_ctx().new_dynamic_size()
    return parents.new_empty(size), parents.new_empty(parents.shape[0] + 1), parents.new_empty(
        size, dtype=torch.float32)


class HierarchicalMatcher(TableModule):
    r"""A label tree with a linear classifier at each node, trained layer by layer on top of one
    encoder (Yu et al., 2022, section 4).

    One layer is trained at a time, the current layer. There, the shortlist S of a query holds the
    children of selected nodes of the layer above: the ``beam`` best ones, those above its target
    labels, or both (``negatives``). With y_c = 1 if a target label is at or below c,
    else -1, the loss of a query is::

        sum_{c in S} max(0, 1 - y_c (w_c . input + b_c))^2         # "squared_hinge"
        sum_{c in S} log(1 + e^{-y_c (w_c . input + b_c)})         # "logistic"

    Only the rows of S receive a gradient. In PyTorch, with the scores ``s`` [S] and the signs ``y``
    [S] in {-1, 1} of one query::

        F.relu(1 - y * s).square().sum()                           # "squared_hinge"
        F.softplus(-y * s).sum()                                   # "logistic"

    Training starts at the first layer. :meth:`next_layer` moves on to the next one and initialises
    each row with that of its parent. If labels have few examples, :meth:`init_from_prototypes` is
    an alternative initialisation. After the last layer, :meth:`topk` finds the best labels by beam
    search.

    Args:
        in_features: D, the width of a query; at least 0.
        tree: a :class:`LabelTree` of the L labels with at least 2 nodes, such as
            ``LabelTree.from_vectors(label_vectors.pifa(X, Y), 16, max_leaf_size=100)``. The module
            keeps a copy.
        loss: "squared_hinge" or "logistic".
        beam: the beam width in training and the default in :meth:`topk`: the number of nodes per
            layer whose children are scored; at least 1.
        negatives: the nodes of the layer above whose children are scored in training. "tfn"
            (teacher forcing): those above the target labels. "man" (matcher-aware): those that the
            beam reaches; targets below other nodes are ignored. "tfn+man": both.
        reduction: over queries: "mean", "sum" or "none".
        bias, sparse_grad: as in :class:`SampledSoftmaxLoss`.
        device, dtype: of the edges. The dtype is float32, float64, bfloat16 or float16.

    The parameters are `edges.weight` [E, D] and `edges.bias` [E]. Edge e ends in node e + 1 of the
    tree. The buffer `layer` is the current layer, 1 to `tree.depth`. ``layer.fill_(1)`` returns to
    the first layer and keeps all rows, to train the layers again after the encoder has changed.

    Shape:
        - input: [*, D], in the dtype of the edges.
        - target: int64 [*, T] with T < L, the target labels of each query in [0, L), padded with
          -1.
        - output: a scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.
          For an empty batch, "sum" returns 0 and "mean" returns NaN, as in torch.

    Raises:
        ValueError: an option is out of range; the tree has only one node; a shape does not match;
            or targets are multi-hot [*, L].
        TypeError: an option has the wrong type; an argument is not a dense tensor; `input` has
            another dtype than the edges; or `target` is not int64.
        IndexError: a label is not in [0, L) and not -1 (checked on the CPU).
        RuntimeError: as :class:`SampledSoftmaxLoss`.
    """

    _option_names = ("loss", "beam", "negatives", "reduction", "sparse_grad")

    def __init__(self, in_features: int, tree: LabelTree, *, loss: str = "squared_hinge",
                 beam: int = 10, negatives: str = "tfn+man", bias: bool = True,
                 reduction: str = "mean", sparse_grad: Optional[bool] = None, device: Device = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        if not isinstance(tree, LabelTree):
            raise TypeError("HierarchicalMatcher: expected tree as a LabelTree, got "
                            f"{type(tree).__name__}")
        if tree.depth == 0:
            raise ValueError("HierarchicalMatcher: expected a tree of at least 2 nodes, got 1")
        self._init_table(in_features, tree.num_classes, reduction=reduction,
                         sparse_grad=sparse_grad)
        self._init_options(loss=loss, beam=beam, negatives=negatives)
        self.tree = tree.clone().to(device_of_values(device))
        self.edges = make_linear(self._name, self.in_features, tree.num_edges, bias, device, dtype)
        self._watch_tables()
        self.register_buffer("layer", torch.ones((), dtype=torch.int64, device="cpu"))

    def _check_option(self, name: str, value: Any) -> Any:
        if name == "loss" and value not in _LOSSES:
            raise ValueError(f"{self._name}: expected loss as one of {[*_LOSSES]}, got {value!r}")
        if name == "negatives" and value not in _NEGATIVES:
            raise ValueError(f"{self._name}: expected negatives as one of {[*_NEGATIVES]}, got "
                             f"{value!r}")
        if name == "beam":
            return check_count(self._name, name, value, 1)
        return super()._check_option(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        layer = self.layer  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.layer = layer  # stays on the CPU, because every step reads it
        return self

    @torch.jit.unused
    def _host_numbers(self) -> List[Tensor]:
        """Returns the tensors whose values a step reads on the host. A CUDA graph would freeze
        these values (make_graphed_step)."""
        return [self.layer]

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.edges.weight, self.edges.bias]
        return tables

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Computes the loss of the current layer.

        Args:
            input: [*, D], in the dtype of the edges.
            target: int64 [*, T], the target labels of each query, padded with -1.

        Returns:
            A scalar, or [*] with reduction="none". Errors as :class:`HierarchicalMatcher`.
        """
        self._queries(input, None)
        target = self._check_tensors(input, target)
        self._check_step()
        return torch.ops.xsoftmax.matcher_loss(input, self.edges.weight, self.edges.bias, target,
                                               self.tree.tables(),
                                               self.tree.layer_sizes, self.tree.group_sizes,
                                               int(self.layer.item()), self._options)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        layer = state_dict.get(prefix + "layer")
        if isinstance(layer, Tensor) and layer.numel() == 1 and not layer.is_meta:
            depth = self._depth_of(state_dict.get(prefix + "tree.parent"))
            if layer.is_floating_point() or layer.is_complex() or not 1 <= int(layer) <= depth:
                error_msgs.append(f"HierarchicalMatcher: expected {prefix}layer as an integer in "
                                  f"[1, {depth}], got {layer.item()}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)

    def _depth_of(self, parent: Optional[Tensor]) -> int:
        """Returns the depth of a tree that is about to be loaded. For an invalid tree the result
        is arbitrary, since LabelTree reports the error."""
        if not isinstance(parent,
                          Tensor) or parent.shape != self.tree.parent.shape or parent.is_meta:
            return self.tree.depth
        parents, depth = parent.tolist(), 0
        node = len(parents) - 1  # the last node is in the deepest layer
        while 0 < node and 0 <= parents[node] < node:
            node, depth = parents[node], depth + 1
        return depth

    @torch.jit.unused
    @torch.no_grad()
    def next_layer(self) -> bool:
        """Moves on to the next layer and initialises each of its nodes with the weights of its
        parent.

        Returns:
            True; or False if the current layer is the last one, in which case nothing changes.
        """
        layer = int(self.layer)
        if layer == self.tree.depth:
            return False
        self.catch_up()  # applies pending updates, so that the children copy current weights
        for table in self.edges.parameters():
            torch.ops.xsoftmax.matcher_next_layer_(table, self.tree.parent, self.tree.layer_sizes,
                                                   layer)
        self.layer += 1
        return True

    @torch.jit.unused
    @torch.no_grad()
    def init_from_prototypes(self, input: Tensor, target: Tensor) -> None:
        r"""Initialises the rows of the current layer with sums of their examples, instead of the
        weights of their parents.

        With the encoded examples h_i, their mean m, and the n_c examples i that have a target label
        at or below node c::

            w_c = scale * sum_{i of c} (h_i - m) / sqrt(n_c)
            b_c = offset - w_c . m

        ``scale`` and ``offset`` minimise the loss on at most 4,096 of the examples. Because these
        examples are also part of the sums, the scores are overconfident. A node without examples
        has w_c = 0. Without a bias, m and the offset are 0. If most labels have only a few
        examples, this can be better than the trained weights
        (``docs/experiments/many_labels.md``).

        The layers above are not changed. They become stale when the encoder is trained further;
        return to them in that case (`layer`).

        Args:
            input: [*, D], the encoder's output for the training set, computed in eval().
            target: int64 [*, T], as in the loss.

        Raises:
            ValueError: there are no examples, a shape does not match, or inputs, sums or scores are
                not finite. Nothing is changed in these cases.
            TypeError: input has another dtype than the weights, or target is not int64.
        """
        self._queries(input, None)
        target = self._check_tensors(input, target)
        self.catch_up()  # applies pending updates: the beam reads the layers above
        torch.ops.xsoftmax.matcher_init_layer_(list(self.edges.parameters()), input, target,
                                               self.tree.tables(), self.tree.layer_sizes,
                                               int(self.layer), self._options)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, beam: Optional[int] = None,
             exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Returns the k best labels that a beam search finds, best first.

        The score of a label is the product over its path of ``e^{-max(0, 1 - z)^3}``, or with
        loss="logistic" of ``1 / (1 + e^-z)``, where z = w . input + b. The search adds logarithms,
        so the order is correct even if scores are too small for float32. Reported scores are at
        least 2^-126, the smallest normal float32 number.

        Args:
            input: [*, D], in the dtype of the edges.
            k: in [0, L].
            beam: the beam width, at least k. None: the larger of k and ``beam``.
            exclude: int64 [*, E], labels that each query must not return, padded with -1. The beam
                is then at least k + E wide.

        Returns:
            (scores, labels), both [*, k]: float64 for float64 edges, else float32; and int64. If
            fewer than k labels are found, the remaining places hold 0 and -1.

        Raises:
            ValueError: a layer is not trained yet; k is not in [0, L]; beam is below k; or a shape
                does not match.
            TypeError: k is not an int, `input` has another dtype than the edges, or `exclude` is
                not int64.
            IndexError: an id of `exclude` is not in [0, L) or -1 (checked on the CPU).
            RuntimeError: the program was exported before all layers were trained (raised when it
                runs).
        """
        exporting = False
        if not torch.jit.is_scripting():
            exporting = torch.compiler.is_exporting()
        if exporting:  # an export cannot read the value, so the exported program checks it
            torch._assert_async(
                self.layer == self.tree.depth, "HierarchicalMatcher: expected all "
                f"of {self.tree.depth} layers "
                "trained before export")
        elif int(self.layer.item()) != self.tree.depth:
            raise ValueError(f"HierarchicalMatcher: expected all of {self.tree.depth} layers "
                             f"trained, got layer {int(self.layer.item())} at work; "
                             "see next_layer")
        k = self._check_k(k)
        if exclude is not None and not torch.jit.is_scripting():
            check_tensor(self._name, "exclude", exclude)
        self._table_queries(input, None)
        return torch.ops.xsoftmax.matcher_topk(input, self.edges.weight, self.edges.bias,
                                               self.tree.tables(), k, beam, exclude, self._options)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """Returns the best label that the beam search finds: input [*, D] -> int64 [*]. Errors as
        :meth:`topk`."""
        return self.topk(input, 1, None, None)[1].squeeze(-1)

    @staticmethod
    def targets(Y: Any) -> Tensor:
        """Converts a scipy sparse label matrix to targets.

        Args:
            Y: scipy sparse [n, L]; the non-zeros of a row are its labels.

        Returns:
            int64 [n, T], the labels of each row, padded with -1.

        Raises:
            TypeError: Y is not a scipy sparse matrix of real numbers.
            ValueError: Y is not two-dimensional, or its arrays are inconsistent.
        """
        Y = canonical("HierarchicalMatcher.targets", "Y", Y, "labels")
        counts = np.diff(Y.indptr)
        targets_of_rows = np.full((Y.shape[0], max(int(counts.max(initial=0)), 1)), -1, np.int64)
        targets_of_rows[np.arange(targets_of_rows.shape[1]) < counts[:, None]] = Y.indices
        return torch.from_numpy(targets_of_rows)

    def extra_repr(self) -> str:
        options = (f"loss={self.loss!r}, beam={self.beam}, negatives={self.negatives!r}, "
                   f"layer={int(self.layer)}")
        return f"{super().extra_repr()}, {options}"
