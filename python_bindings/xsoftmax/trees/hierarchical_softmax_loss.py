"""The hierarchical softmax over a label tree."""

from typing import Optional

import torch
from torch import Tensor
from torch.types import Device

from .._core.checks import check_generator
from .._core.typing import Numbers
from .label_tree import LabelTree
from .tree_loss import TreeLoss


class HierarchicalSoftmaxLoss(TreeLoss):
    r"""Hierarchical softmax over any tree (Morin and Bengio, 2005), exact and normalised in train()
    and eval() alike.

    Each inner node has a softmax over its children. The probability of a class is the product of
    the probabilities along its path from the root. A step costs O(depth * arity) instead of O(N).

    In PyTorch::

        loss(input, target) == F.nll_loss(loss.log_prob(input), target, weight, reduction=...,
                                          ignore_index=...)

    Args:
        in_features: D, the width of a query; at least 0.
        tree: a :class:`LabelTree` of the N classes: :meth:`LabelTree.huffman` for the lowest
            expected cost, :meth:`LabelTree.from_vectors` for the better model. The loss keeps a
            copy.
        bias, weight, reduction, ignore_index, sparse_grad: as in :class:`SampledSoftmaxLoss`.
        device, dtype: of the edges. The dtype is float32, float64, bfloat16 or float16.

    The parameters are `edges.weight` [E, D] and, with ``bias=True``, `edges.bias` [E]. Edge e ends
    in node e + 1 of the tree.

    Shape:
        - input: [*, D], in the dtype of the edges.
        - target: int64 [*] in [0, N) or ignore_index. Multiple positives per query are not
          supported.
        - output: a scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.
          For an empty batch, or if all targets are ignored, "sum" returns 0 and "mean" returns
          NaN, as in torch.

    Raises:
        ValueError: an option is out of range; a shape does not match; or the edges are parametrized
            without sparse_grad=False.
        TypeError: an option has the wrong type; an argument is not a dense tensor; `input` has
            another dtype or device than the edges; or `target` is not int64.
        IndexError: a target is not in [0, N) and not ignore_index (checked on the CPU).
        RuntimeError: as :class:`SampledSoftmaxLoss`.
    """
    def __init__(self, in_features: int, tree: LabelTree, *, bias: bool = False,
                 weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: Optional[bool] = None,
                 device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, tree, bias=bias, weight=weight, reduction=reduction,
                         ignore_index=ignore_index, sparse_grad=sparse_grad, device=device,
                         dtype=dtype)
        self._init_options()

    def forward(self, input: Tensor, target: Tensor,
                generator: Optional[torch.Generator] = None) -> Tensor:
        """Computes the loss.

        Args:
            input: [*, D], in the dtype of the edges.
            target: int64 [*], in [0, N) or ignore_index.
            generator: not used, because the loss draws no samples; accepted so that all tree losses
                share one signature.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: as :class:`HierarchicalSoftmaxLoss`
        """
        if not torch.jit.is_scripting():
            check_generator(self._name, generator)
        if self.training:
            self._check_step()
        else:
            self.catch_up()
        self._queries(input, self._check_tensors(input, target))
        return torch.ops.xsoftmax.hierarchical_softmax_loss(input, self.edges.weight,
                                                            self.edges.bias, target,
                                                            self.tree.tables(),
                                                            self.tree.layer_sizes,
                                                            self.tree.group_sizes, self.weight,
                                                            self._options)

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns ``loss(input, target)``, which is already exact."""
        self.catch_up()
        return self.forward(input, target, None)

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """Computes the log-probabilities of all classes.

        The result and the scores of all edges are in memory at once.

        Args:
            input: [*, D], in the dtype of the edges.

        Returns:
            [*, N]; float64 for float64 edges, else float32.

        Raises:
            ValueError: `input` does not have shape [*, D].
            TypeError: `input` has another dtype than the edges.
        """
        log_prob = torch.ops.xsoftmax.hierarchical_log_prob(self._edge_scores(input),
                                                            self.tree.parent, self.tree.class_node,
                                                            self.tree.layer_sizes)
        return log_prob.reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def topk(self, input: Tensor, k: int,
             exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Returns the k most probable classes, ``self.log_prob(input).topk(k)``, best first. A
        best-first search scores only a few of the classes.

        Args:
            input: [*, D], in the dtype of the edges.
            k: in [0, N].
            exclude: int64 [*, E], as in :meth:`LinearLoss.topk`.

        Returns:
            (log-probabilities, class ids), both [*, k]: float64 for float64 edges, else float32;
            and int64.

        Raises:
            ValueError, TypeError, IndexError: as :meth:`LinearLoss.topk`
        """
        k = self._check_k(k)
        values, classes = torch.ops.xsoftmax.hierarchical_topk(
            self._table_queries(input, None), self.edges.weight, self.edges.bias,
            self.tree.first_child, self.tree.node_class, self._add_excluded(k, input, exclude))
        return self._drop_excluded(values, classes, k, input, exclude)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """Returns the most probable class: input [*, D] -> int64 [*]. Errors as :meth:`topk`."""
        return self.topk(input, 1, None)[1].squeeze(-1)
