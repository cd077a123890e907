"""A hierarchical matcher under an encoder: extreme multi-label classification of what a network has read."""

from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.types import Device

from ._checks import check_count
from ._memory import device_of_values
from ._sparse import canonical
from ._table import TableModule, make_linear
from .label_tree import LabelTree

_TRANSFORMS = {"squared_hinge": "log-l3-hinge", "logistic": "log-sigmoid"}


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

    def __init__(self, in_features: int, tree: LabelTree, *, loss: str = "squared_hinge", beam: int = 10, bias: bool = True,
                 reduction: str = "mean", sparse_grad: Optional[bool] = None, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        if not isinstance(tree, LabelTree):
            raise TypeError("HierarchicalMatcher: expected tree as a LabelTree, got "
                            f"{type(tree).__name__}")
        if tree.depth == 0:
            raise ValueError("HierarchicalMatcher: expected a tree of at least 2 nodes, got 1")
        if loss not in _TRANSFORMS:
            raise ValueError(f"HierarchicalMatcher: expected loss as one of {sorted(_TRANSFORMS)}, got {loss!r}")
        self._init_table(in_features, tree.num_classes, reduction=reduction, sparse_grad=sparse_grad)
        self.loss, self.transform = loss, _TRANSFORMS[loss]
        self.beam = check_count("HierarchicalMatcher", "beam", beam, 1)
        self.tree = tree.clone().to(device_of_values(device))
        self.edges = make_linear(self._name, self.in_features, tree.num_edges, bias, device, dtype)
        self.register_buffer("layer", torch.ones((), dtype=torch.int64, device="cpu"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        layer = self.layer  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.layer = layer  # which every step reads: it stays on the host
        return self

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.edges.weight, self.edges.bias]
        return tables

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss on the layer at work: input [*, D] and target int64 [*, T] -> a scalar, or [*] with reduction="none". Errors as
        :class:`HierarchicalMatcher`.
        """
        queries = self._examples(input, target)
        self._check_step()
        layer = int(self.layer.item())
        wanted = self._nodes(target.reshape(queries.size(0), target.size(-1)), layer)
        nodes, offsets, right = torch.ops.xsoftmax.shortlist(self._reached(queries.detach(), layer), wanted, self.tree.first_child, self.tree.parent,
                                                             self.tree.group_sizes[layer - 1])
        nothing = right < 0  # places of a device that does not wait for how many there are
        scores = torch.ops.xsoftmax.ragged_scores(queries, self.edges.weight, self.edges.bias, nodes - 1, offsets, self.sparse_grad)
        each = self._each(scores.masked_fill(nothing, 0.0), right).masked_fill(nothing, 0.0)
        if self.reduction == "sum":
            return each.sum()
        if self.reduction == "mean":
            return each.sum() / queries.size(0)
        return torch.segment_reduce(each, "sum", offsets=offsets, unsafe=True, initial=0.0).reshape(input.shape[:-1])

    def _examples(self, input: Tensor, target: Tensor) -> Tensor:
        queries = self._queries(input, None)
        target = self._given(input, target)
        if target.dim() != input.dim() or target.shape[:-1] != input.shape[:-1]:
            raise ValueError("HierarchicalMatcher: expected target of shape "
                             f"{list(input.shape[:-1])} with one more dimension, for several "
                             f"labels, got {list(target.shape)}")
        if 1 < target.shape[-1] == self.num_classes:
            raise ValueError(f"HierarchicalMatcher: expected ids of labels, [*, T] with T below their number, got shape {list(target.shape)}, a number "
                             "for each label as multi-hot targets have")
        return queries

    def _begin(self, layer: int) -> int:
        """The first node of a layer; of the one below the last: the number of nodes."""
        begin = 1
        for size in self.tree.layer_sizes[: layer - 1]:
            begin += size
        return begin

    def _shortlist(self, queries: Tensor, right: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each query: nodes of the layer [R], offsets [Q + 1], which of the nodes are right [R]."""
        return torch.ops.xsoftmax.shortlist(self._reached(queries, layer), right, self.tree.first_child, self.tree.parent)

    def _each(self, scores: Tensor, right: Tensor) -> Tensor:
        """The loss of each node on the shortlists."""
        margin = (2 * right - 1) * scores
        if self.loss == "squared_hinge":
            return (1 - margin).clamp(min=0).square()
        return nn.functional.softplus(-margin)

    def _reached(self, queries: Tensor, layer: int) -> Tensor:
        """The nodes of the layer above that the beam reaches: [Q, beam], -1 where there are fewer."""
        end = self._begin(layer)
        if end == 1:
            return torch.zeros([queries.size(0), 1], dtype=torch.int64, device=queries.device)
        bias = self.edges.bias
        return torch.ops.xsoftmax.beam_search(queries, self.edges.weight[: end - 1], None if bias is None else bias[: end - 1],
                                              self.tree.first_child[: end + 1].clamp(max=end),  # the layers above are a tree, too
                                              torch.arange(end, device=queries.device), self.beam, self.transform)[1]

    def _nodes(self, target: Tensor, layer: int) -> Tensor:
        """The nodes of a layer above the right labels, -1 where there is none."""
        node = torch.ops.xsoftmax.label_tree_nodes(self.tree.class_node, target.reshape(-1), -1).reshape(target.shape)
        begin, end = self._begin(layer), self._begin(layer + 1)
        for _ in range(self.tree.depth - layer):
            node = torch.where(node >= end, self.tree.parent[node.clamp_min(0)], node)
        return torch.where((target >= 0) & (node >= begin), node, -1)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        layer = state_dict.get(prefix + "layer")
        if isinstance(layer, Tensor) and layer.numel() == 1 and not layer.is_meta:
            depth = self._depth_of(state_dict.get(prefix + "tree.parent"))
            if not 1 <= int(layer) <= depth:
                error_msgs.append(f"HierarchicalMatcher: expected {prefix}layer in [1, {depth}], got {int(layer)}")
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
        self.settle()  # what a parent owes is not for its children to pay
        begin, end = self._begin(layer + 1), self._begin(layer + 2)
        parent = self.tree.parent[begin:end]
        for table in self.edges.parameters():
            above = table[(parent - 1).clamp_min(0)]
            table[begin - 1 : end - 1] = above
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
        queries, table = self._examples(input, target), self.edges.weight
        if len(queries) == 0:
            raise ValueError("HierarchicalMatcher.init_from_prototypes: expected at least one example, got none")
        if queries.dtype != table.dtype:
            raise TypeError(f"HierarchicalMatcher.init_from_prototypes: expected input of the weights' dtype, {table.dtype}, got {queries.dtype}")
        if not bool(queries.isfinite().all()):
            raise ValueError("HierarchicalMatcher.init_from_prototypes: expected input of finite numbers, got others")
        self.settle()  # the beam looks at the layers above; what rows owe is not for new ones to pay
        layer = int(self.layer)
        nodes = self._nodes(target.reshape(len(queries), -1), layer)
        rows, shift = self._prototypes(queries, nodes, layer)
        scale, offset = self._fit(queries, nodes, layer, rows, shift)

        rows, shift = (rows * scale).to(table.dtype), (shift * scale + offset).to(table.dtype)
        if not bool(rows.isfinite().all() & shift.isfinite().all()):
            raise ValueError("HierarchicalMatcher.init_from_prototypes: expected input whose sums and scores are finite, got larger numbers")
        edges = slice(self._begin(layer) - 1, self._begin(layer + 1) - 1)
        table[edges] = rows
        if self.edges.bias is not None:
            self.edges.bias[edges] = shift

    def _prototypes(self, queries: Tensor, nodes: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Of each node of the layer: sum_{i of c} (h_i - m) / sqrt(n_c), and its product with -m; in float32 at least."""
        begin, count = self._begin(layer), self._begin(layer + 1) - self._begin(layer)
        dtype = torch.promote_types(queries.dtype, torch.float32)
        mean = queries.mean(0, dtype=dtype) if self.edges.bias is not None else queries.new_zeros(queries.size(1), dtype=dtype)
        sums, counts = queries.new_zeros(count, queries.size(1), dtype=dtype), queries.new_zeros(count, dtype=dtype)
        for block, right in zip(queries.split(4096), nodes.split(4096)):
            right = right.sort(1).values  # a node above two labels of an example counts once
            right[:, 1:][right[:, 1:] == right[:, :-1]] = -1
            row, column = (right >= 0).nonzero(as_tuple=True)
            found, at = (right[row, column] - begin).unique(return_inverse=True)  # a block meets some of the nodes: the others cost nothing
            has = torch.sparse_coo_tensor(torch.stack([at, row]), torch.ones(len(at), dtype=dtype, device=at.device), (len(found), len(block)),
                                          check_invariants=False)
            sums.index_add_(0, found, has @ (block.to(dtype) - mean))
            counts.index_add_(0, found, torch.bincount(at, minlength=len(found)).to(dtype))
        sums /= counts.clamp(min=1).sqrt().unsqueeze(1)
        return sums, -(sums @ mean)

    def _fit(self, queries: Tensor, nodes: Tensor, layer: int, rows: Tensor, shift: Tensor) -> tuple[float, float]:
        """scale and offset (0 without bias) with which the scores ``scale * (rows @ h + shift) + offset`` have the least loss."""
        sample = torch.linspace(0, len(queries) - 1, min(len(queries), 4096), device=queries.device).long()
        begin, scores, right = self._begin(layer), [], []
        for part in sample.split(512):
            on_list, offsets, is_right = self._shortlist(queries[part], nodes[part], layer)
            scores.append(torch.ops.xsoftmax.ragged_scores(queries[part].to(rows.dtype), rows, shift, on_list - begin, offsets, False).double())
            right.append(is_right.double())
        score, is_right = torch.cat(scores), torch.cat(right)
        unit = score.square().mean().sqrt() if len(score) else score.new_zeros(())
        if not unit > 0:
            return 1.0, 0.0
        score /= unit
        fit = score.new_zeros(2).requires_grad_()
        optimizer = torch.optim.LBFGS([fit], max_iter=100, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = self._each(fit[0] * score + (fit[1] if self.edges.bias is not None else 0), is_right).mean()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        scale, offset = fit.tolist()
        return scale / unit.item(), offset

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
        width = max(k, self.beam) if beam is None else beam
        if width < k:
            raise ValueError(f"HierarchicalMatcher: expected a beam of at least k={k}, got {width}")
        scores, labels = torch.ops.xsoftmax.beam_search(self._table_queries(input, None), self.edges.weight, self.edges.bias,
                                                        self.tree.first_child, self.tree.node_class,
                                                        max(width, 1, self._with_excluded(k, input, exclude)), self.transform)
        scores, labels = self._without_excluded(scores, labels, k, input, exclude)
        return scores.exp().clamp_min(2.0**-126).masked_fill(labels < 0, 0.0), labels

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
