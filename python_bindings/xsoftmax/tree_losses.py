"""Losses over a tree of classes, with a row of parameters on each edge."""

from typing import Any, Callable, Dict, List, Optional, Union

import torch
from torch import Tensor, nn
from torch.types import Device

from ._checks import check_count
from ._memory import device_of_values
from ._options import option_text
from ._table import TableModule, make_linear
from .cane import estimator_of
from .label_tree import LabelTree
from .samplers import Sampler
from .samplers.complement import noise_outside
from .samplers.sampler import draw_seed


class TreeLoss(TableModule):
    """Base of losses over a tree: the tree, and its edges as `.edges`, a Linear with a row for each."""

    # Losses over one tree share their checkpoints: only a beam tree counts steps, or has noise, which may keep nothing.
    _optional_state = ("steps", "noise.")

    def __init__(self, in_features: int, tree: LabelTree, *, bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: bool = True, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        if not isinstance(tree, LabelTree):
            raise TypeError(f"{type(self).__name__}: expected tree to be a LabelTree, got {type(tree).__name__}")
        self._init_table(in_features, tree.num_classes, reduction=reduction, weight=weight, ignore_index=ignore_index, sparse_grad=sparse_grad)
        # Its own: a checkpoint that is loaded changes no other loss.
        self.tree = tree.clone().to(device_of_values(device))
        self.edges = make_linear(self.in_features, tree.num_edges, bias, device, dtype)

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.edges.weight, self.edges.bias]
        return tables


class BeamTreeLoss(TreeLoss):
    r"""The beam tree (Han et al., 2018, Algorithm 2): CANE whose candidates a beam search in a tree of the classes finds, at a cost of O(log N).

    Each edge of the tree has a row w of parameters, and the score of a class is the sum of w . input along its path. Classes near each other
    in the tree share most of it. In train() the loss is that of :class:`CaneLoss`, the candidates being the best `num_candidates` classes of
    a beam of that width; edges are scored once a query, however many paths share them, and those on all its paths are left out
    (Proposition 1). In eval() it is the exact loss over all paths, which takes O(N) for a query; `topk` and `predict` search with a beam.

    Args:
        in_features: D.
        tree: of the classes; 10 children a node is a good size.
        num_candidates: Nc >= 1.
        beam: the width of the search, in `topk` and `predict`, too: the best Nc of what it finds are the candidates. None: Nc, as in the paper.
            Twice or four times that finds more of the best classes, where the tree fits them loosely (docs/experiments/classifiers.md, Omniglot).
        num_noises: Nn >= 0, noises a query.
        noise_sampler: as in :class:`CaneLoss`, of a sampler that follows no class table.
        noise_reduction: "mean_of_logs" or "log_of_mean", as in :class:`CaneLoss`.
        routed: for a tree of one layer of subsets with the classes below them (LabelTree.from_frequencies): candidates are drawn
            uniformly, without repeats, from the subset of the best score, in the place of the beam search (section 5); fewer where it has
            fewer classes.
        balance_every: steps between two calls of :meth:`balance`, which does not change the loss, and lets the beam find more of what it
            looks for; 0: never, as in the paper. None: 100, more where the tree has more than 50,000 edges, so that a step costs the same; never
            with 16-bit edges, whose rounding would move the scores. Modules that were scripted or compiled leave it to the training loop
            (`loss.balance()`), and frozen edges, calls under torch.no_grad() and torch.func.functional_call leave the edges as they are. Choose
            0 where rows of edges serve as something else, too, such as a tied embedding.
        bias, weight, reduction, ignore_index, sparse_grad: as in :class:`SampledSoftmaxLoss`.

    The parameters are `edges.weight` [E, D] (and `edges.bias`): edge e ends in node e + 1 of the tree.

    Shape: input [*, D], target [*] int64 in [0, N). A scalar, or [*] with reduction="none"; in eval() in float32 for 16-bit edges. The beam of
    a query that is not finite finds classes that mean nothing.
    """

    _option_names = ("estimator", "reduction", "ignore_index", "sparse_grad")

    def __init__(self, in_features: int, tree: LabelTree, *, num_candidates: int, num_noises: int, beam: Optional[int] = None,
                 noise_sampler: Union[Sampler, str] = "uniform", noise_reduction: str = "mean_of_logs", routed: bool = False,
                 balance_every: Optional[int] = None, bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: bool = True, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, tree, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
                         sparse_grad=sparse_grad, device=device, dtype=dtype)
        name = self._name
        self.num_candidates = min(check_count(name, "num_candidates", num_candidates, 1), tree.num_classes)
        self.num_noises = check_count(name, "num_noises", num_noises, 0)
        if self.num_candidates == tree.num_classes and not routed:
            self.num_noises = 0  # nothing is outside; a routed query has the classes of its own subset alone
        self.beam = self.num_candidates if beam is None else min(check_count(name, "beam", beam, 1), tree.num_classes)
        if self.beam < self.num_candidates:
            raise ValueError(f"{name}: expected beam of at least num_candidates, {self.num_candidates}, got {beam}")
        estimator = estimator_of(name, noise_reduction)
        device = device_of_values(device)
        self.noise = noise_outside(name, noise_sampler, self.num_noises, tree.num_classes, in_features, bias, follows_table=False).to(device)
        self.noise._claim(name)
        self._balances_16_bits = True
        if balance_every is None:
            balance_every = max(100, tree.num_edges // 500)
            self._balances_16_bits = False
        self.balance_every = check_count(name, "balance_every", balance_every, 0)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device="cpu"))
        self.routed = routed
        if routed and not (tree.depth == 2 and bool((tree.parent[tree.class_node] > 0).all())):
            raise ValueError(f"{name}: expected a tree of one layer of subsets beside routed=True, got {tree}")
        self._init_options(estimator=estimator)
        self._search = option_text(num_candidates=self.num_candidates, beam=self.beam, routed=routed)
        if not self.edges.weight.is_meta and tree.depth > 1:
            with torch.no_grad():
                self.edges.weight.mul_(tree.depth**-0.5)  # so that a class scores as it would with a row of its own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        steps = self.steps  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.steps = steps  # which every step reads: it stays on the host
        return self

    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        if not self.training:
            return self.exact(input, target)
        self._queries(input, self._given(target))
        self._check_step()
        weight, bias, tree = self.edges.weight, self.edges.bias, self.tree.tables()
        queries, counted = torch.ops.xsoftmax.tree_queries(input, target, weight, bias, tree, self.ignore_index)
        found = self._candidates(queries, generator)
        noise = self.noise.sample_outside(queries, found, counted, generator)
        ids, log_count = torch.ops.xsoftmax.present_set(found)
        if not torch.jit.is_scripting():
            self._count_step()  # nothing below can go wrong
        target_log_count: List[Optional[Tensor]] = [None, noise.target_log_count]
        return torch.ops.xsoftmax.beam_tree_loss(
            input, weight, bias, target, tree, self.tree.layer_sizes, [ids, noise.ids], [log_count, noise.log_count],
            target_log_count, [True, False], self.weight, self._options)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        parent, leaf = (state_dict.get(f"{prefix}tree.{name}") for name in ("parent", "class_node"))
        if self.routed and parent is not None and leaf is not None and parent.shape == self.tree.parent.shape:
            subsets = parent == 0
            if not bool(subsets[parent[leaf].clamp(min=0)].all()):
                error_msgs.append(f"{self._name}: expected {prefix}tree.* to hold one layer of subsets beside routed=True, got another tree")

    def _candidates(self, queries: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        """[Q, Nc], -1 where there are fewer."""
        seed = draw_seed(queries, generator) if self.routed else None
        return torch.ops.xsoftmax.beam_tree_candidates(seed, queries, self.edges.weight, self.edges.bias, self.tree.tables(), self.tree.layer_sizes,
                                                       self._search)

    @torch.jit.export
    def candidates(self, input: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        """The classes that a step takes as candidates: [*, D] -> int64 [*, Nc], -1 where there are fewer. See
        :func:`xsoftmax.metrics.coverage`."""
        queries = self._queries(input, None).detach()
        return self._candidates(queries, generator).reshape(list(input.shape[:-1]) + [self.num_candidates])

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """`F.cross_entropy(self.scores(input), target, ...)`; what `forward` gives in eval(). Each call makes :meth:`class_table`, [N, D] in
        float32 for 16-bit edges, and nothing of [Q, N]: evaluate many queries at once."""
        self._table_queries(input, self._given(target))
        return torch.ops.xsoftmax.tree_cross_entropy(input, self.edges.weight, self.edges.bias, target, self.tree.tables(), self.tree.layer_sizes,
                                                     self.weight, self._options)

    def _along_paths(self, edges: Tensor, dim: int) -> Tensor:
        """Something of each edge, along `dim`, summed along the path to each class, which then are that dimension."""
        return torch.ops.xsoftmax.tree_class_scores(edges, self.tree.parent, self.tree.class_node, self.tree.layer_sizes, dim)

    @torch.jit.unused
    def _count_step(self) -> None:
        low = self.edges.weight.dtype in (torch.float16, torch.bfloat16)
        learns = torch.is_grad_enabled() and isinstance(self.edges.weight, nn.Parameter) and self.edges.weight.requires_grad
        if self.balance_every == 0 or not learns or torch.compiler.is_compiling() or self.edges.weight.is_meta or (low and not self._balances_16_bits):
            return
        self.steps += 1
        if int(self.steps) % self.balance_every == 0:
            self.balance()

    @torch.jit.export
    def balance(self) -> None:
        """Moves what the children of a node have in common to the edge above it: their mean, from the leaves up. No score changes, so the
        loss does not either; but a beam that has come to a node then sees the mean score of what is below it, and finds more of the best
        classes. O(E D). An optimizer's averages stay as they are. A loss that waits for its backward pass keeps its gradient: it depends
        on sums along whole paths alone."""
        self.settle()  # a mean of rows that owe different steps would not decay as they do
        weight, bias = self.edges.weight.data, self.edges.bias  # .data: unseen by autograd, see above
        torch.ops.xsoftmax.tree_balance_(weight, self.tree.first_child, self.tree.layer_sizes)
        if bias is not None:
            torch.ops.xsoftmax.tree_balance_(bias.data, self.tree.first_child, self.tree.layer_sizes)

    @torch.jit.export
    def class_table(self) -> tuple[Tensor, Optional[Tensor]]:
        """The same scores as a plain table: weight [N, D] and bias [N] of `F.linear(input, weight, bias) == self.scores(input)`."""
        self.settle()
        bias = self.edges.bias
        return self._along_paths(self.edges.weight, 0), None if bias is None else self._along_paths(bias, 0)

    @torch.jit.export
    def scores(self, input: Tensor) -> Tensor:
        """The scores of all classes: [*, D] -> [*, N]. As large as it looks, and larger by the tree's inner nodes."""
        return self._along_paths(self.edges(self._table_queries(input, None)), 1).reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """`F.log_softmax(self.scores(input), -1)`: [*, D] -> [*, N]."""
        return torch.log_softmax(self.scores(input), -1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, width: Optional[int] = None, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """The best k classes that a beam of `width` (None: the larger of k and `beam`) finds: (scores, class ids), both [*, k], best first; -inf
        and -1 behind the last of fewer than k. The scores are not normalised: that would take all classes.

        exclude: [*, E], int64: the ids that each query does not want, -1 for none. The beam is then of at least k + E."""
        k = self._best(k)
        width = max(k, self.beam) if width is None else width
        if width < k:
            raise ValueError(f"{self._name}: expected width of at least k={k}, got {width}")
        scores, classes = torch.ops.xsoftmax.beam_search(self._table_queries(input, None), self.edges.weight, self.edges.bias,
                                                         self.tree.first_child, self.tree.node_class, max(width, self._with_excluded(k, input, exclude)))
        return self._without_excluded(scores, classes, k, input, exclude)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The best class that the beam finds: [*, D] -> [*]."""
        return self.topk(input, 1, None, None)[1].squeeze(-1)

    def extra_repr(self) -> str:
        text = super().extra_repr() + f", num_candidates={self.num_candidates}, num_noises={self.num_noises}"
        text += f", beam={self.beam}" if self.beam != self.num_candidates else ""
        text += ", noise_reduction='log_of_mean'" if self.estimator == "cane_log_of_mean" else ""
        return text + (", routed=True" if self.routed else "") + f", balance_every={self.balance_every}"


class HierarchicalSoftmaxLoss(TreeLoss):
    r"""Hierarchical softmax over any tree (Morin and Bengio, 2005): a class has the product of the probabilities on the way to it, a softmax over
    the children of each node. Exact and normalised, in train() and eval() alike, at a cost of O(depth * arity) instead of O(N).

    ``loss(input, target) == F.nll_loss(loss.log_prob(input), target, weight, reduction=..., ignore_index=...)``.

    Args:
        in_features: D.
        tree: of the classes: LabelTree.huffman(counts) for the least expected cost, LabelTree.from_vectors for the better model.
        bias, weight, reduction, ignore_index, sparse_grad: as in :class:`SampledSoftmaxLoss`.

    The parameters are `edges.weight` [E, D] (and `edges.bias`): edge e ends in node e + 1 of the tree.

    Shape: input [*, D], target [*] int64 in [0, N). A scalar, or [*] with reduction="none".
    """

    def __init__(self, in_features: int, tree: LabelTree, *, bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: bool = True, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, tree, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index, sparse_grad=sparse_grad,
                         device=device, dtype=dtype)
        self._init_options()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self._check_step()
        else:
            self.settle()
        self._queries(input, self._given(target))
        return torch.ops.xsoftmax.hierarchical_softmax_loss(input, self.edges.weight, self.edges.bias, target, self.tree.tables(),
                                                            self.tree.layer_sizes, self.tree.group_sizes, self.weight, self._options)

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss itself, which is exact."""
        self.settle()
        return self.forward(input, target)

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """The log-probabilities of all classes: [*, D] -> [*, N]. As large as it looks, and larger by the tree's inner nodes."""
        edges = self.edges(self._table_queries(input, None))
        log_prob = torch.ops.xsoftmax.hierarchical_log_prob(edges, self.tree.parent, self.tree.class_node, self.tree.layer_sizes)
        return log_prob.reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def topk(self, input: Tensor, k: int, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """`self.log_prob(input).topk(k)`, by a best-first search that scores few of the classes: (log-probabilities, class ids), both [*, k],
        best first. exclude: as of :meth:`LinearLoss.topk`."""
        k = self._best(k)
        values, classes = torch.ops.xsoftmax.hierarchical_topk(self._table_queries(input, None), self.edges.weight, self.edges.bias,
                                                               self.tree.first_child, self.tree.node_class, self._with_excluded(k, input, exclude))
        return self._without_excluded(values, classes, k, input, exclude)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class: [*, D] -> [*]."""
        return self.topk(input, 1, None)[1].squeeze(-1)
