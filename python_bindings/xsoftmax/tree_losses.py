"""Losses over a tree of classes, with a row of parameters on each edge."""

import math
from typing import List, Optional, Union

import torch
from torch import Tensor, nn

from ._checks import check_class_weights, check_count, check_reduction
from ._memory import device_of_values
from ._options import option_text
from .cane import estimator_of
from .label_tree import LabelTree
from .optim.settle import settle
from .losses import flat_queries, make_linear, noise_outside, settle_before
from .samplers import Sampler
from .samplers.sampler import draw_seed


class TreeLoss(nn.Module):
    """What losses over a tree share: the tree, its edges as `.edges` (a Linear with a row for each), and the reduction."""

    def __init__(self, in_features: int, tree: LabelTree, *, bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: bool = True, device=None, dtype=None) -> None:
        super().__init__()
        self._name = name = type(self).__name__
        check_count(name, "in_features", in_features, 0)
        if not isinstance(tree, LabelTree):
            raise TypeError(f"{name}: expected tree to be a LabelTree, got {type(tree).__name__}")
        check_class_weights(name, weight, tree.num_classes)
        self.in_features = in_features
        self.num_classes = tree.num_classes
        self.reduction = check_reduction(name, reduction)
        self.ignore_index = check_count(name, "ignore_index", ignore_index, None)
        self.sparse_grad = sparse_grad
        # Its own: a checkpoint that is loaded changes no other loss.
        self.tree = tree.clone().to(device_of_values(device))
        self.edges = make_linear(in_features, tree.num_edges, bias, device, dtype)
        self.register_buffer("weight", weight)
        self._options = option_text(reduction=reduction, ignore_index=ignore_index, sparse_grad=sparse_grad)
        self.register_state_dict_pre_hook(settle_before)

    @torch.jit.export
    def settle(self) -> None:
        """Brings all edges up to date: applies the steps that a row optimizer owes their rows. What reads all of them, `eval()`, `exact`, `scores`,
        `topk`, `predict`, `log_prob`, `class_table`, `balance` and `state_dict`, does so by itself."""
        settle(self.edges.weight)
        settle(self.edges.bias)

    def train(self, mode: bool = True) -> "TreeLoss":
        if not mode:
            self.settle()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # Losses over one tree share their checkpoints: only a beam tree counts steps, or has noise, which may keep nothing.
        foreign = (prefix + "steps", prefix + "noise.")
        for keys in (missing_keys, unexpected_keys):
            keys[:] = [key for key in keys if not key.startswith(foreign)]

    def _all_edges(self, input: Tensor) -> Tensor:
        """input [*, D] as [Q, D], checked, for what reads all edges."""
        self.settle()
        return flat_queries(self._name, self.in_features, input, None)

    def _check_k(self, k: int) -> None:
        if k < 0 or k > self.num_classes:
            raise ValueError(f"{self._name}: expected k in [0, {self.num_classes}], got {k}")

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}"
        if self.reduction != "mean":
            text += f", reduction={self.reduction!r}"
        if self.ignore_index != -100:
            text += f", ignore_index={self.ignore_index}"
        return text


class BeamTreeLoss(TreeLoss):
    r"""The beam tree (CANE paper, Algorithm 2): CANE whose candidates a beam search in a tree of the classes finds, at a cost of O(log N).

    Each edge of the tree has a row w of parameters, and the score of a class is the sum of w . input along its path. Classes near each other
    in the tree share most of it. In train() the loss is that of :class:`CaneLoss`, the candidates being the best `num_candidates` classes of
    a beam of that width; edges are scored once a query, however many paths share them, and those on all its paths are left out
    (Proposition 1). In eval() it is the exact loss over all paths, which takes O(N) for a query; `topk` and `predict` search with a beam.

    Args:
        in_features: D.
        tree: of the classes; 10 children a node is a good size.
        num_candidates: Nc >= 1.
        beam: the width of the search, in `topk` and `predict`, too: the best Nc of what it finds are the candidates. None: Nc, as in the paper.
            Twice or four times that finds more of the best classes, where the tree fits them loosely (docs/results.md, Omniglot).
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

    def __init__(self, in_features: int, tree: LabelTree, *, num_candidates: int, num_noises: int, beam: Optional[int] = None,
                 noise_sampler: Union[Sampler, str] = "uniform", noise_reduction: str = "mean_of_logs", routed: bool = False,
                 balance_every: Optional[int] = None, bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: bool = True, device=None, dtype=None) -> None:
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
        self.estimator = estimator_of(name, noise_reduction)
        device = device_of_values(device)
        noise_sampler = noise_sampler if self.num_noises > 0 else "uniform"  # which then draws nothing
        self.noise = noise_outside(name, noise_sampler, self.num_noises, tree.num_classes, in_features, bias, device, follows_table=False)
        self.noise._claim(name)
        self._balances_16_bits = True
        if balance_every is None:
            balance_every = max(100, tree.num_edges // 500)
            self._balances_16_bits = False
        self.balance_every = check_count(name, "balance_every", balance_every, 0)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.routed = routed
        if routed and not (tree.depth == 2 and bool((tree.parent[tree.class_node] > 0).all())):
            raise ValueError(f"{name}: expected a tree of one layer of subsets beside routed=True, got {tree}")
        self._reduction_options = option_text(reduction=reduction, ignore_index=ignore_index)
        self._options = f"{self._reduction_options},{option_text(estimator=self.estimator, sparse_grad=sparse_grad)}"
        self._search = option_text(num_candidates=self.num_candidates, beam=self.beam, routed=routed)
        if not self.edges.weight.is_meta and tree.depth > 1:
            with torch.no_grad():
                self.edges.weight.mul_(tree.depth**-0.5)  # so that a class scores as it would with a row of its own

    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        if not self.training:
            return self.exact(input, target)
        flat_queries(self._name, self.in_features, input, target)
        weight, bias, tree = self.edges.weight, self.edges.bias, self.tree.tables()
        queries, counted = torch.ops.xsoftmax.tree_queries(input, target, weight, bias, tree, self.ignore_index)
        found = self._candidates(queries, generator)
        noise = self.noise.sample_outside(queries, found, counted, generator)
        log_count = torch.zeros(found.shape, device=found.device).masked_fill(found < 0, math.inf)
        if not torch.jit.is_scripting():
            self._count_step()  # nothing below can go wrong
        target_log_count: List[Optional[Tensor]] = [None, noise.target_log_count]
        return torch.ops.xsoftmax.beam_tree_loss(
            input, weight, bias, target, tree, self.tree.layer_sizes, [found.clamp(min=0), noise.ids], [log_count, noise.log_count],
            target_log_count, [True, False], self.weight, self._options)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
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
        queries = flat_queries(self._name, self.in_features, input, None).detach()
        return self._candidates(queries, generator).reshape(list(input.shape[:-1]) + [self.num_candidates])

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """`F.cross_entropy(self.scores(input), target, ...)`; what `forward` gives in eval(). Each call makes :meth:`class_table`, [N, D] in
        float32 for 16-bit edges, and nothing of [Q, N]: evaluate many queries at once."""
        self.settle()
        flat_queries(self._name, self.in_features, input, target)
        return torch.ops.xsoftmax.tree_cross_entropy(input, self.edges.weight, self.edges.bias, target, self.tree.tables(), self.tree.layer_sizes,
                                                     self.weight, self._reduction_options)

    def _along_paths(self, edges: Tensor, dim: int) -> Tensor:
        """Something of each edge, along `dim`, summed along the path to each class, which then are that dimension."""
        return torch.ops.xsoftmax.tree_class_scores(edges, self.tree.parent, self.tree.class_node, self.tree.layer_sizes, dim)

    @torch.jit.unused
    def _count_step(self) -> None:
        low = self.edges.weight.dtype in (torch.float16, torch.bfloat16)
        learns = torch.is_grad_enabled() and isinstance(self.edges.weight, nn.Parameter) and self.edges.weight.requires_grad
        if self.balance_every == 0 or not learns or torch.compiler.is_compiling() or self.steps.is_meta or (low and not self._balances_16_bits):
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
        return self._along_paths(self.edges(self._all_edges(input)), 1).reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """`F.log_softmax(self.scores(input), -1)`: [*, D] -> [*, N]."""
        return torch.log_softmax(self.scores(input), -1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, width: Optional[int] = None) -> tuple[Tensor, Tensor]:
        """The best k classes that a beam of `width` (None: the larger of k and `beam`) finds: (scores, class ids), both [*, k], best first; -inf
        and -1 behind the last of fewer than k. The scores are not normalised: that would take all classes."""
        self._check_k(k)
        width = max(k, self.beam) if width is None else width
        if width < k:
            raise ValueError(f"{self._name}: expected width of at least k={k}, got {width}")
        scores, classes = torch.ops.xsoftmax.beam_search(self._all_edges(input), self.edges.weight, self.edges.bias,
                                                         self.tree.first_child, self.tree.node_class, width)
        shape = list(input.shape[:-1]) + [k]
        return scores[:, :k].reshape(shape), classes[:, :k].reshape(shape)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The best class that the beam finds: [*, D] -> [*]."""
        return self.topk(input, 1, None)[1].squeeze(-1)

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

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if not self.training:
            self.settle()
        flat_queries(self._name, self.in_features, input, target)
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
        edges = self.edges(self._all_edges(input))
        log_prob = torch.ops.xsoftmax.hierarchical_log_prob(edges, self.tree.parent, self.tree.class_node, self.tree.layer_sizes)
        return log_prob.reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def topk(self, input: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`self.log_prob(input).topk(k)`, by a best-first search that scores few of the classes: (log-probabilities, class ids), both [*, k],
        best first."""
        self._check_k(k)
        values, classes = torch.ops.xsoftmax.hierarchical_topk(self._all_edges(input), self.edges.weight, self.edges.bias,
                                                               self.tree.first_child, self.tree.node_class, k)
        shape = list(input.shape[:-1]) + [k]
        return values.reshape(shape), classes.reshape(shape)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class: [*, D] -> [*]."""
        return self.topk(input, 1)[1].squeeze(-1)
