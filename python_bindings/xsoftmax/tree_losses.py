"""Losses over a tree of classes, with a row of parameters on each edge."""

from typing import Any, Callable, Dict, List, Optional, Union

import torch
from torch import Tensor, nn
from torch.types import Device

from ._checks import check_bool, check_count, check_generator
from ._memory import device_of_values
from ._options import option_text
from ._table import TableModule, make_linear
from ._typing import Numbers
from .cane import check_cane_estimator, estimator_of
from .label_tree import LabelTree
from .samplers import Sampler
from .samplers.complement import noise_outside
from .samplers.sampler import draw_seed


class TreeLoss(TableModule):
    """Base of losses over a tree of classes: the tree, and its edges as `.edges`, an ``nn.Linear`` with a row for each edge."""

    # Losses over one tree share their checkpoints: only a beam tree counts steps, or has noise, which may keep nothing.
    _optional_state = ("steps", "noise.")

    def __init__(self, in_features: int, tree: LabelTree, *, bias: bool = False, weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: Optional[bool] = None, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        if not isinstance(tree, LabelTree):
            raise TypeError(f"{type(self).__name__}: expected tree as a LabelTree, such as "
                            f"LabelTree.balanced(num_classes), got {type(tree).__name__}")
        self._init_table(in_features, tree.num_classes, reduction=reduction, weight=weight, ignore_index=ignore_index, sparse_grad=sparse_grad)
        # Its own: a checkpoint that is loaded changes no other loss.
        self.tree = tree.clone().to(device_of_values(device))
        self.edges = make_linear(self._name, self.in_features, tree.num_edges, bias, device, dtype)

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.edges.weight, self.edges.bias]
        return tables

    def _other_table(self, state_dict: Dict[str, Any], prefix: str) -> List[str]:
        saved, rows = state_dict.get(prefix + "edges.weight"), self.edges.weight
        if not isinstance(saved, Tensor) or len(saved) == len(rows):
            return []
        got = f"expected a checkpoint of a tree of {len(rows)} edges, got one of {len(saved)}"
        hint = ("make the loss with the tree that was saved, xs.LabelTree(first_child, parent, "
                "node_class, class_node) of the checkpoint's tree.*")
        return [f"{self._name}: {got}: {hint}"]


class BeamTreeLoss(TreeLoss):
    r"""The beam tree (Han et al., 2018, Algorithm 2): CANE over a tree of the classes, whose candidates a beam search finds in O(log N).

    Each edge of the tree has a row w of parameters. The score of a class is the sum of w . input along its path from the root, so classes that are near each
    other in the tree share most of their score.

    In train() the loss is that of :class:`CaneLoss`. The candidates are the best `num_candidates` classes that a beam of width `beam` finds. Each edge is
    scored once for a query, however many paths share it, and edges on all paths of a query are left out (Proposition 1).

    In eval() the loss is exact, over the paths of all classes, ``F.cross_entropy(loss.scores(input), target, weight, ...)``, at a cost of O(N) for a query.
    :meth:`topk` and :meth:`predict` search with a beam.

    Args:
        in_features: D, the width of a query; at least 0.
        tree: a :class:`LabelTree` of the N classes; 10 children a node is a good size. The loss copies it.
        num_candidates: Nc >= 1; above N: N.
        num_noises: Nn >= 0, noises a query. 0 where all classes are candidates.
        beam: the width of the search, at least Nc, in :meth:`topk` and :meth:`predict`, too. The best Nc of the classes found are the candidates. None: Nc, as
            in the paper. Twice or four times that finds more of the best classes where the tree fits them loosely (docs/experiments/classifiers.md).
        noise_sampler: as in :class:`CaneLoss`; a sampler that follows no class table.
        noise_reduction: "mean_of_logs" or "log_of_mean", as in :class:`CaneLoss`.
        routed: for a tree of one layer of subsets with the classes below them (:meth:`LabelTree.from_frequencies`). Instead of a beam search, candidates are
            drawn uniformly, without repeats, from the subset of the best score (section 5). There are fewer where the subset has fewer classes.
        balance_every: steps between two calls of :meth:`balance`, which does not change the loss and lets the beam find more of the best classes. 0: never, as
            in the paper. None: 100, more where the tree has more than 50,000 edges, so that a step costs the same on average; never with 16-bit edges, whose
            rounding would move the scores. Compiled modules leave it to the training loop (`loss.balance()`). Frozen edges, calls under
            torch.no_grad() and torch.func.functional_call leave the edges as they are. Choose 0 where rows of edges serve as something else, too, such as a
            tied embedding.
        bias, weight, reduction, ignore_index, sparse_grad: as in :class:`SampledSoftmaxLoss`.
        device, dtype: of the edges. The dtype is float32, float64, bfloat16 or float16.

    The parameters are `edges.weight` [E, D] and, with a bias, `edges.bias` [E]. Edge e ends in node e + 1 of the tree.

    Shape:
        - input: [*, D], in the dtype of the edges. The candidates of a query that is not finite mean nothing.
        - target: int64 [*] in [0, N) or ignore_index. Several positives of a query are not supported.
        - output: a scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.
          Over no query (an empty batch, or all targets ignored) "sum"
          is 0 and "mean" NaN, as in torch.

    Raises:
        ValueError: an option out of range; a beam below num_candidates; a tree without one layer of subsets beside routed=True; a noise_sampler that follows a
            class table or that :class:`CaneLoss` refuses; a shape that does not fit.
        TypeError: an option of another type; an argument that is not a dense tensor; `input` of another dtype or device than the edges; `target` not int64.
        IndexError: a target is not in [0, N) and not ignore_index (checked on the CPU).
        RuntimeError: as :class:`SampledSoftmaxLoss`.
    """

    _option_names = ("estimator", "reduction", "ignore_index", "sparse_grad")

    _fixed_options = ("num_candidates", "num_noises", "beam", "routed", "noise_reduction")

    def __init__(self, in_features: int, tree: LabelTree, *, num_candidates: int, num_noises: int, beam: Optional[int] = None,
                 noise_sampler: Union[Sampler, str] = "uniform", noise_reduction: str = "mean_of_logs", routed: bool = False,
                 balance_every: Optional[int] = None, bias: bool = False, weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: Optional[bool] = None, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, tree, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
                         sparse_grad=sparse_grad, device=device, dtype=dtype)
        name = self._name
        self.num_candidates = min(check_count(name, "num_candidates", num_candidates, 1), tree.num_classes)
        self.num_noises = check_count(name, "num_noises", num_noises, 0)
        if self.num_candidates == tree.num_classes and not routed:
            self.num_noises = 0  # nothing is outside; a routed query has the classes of its own subset alone
        self.beam = self.num_candidates if beam is None else min(check_count(name, "beam", beam, 1), tree.num_classes)
        if self.beam < self.num_candidates:
            raise ValueError(f"{name}: expected beam of at least "
                             f"num_candidates={self.num_candidates}, got {beam}")
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
        self.routed = check_bool(name, "routed", routed)
        if routed and not (tree.depth == 2 and bool((tree.parent[tree.class_node] > 0).all())):
            raise ValueError(f"{name}: expected a tree of one layer of subsets for routed=True, as "
                             f"LabelTree.from_frequencies makes it, got {tree}")
        self._init_options(estimator=estimator)
        self._search = self._step_options = ""
        self._update_texts("balance_every")
        if not self.edges.weight.is_meta and tree.depth > 1:
            with torch.no_grad():
                self.edges.weight.mul_(tree.depth**-0.5)  # so that a class scores as it would with a row of its own

    def _is_option(self, name: str) -> bool:
        return name == "balance_every" or super()._is_option(name)

    def _check_option(self, name: str, value: Any) -> Any:
        if name == "estimator":
            check_cane_estimator(self._name, value)
        return check_count(self._name, name, value, 0) if name == "balance_every" else super()._check_option(name, value)

    def _update_texts(self, name: str) -> None:
        super()._update_texts(name)
        if "_step_options" in self.__dict__:
            self._search = option_text(num_candidates=self.num_candidates, beam=self.beam, routed=self.routed)
            balance = option_text(balance_every=self.balance_every, balances_16_bits=self._balances_16_bits)
            self._step_options = ",".join((self._options, self._search, balance))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        steps = self.steps  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.steps = steps  # which every step reads: it stays on the host
        return self

    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        """The loss of candidates and noises in train(); the exact loss in eval().

        Args:
            input: [*, D], in the dtype of the edges.
            target: int64 [*], in [0, N) or ignore_index.
            generator: on the device of `input`. None: torch's default generator.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: as :class:`BeamTreeLoss`
        """
        if not torch.jit.is_scripting():
            check_generator(self._name, generator)
        if not self.training:
            return self.exact(input, target)
        self._queries(input, self._given(input, target))
        self._check_step()
        weight, bias, tree, layer_sizes = self.edges.weight, self.edges.bias, self.tree.tables(), self.tree.layer_sizes
        steps: Optional[Tensor] = self.steps
        if not torch.jit.is_scripting():
            steps = self._counted_steps()
        noise_text, options = self.noise.describe(), self._step_options
        if noise_text != "":
            return torch.ops.xsoftmax.beam_tree_step(input, weight, bias, target, tree, layer_sizes, self.noise.state_tensors(), noise_text, options, generator,
                                                     steps, self.weight)
        queries, counted = torch.ops.xsoftmax.tree_queries(input, target, weight, bias, tree, self.ignore_index, self.weight)
        found = self._candidates(queries, generator)
        noise = self.noise.sample_outside(queries, found, counted, generator)
        ids, log_count = torch.ops.xsoftmax.present_set(found)
        torch.ops.xsoftmax.beam_tree_count_step_(weight, bias, tree, layer_sizes, steps, options)  # nothing below can go wrong
        target_log_count: List[Optional[Tensor]] = [None, noise.target_log_count]
        return torch.ops.xsoftmax.beam_tree_loss(
            input, weight, bias, target, tree, layer_sizes, [ids, noise.ids], [log_count, noise.log_count],
            target_log_count, [True, False], self.weight, self._options)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        parent, leaf = (state_dict.get(f"{prefix}tree.{name}") for name in ("parent", "class_node"))
        if self.routed and isinstance(parent, Tensor) and isinstance(leaf, Tensor) and parent.shape == self.tree.parent.shape:
            subsets = parent == 0
            if not bool(subsets[parent[leaf].clamp(min=0)].all()):
                error_msgs.append(f"{self._name}: expected {prefix}tree.* to hold one layer of subsets for routed=True, got another tree")

    def _candidates(self, queries: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        """[Q, Nc], -1 where there are fewer."""
        seed = draw_seed(queries, generator) if self.routed else None
        return torch.ops.xsoftmax.beam_tree_candidates(seed, queries, self.edges.weight, self.edges.bias, self.tree.tables(), self.tree.layer_sizes,
                                                       self._search)

    @torch.jit.export
    def candidates(self, input: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        """The classes that a step takes as candidates; :func:`xsoftmax.metrics.coverage` says how many targets they cover.

        Args:
            input: [*, D], in the dtype of the edges.
            generator: of a routed loss, which draws them; on the device of `input`. None: torch's default generator.

        Returns:
            int64 [*, Nc], -1 where there are fewer.

        Raises:
            ValueError: `input` is not of shape [*, D].
            TypeError: `input` is of another dtype than the edges.
        """
        queries = self._queries(input, None).detach()
        return self._candidates(queries, generator).reshape(list(input.shape[:-1]) + [self.num_candidates])

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """The exact loss, in train() and in eval(): ``F.cross_entropy(self.scores(input), target, self.weight, ...)``; what `forward` gives in eval().

        A call makes :meth:`class_table` ([N, D], in float32 for 16-bit edges), and nothing of size [Q, N]. Evaluate many queries at once.

        Arguments, shapes and errors as :meth:`forward`.
        """
        self._table_queries(input, self._given(input, target))
        return torch.ops.xsoftmax.tree_cross_entropy(input, self.edges.weight, self.edges.bias, target, self.tree.tables(), self.tree.layer_sizes,
                                                     self.weight, self._options)

    def _along_paths(self, edges: Tensor, dim: int) -> Tensor:
        """Something of each edge, along `dim`, summed along the path to each class, which then are that dimension."""
        return torch.ops.xsoftmax.tree_class_scores(edges, self.tree.parent, self.tree.class_node, self.tree.layer_sizes, dim)

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        """Whether the next step may balance the edges, which no CUDA graph captures (make_graphed_step)."""
        return self.balance_every > 0 and (int(self.steps) + 1) % self.balance_every == 0

    @torch.jit.unused
    def _host_counters(self) -> List[Tensor]:
        return [self.steps]

    @torch.jit.unused
    def _counted_steps(self) -> Optional[Tensor]:
        """The counter of a step that trains edges of its own: not under torch.func.functional_call, nor in a compiled graph."""
        return self.steps if isinstance(self.edges.weight, nn.Parameter) and not torch.compiler.is_compiling() else None

    @torch.jit.export
    def balance(self) -> None:
        """Moves the mean of the children of each node to the edge above the node, from the leaves up.

        No score changes, so the loss does not change. A beam that has come to a node then sees the mean score of the classes below it, and finds more of the
        best classes. The cost is O(E D). The averages of an optimizer stay as they are. A loss that waits for its backward pass keeps its gradient, which
        depends on sums along whole paths alone.
        """
        torch.ops.xsoftmax.beam_tree_balance_(self.edges.weight, self.edges.bias, self.tree.tables(), self.tree.layer_sizes)

    @torch.jit.export
    def class_table(self) -> tuple[Tensor, Optional[Tensor]]:
        """The scores as a plain table: ``F.linear(input, weight, bias) == self.scores(input)``.

        Returns:
            (weight [N, D], bias [N] or None), in the dtype of the edges.
        """
        self.settle()
        bias = self.edges.bias
        return self._along_paths(self.edges.weight, 0), None if bias is None else self._along_paths(bias, 0)

    @torch.jit.export
    def scores(self, input: Tensor) -> Tensor:
        """The scores of all classes: input [*, D] -> [*, N], float64 for float64 edges, else float32.

        The result is in memory as a whole, and the scores of the tree's inner nodes beside it.

        Raises:
            ValueError: `input` is not of shape [*, D].
            TypeError: `input` is of another dtype than the edges.
        """
        scores = torch.ops.xsoftmax.linear_scores(self._table_queries(input, None), self.edges.weight, self.edges.bias)
        return self._along_paths(scores, 1).reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """The log-probabilities of all classes, ``F.log_softmax(self.scores(input), -1)``: input [*, D] -> [*, N]. Errors as :meth:`scores`."""
        return torch.log_softmax(self.scores(input), -1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, width: Optional[int] = None, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """The best k classes that a beam finds, best first. They need not be the best of all classes.

        Args:
            input: [*, D], in the dtype of the edges.
            k: in [0, N].
            width: of the beam, at least k. None: the larger of k and `beam`.
            exclude: int64 [*, E]: the ids that each query does not want, -1 for none. The beam is then of at least k + E.

        Returns:
            (scores, class ids), both [*, k]: float64 for float64 edges, else float32; and int64. Where fewer than k classes are found, the last places are -inf
            and -1. The scores are not log-probabilities: their normaliser would take all classes.

        Raises:
            ValueError: k is not in [0, N], width is below k, `input` is not of shape [*, D], or `exclude` is not of shape [*, E].
            TypeError: k is not an int, `input` is of another dtype than the edges, or `exclude` is not int64.
            IndexError: an id of `exclude` is not in [0, N) or -1 (checked on the CPU).
        """
        k = self._best(k)
        width = max(k, self.beam) if width is None else width
        if width < k:
            raise ValueError(f"{self._name}: expected width of at least k={k}, got {width}")
        scores, classes = torch.ops.xsoftmax.beam_search(self._table_queries(input, None), self.edges.weight, self.edges.bias,
                                                         self.tree.first_child, self.tree.node_class, max(width, self._with_excluded(k, input, exclude)))
        return self._without_excluded(scores, classes, k, input, exclude)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The best class that the beam finds: input [*, D] -> int64 [*]. Errors as :meth:`topk`."""
        return self.topk(input, 1, None, None)[1].squeeze(-1)

    def extra_repr(self) -> str:
        text = super().extra_repr() + f", num_candidates={self.num_candidates}, num_noises={self.num_noises}"
        text += f", beam={self.beam}" if self.beam != self.num_candidates else ""
        text += ", noise_reduction='log_of_mean'" if self.estimator == "cane_log_of_mean" else ""
        return text + (", routed=True" if self.routed else "") + f", balance_every={self.balance_every}"


class HierarchicalSoftmaxLoss(TreeLoss):
    r"""Hierarchical softmax over any tree (Morin and Bengio, 2005), exact and normalised in train() and eval() alike.

    The probability of a class is the product of the probabilities on its path from the root, where the children of each node have a softmax. A step costs
    O(depth * arity) instead of O(N).

    ``loss(input, target) == F.nll_loss(loss.log_prob(input), target, weight, reduction=..., ignore_index=...)``.

    Args:
        in_features: D, the width of a query; at least 0.
        tree: a :class:`LabelTree` of the N classes: :meth:`LabelTree.huffman` for the least expected cost, :meth:`LabelTree.from_vectors` for the better model.
            The loss copies it.
        bias, weight, reduction, ignore_index, sparse_grad: as in :class:`SampledSoftmaxLoss`.
        device, dtype: of the edges. The dtype is float32, float64, bfloat16 or float16.

    The parameters are `edges.weight` [E, D] and, with a bias, `edges.bias` [E]. Edge e ends in node e + 1 of the tree.

    Shape:
        - input: [*, D], in the dtype of the edges.
        - target: int64 [*] in [0, N) or ignore_index. Several positives of a query are not supported.
        - output: a scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.
          Over no query (an empty batch, or all targets ignored) "sum"
          is 0 and "mean" NaN, as in torch.

    Raises:
        ValueError: an option out of range; a shape that does not fit; parametrized edges unless sparse_grad=False.
        TypeError: an option of another type; an argument that is not a dense tensor; `input` of another dtype or device than the edges; `target` not int64.
        IndexError: a target is not in [0, N) and not ignore_index (checked on the CPU).
        RuntimeError: as :class:`SampledSoftmaxLoss`.
    """

    def __init__(self, in_features: int, tree: LabelTree, *, bias: bool = False, weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: Optional[bool] = None, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, tree, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index, sparse_grad=sparse_grad,
                         device=device, dtype=dtype)
        self._init_options()

    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        """The loss: input [*, D] and target int64 [*] -> a scalar, or [*] with reduction="none". Errors as :class:`HierarchicalSoftmaxLoss`.

        It draws nothing: `generator` is an argument so that all losses over trees are called alike, and is not used.
        """
        if not torch.jit.is_scripting():
            check_generator(self._name, generator)
        if self.training:
            self._check_step()
        else:
            self.settle()
        self._queries(input, self._given(input, target))
        return torch.ops.xsoftmax.hierarchical_softmax_loss(input, self.edges.weight, self.edges.bias, target, self.tree.tables(),
                                                            self.tree.layer_sizes, self.tree.group_sizes, self.weight, self._options)

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """The same as ``loss(input, target)``, which is exact."""
        self.settle()
        return self.forward(input, target, None)

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """The log-probabilities of all classes: input [*, D] -> [*, N], float64 for float64 edges, else float32.

        The result is in memory as a whole, and the scores of the tree's inner nodes beside it.

        Raises:
            ValueError: `input` is not of shape [*, D].
            TypeError: `input` is of another dtype than the edges.
        """
        edges = torch.ops.xsoftmax.linear_scores(self._table_queries(input, None), self.edges.weight, self.edges.bias)
        log_prob = torch.ops.xsoftmax.hierarchical_log_prob(edges, self.tree.parent, self.tree.class_node, self.tree.layer_sizes)
        return log_prob.reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def topk(self, input: Tensor, k: int, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """The k most probable classes, ``self.log_prob(input).topk(k)``, best first, by a best-first search that scores few of the classes.

        Args:
            input: [*, D], in the dtype of the edges.
            k: in [0, N].
            exclude: int64 [*, E], as in :meth:`LinearLoss.topk`.

        Returns:
            (log-probabilities, class ids), both [*, k]: float64 for float64 edges, else float32; and int64.

        Raises:
            ValueError, TypeError, IndexError: as :meth:`LinearLoss.topk`
        """
        k = self._best(k)
        values, classes = torch.ops.xsoftmax.hierarchical_topk(self._table_queries(input, None), self.edges.weight, self.edges.bias,
                                                               self.tree.first_child, self.tree.node_class, self._with_excluded(k, input, exclude))
        return self._without_excluded(values, classes, k, input, exclude)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class: input [*, D] -> int64 [*]. Errors as :meth:`topk`."""
        return self.topk(input, 1, None)[1].squeeze(-1)
