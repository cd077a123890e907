"""A hierarchical matcher under an encoder: extreme multi-label classification of what a network has read."""

from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from torch import Tensor
from torch.types import Device

from ._checks import check_count, check_tensor
from ._memory import device_of_values
from ._sparse import canonical
from ._table import TableModule, make_linear
from .label_tree import LabelTree

_LOSSES = ("logistic", "squared_hinge")


@torch.library.register_fake("xsoftmax::shortlist")
def _fake_shortlist(parents: Tensor, targets: Tensor, first_child: Tensor, parent: Tensor, most: Optional[int] = None) -> Any:
    size: Any
    if most is not None and parents.device.type == "cuda":
        size = parents.shape[0] * (parents.shape[1] + targets.shape[1]) * most
    else:
        size = torch.library.get_ctx().new_dynamic_size()
    return parents.new_empty(size), parents.new_empty(parents.shape[0] + 1), parents.new_empty(size, dtype=torch.float32)


class HierarchicalMatcher(TableModule):
    r"""A tree of labels with a linear classifier for each node, trained layer after layer over one encoder (Yu et al., 2022, section 4).

    Training is at one layer at a time, the layer at work. There the shortlist S of a query holds the children of the ``beam`` best nodes of the layer above,
    and those of the nodes above its right labels. With y_c = 1 where a right label is c or below c, else -1, the loss of a query is::

        sum_{c in S} max(0, 1 - y_c (w_c . input + b_c))^2         # "squared_hinge"
        sum_{c in S} log(1 + e^{-y_c (w_c . input + b_c)})         # "logistic"

    Only the rows of S have a gradient. In PyTorch, for the scores ``s`` [S] and the right nodes ``y`` [S] in {-1, 1} of one query: ``F.relu(1 - y *
    s).square().sum()`` and ``F.softplus(-y * s).sum()``.

    Training begins on the first layer. :meth:`next_layer` goes on to the next one, whose rows begin as those of their parents. Where labels have few examples,
    :meth:`init_from_prototypes` begins them in another way. After the last layer, :meth:`topk` finds the best labels by beam search.

    Args:
        in_features: D, the width of a query; at least 0.
        tree: a :class:`LabelTree` of the L labels, such as ``LabelTree.from_vectors(label_vectors.pifa(X, Y), 16, max_leaf_size=100)``; at least 2 nodes. It is
            copied.
        loss: "squared_hinge" or "logistic".
        beam: at least 1: the nodes of a layer whose children are scored, in training and in :meth:`topk`.
        reduction: over queries: "mean", "sum" or "none".
        bias, sparse_grad: as in :class:`SampledSoftmaxLoss`.
        device, dtype: of the edges. The dtype is float32, float64, bfloat16 or float16.

    The parameters are `edges.weight` [E, D] and `edges.bias` [E]: edge e ends in node e + 1 of the tree. The buffer `layer` is the layer at work, 1 to
    `tree.depth`. ``layer.fill_(1)`` goes back to the first, with the rows that it has, to train it again for an encoder that has moved on.

    Shape:
        - input: [*, D], in the dtype of the edges.
        - target: int64 [*, T] with T below L, the right labels of each query in [0, L), -1 where there are fewer than T.
        - output: a scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.
          Over no query "sum" is 0 and "mean" NaN, as in torch.

    Raises:
        ValueError: an option out of range; a tree of one node; a shape that does not fit; multi-hot targets [*, L].
        TypeError: an option of another type; an argument that is not a dense tensor; `input` of another dtype than the edges; `target` not int64.
        IndexError: a label is not in [0, L) and not -1 (checked on the CPU).
        RuntimeError: as :class:`SampledSoftmaxLoss`.
    """

    _option_names = ("loss", "beam", "reduction", "sparse_grad")

    def __init__(self, in_features: int, tree: LabelTree, *, loss: str = "squared_hinge", beam: int = 10, bias: bool = True,
                 reduction: str = "mean", sparse_grad: Optional[bool] = None, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        if not isinstance(tree, LabelTree):
            raise TypeError("HierarchicalMatcher: expected tree as a LabelTree, got "
                            f"{type(tree).__name__}")
        if tree.depth == 0:
            raise ValueError("HierarchicalMatcher: expected a tree of at least 2 nodes, got 1")
        self._init_table(in_features, tree.num_classes, reduction=reduction, sparse_grad=sparse_grad)
        self._init_options(loss=loss, beam=beam)
        self.tree = tree.clone().to(device_of_values(device))
        self.edges = make_linear(self._name, self.in_features, tree.num_edges, bias, device, dtype)
        self.register_buffer("layer", torch.ones((), dtype=torch.int64, device="cpu"))

    def _check_option(self, name: str, value: Any) -> Any:
        if name == "loss" and value not in _LOSSES:
            raise ValueError(f"{self._name}: expected loss as one of {[*_LOSSES]}, got {value!r}")
        if name == "beam":
            return check_count(self._name, name, value, 1)
        return super()._check_option(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        layer = self.layer  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.layer = layer  # which every step reads: it stays on the host
        return self

    @torch.jit.unused
    def _host_numbers(self) -> List[Tensor]:
        """Numbers that a step reads, and a CUDA graph would keep (make_graphed_step)."""
        return [self.layer]

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.edges.weight, self.edges.bias]
        return tables

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss on the layer at work: input [*, D] and target int64 [*, T] -> a scalar, or [*] with reduction="none". Errors as
        :class:`HierarchicalMatcher`.
        """
        self._queries(input, None)
        target = self._given(input, target)
        self._check_step()
        return torch.ops.xsoftmax.matcher_loss(
            input, self.edges.weight, self.edges.bias, target, self.tree.tables(), self.tree.layer_sizes,
            self.tree.group_sizes, int(self.layer.item()), self._options)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        layer = state_dict.get(prefix + "layer")
        if isinstance(layer, Tensor) and layer.numel() == 1 and not layer.is_meta:
            depth = self._depth_of(state_dict.get(prefix + "tree.parent"))
            if layer.is_floating_point() or layer.is_complex() or not 1 <= int(layer) <= depth:
                error_msgs.append(f"HierarchicalMatcher: expected {prefix}layer as an integer in [1, {depth}], got {layer.item()}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _depth_of(self, parent: Optional[Tensor]) -> int:
        """Of a tree that is to be loaded, if it is one: the tree checks that itself."""
        if not isinstance(parent, Tensor) or parent.shape != self.tree.parent.shape or parent.is_meta:
            return self.tree.depth
        parents, depth = parent.tolist(), 0
        node = len(parents) - 1  # none is deeper
        while 0 < node and 0 <= parents[node] < node:
            node, depth = parents[node], depth + 1
        return depth

    @torch.jit.unused
    @torch.no_grad()
    def next_layer(self) -> bool:
        """Goes on to the next layer, where each node begins with the weights of its parent.

        Returns:
            False after the last layer, where it does nothing; else True.
        """
        layer = int(self.layer)
        if layer == self.tree.depth:
            return False
        self.settle()  # applies pending updates, which children must not copy
        for table in self.edges.parameters():
            torch.ops.xsoftmax.matcher_next_layer_(table, self.tree.parent, self.tree.layer_sizes, layer)
        self.layer += 1
        return True

    @torch.jit.unused
    @torch.no_grad()
    def init_from_prototypes(self, input: Tensor, target: Tensor) -> None:
        r"""Sets the rows of the layer at work to sums of their examples, in place of their parents' weights.

        With the embedded examples h_i, their mean m, and the n_c examples i that have a right label at or below the node c::

            w_c = scale * sum_{i of c} (h_i - m) / sqrt(n_c)
            b_c = offset - w_c . m

        ``scale`` and ``offset`` are those of the least loss on (at most) 4,096 of the examples. These are also part of the sums, so scores are more certain
        than they should be. A node without examples has w_c = 0; without bias, m and the offset are 0. Where most labels have a handful of examples this can be
        better than what training finds (``docs/experiments/many_labels.md``).

        The layers above are left as they are, and go stale where the encoder is trained after them: go back to them then (`layer`).

        Args:
            input: [*, D], the encoder's output for the training set, in its evaluation mode.
            target: [*, T], as in the loss.

        Raises:
            ValueError: no example, another shape, or input, sums or scores that are not finite. Nothing has changed then.
            TypeError: input of another dtype than the weights, or target not int64.
        """
        self._queries(input, None)
        target = self._given(input, target)
        self.settle()  # applies pending updates: the beam reads the layers above
        torch.ops.xsoftmax.matcher_init_layer_(
            list(self.edges.parameters()), input, target, self.tree.tables(), self.tree.layer_sizes,
            int(self.layer), self._options)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, beam: Optional[int] = None, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """The best k labels that a beam search finds, best first.

        A score is the product, along the path, of ``e^{-max(0, 1 - z)^3}``, or with loss="logistic" of ``1 / (1 + e^-z)``, z = w . input + b. The search adds
        logs: the order is right where scores are too small for float32, too; no label's score is below 2^-126, its smallest normal number.

        Args:
            input: [*, D], in the dtype of the edges.
            k: in [0, L].
            beam: at least k. None: the larger of k and ``beam``.
            exclude: int64 [*, E]: the labels that each query does not want, -1 for none. The beam is then of at least k + E.

        Returns:
            (scores, labels), both [*, k]: float64 for float64 edges, else float32; and int64. Where fewer than k are found, the last places are 0 and -1.

        Raises:
            ValueError: a layer is still to be trained; k is not in [0, L], beam is below k, or a shape does not fit.
            TypeError: k is not an int, `input` is of another dtype than the edges, or `exclude` is not int64.
            IndexError: an id of `exclude` is not in [0, L) or -1 (checked on the CPU).
            RuntimeError: a program runs that was exported before all layers were trained.
        """
        exporting = False
        if not torch.jit.is_scripting():
            exporting = torch.compiler.is_exporting()
        if exporting:  # the program asks when it runs: an export cannot read it
            torch._assert_async(self.layer == self.tree.depth, f"HierarchicalMatcher: expected all of {self.tree.depth} layers trained before export")
        elif int(self.layer.item()) != self.tree.depth:
            raise ValueError(f"HierarchicalMatcher: expected all of {self.tree.depth} layers trained, got layer {int(self.layer.item())} at work; "
                             "see next_layer")
        k = self._best(k)
        if exclude is not None and not torch.jit.is_scripting():
            check_tensor(self._name, "exclude", exclude)
        self._table_queries(input, None)
        return torch.ops.xsoftmax.matcher_topk(
            input, self.edges.weight, self.edges.bias, self.tree.tables(), k, beam, exclude, self._options)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The best label that the beam finds: input [*, D] -> int64 [*]. Errors as :meth:`topk`."""
        return self.topk(input, 1, None, None)[1].squeeze(-1)

    @staticmethod
    def targets(Y: Any) -> Tensor:
        """Targets of a scipy sparse matrix: the non-zeros of Y [n, L] as int64 [n, T], -1 where a row has fewer than T.

        Raises:
            TypeError: Y is not a scipy sparse matrix of real numbers.
            ValueError: Y is not of two dimensions, or its parts contradict each other.
        """
        Y = canonical("HierarchicalMatcher.targets", "Y", Y, "labels")
        counts = np.diff(Y.indptr)
        padded = np.full((Y.shape[0], max(int(counts.max(initial=0)), 1)), -1, np.int64)
        padded[np.arange(padded.shape[1]) < counts[:, None]] = Y.indices
        return torch.from_numpy(padded)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", loss={self.loss!r}, beam={self.beam}, layer={int(self.layer)}"
