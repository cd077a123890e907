"""CANE over a label tree whose candidates a beam search finds."""

from typing import Any, Callable, Dict, List, Optional, Union

import torch
from torch import Tensor, nn
from torch.types import Device

from .._core.checks import check_bool, check_count, check_generator
from .._core.memory import device_of_values
from .._core.options import option_text
from .._core.typing import Numbers
from ..losses.cane import check_cane_estimator, estimator_of
from .label_tree import LabelTree
from ..samplers import Sampler
from ..samplers.complement import make_noise_sampler
from ..samplers.sampler import draw_seed
from .tree_loss import TreeLoss


class BeamTreeLoss(TreeLoss):
    r"""The beam tree loss (Han et al., 2018, Algorithm 2): CANE over a tree of classes, with
    candidates that a beam search finds in O(log N).

    Each edge of the tree has a parameter row w. The score of a class is the sum of w . input over
    the edges of its path from the root, so classes that are close in the tree share most of their
    score.

    In train() the loss is that of :class:`CaneLoss`, and the candidates are the `num_candidates`
    best classes found by a beam search of width `beam`. Each edge is scored once per query, even if
    several paths share it, and edges that lie on all paths of a query are skipped (Proposition 1).

    In eval() the loss is exact: ``F.cross_entropy(loss.scores(input), target, weight, ...)``, at a
    cost of O(N) per query. :meth:`topk` and :meth:`predict` use a beam search.

    Args:
        in_features: D, the width of a query; at least 0.
        tree: a :class:`LabelTree` of the N classes, typically with an arity of 10. The loss keeps a
            copy.
        num_candidates: Nc, the number of candidates per query, at least 1; clipped to N.
        num_noises: Nn, the number of noise classes per query, at least 0. It becomes 0 if all
            classes are candidates.
        beam: the width of the beam search, at least Nc; also the default width of :meth:`topk` and
            :meth:`predict`. The best Nc of the classes found become the candidates. None: Nc, as in
            the paper. A beam two or four times as wide finds more of the best classes if the tree
            fits them loosely (docs/experiments/cane_classes.md).
        noise_sampler: as in :class:`CaneLoss`; samplers that follow the class table are not
            supported.
        noise_reduction: "mean_of_logs" or "log_of_mean", as in :class:`CaneLoss`.
        routed: replaces the beam search, for a tree with one layer of subsets above the classes
            (:meth:`LabelTree.from_frequencies`): the candidates are sampled uniformly without
            replacement from the subset with the best score (section 5). A subset of fewer than Nc
            classes yields fewer candidates.
        balance_every: the number of steps between calls of :meth:`balance`, which leaves the loss
            unchanged and lets the beam find more of the best classes. 0: never, as in the paper.
            None: every max(100, E / 500) steps for E edges, which bounds the average cost of a
            step, and never with 16-bit edges, because rounding would change the scores. Compiled
            modules do not balance; call ``loss.balance()`` in the training loop. Frozen edges and
            calls under torch.no_grad() or torch.func.functional_call do not balance either. Pass 0
            if the edge rows are also used elsewhere, for example as a tied embedding.
        bias, weight, reduction, ignore_index, sparse_grad: as in :class:`SampledSoftmaxLoss`.
        device, dtype: of the edges. The dtype is float32, float64, bfloat16 or float16.

    Parameters and shapes as :class:`HierarchicalSoftmaxLoss`. The candidates of a query that is not
    finite are unspecified.

    Raises:
        ValueError: an option is out of range; beam is below num_candidates; routed=True with a tree
            that does not have exactly one layer of subsets; noise_sampler follows a class table or
            is not supported by :class:`CaneLoss`; or a shape does not match.
        TypeError: an option has the wrong type; an argument is not a dense tensor; `input` has
            another dtype or device than the edges; or `target` is not int64.
        IndexError: a target is not in [0, N) and not ignore_index (checked on the CPU).
        RuntimeError: as :class:`SampledSoftmaxLoss`.
    """

    _option_names = ("estimator", "reduction", "ignore_index", "sparse_grad")

    _fixed_options = ("num_candidates", "num_noises", "beam", "routed", "noise_reduction")

    def __init__(self, in_features: int, tree: LabelTree, *, num_candidates: int, num_noises: int,
                 beam: Optional[int] = None, noise_sampler: Union[Sampler, str] = "uniform",
                 noise_reduction: str = "mean_of_logs", routed: bool = False,
                 balance_every: Optional[int] = None, bias: bool = False,
                 weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: Optional[bool] = None,
                 device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, tree, bias=bias, weight=weight, reduction=reduction,
                         ignore_index=ignore_index, sparse_grad=sparse_grad, device=device,
                         dtype=dtype)
        name = self._name
        self.num_candidates = min(check_count(name, "num_candidates", num_candidates, 1),
                                  tree.num_classes)
        self.num_noises = check_count(name, "num_noises", num_noises, 0)
        if self.num_candidates == tree.num_classes and not routed:
            # No class is outside the candidates. (Routed candidates cover only one subset.)
            self.num_noises = 0
        self.beam = self.num_candidates if beam is None else min(check_count(name, "beam", beam, 1),
                                                                 tree.num_classes)
        if self.beam < self.num_candidates:
            raise ValueError(f"{name}: expected beam of at least "
                             f"num_candidates={self.num_candidates}, got {beam}")
        estimator = estimator_of(name, noise_reduction)
        device = device_of_values(device)
        self.noise = make_noise_sampler(name, noise_sampler, self.num_noises, tree.num_classes,
                                        in_features, bias, follows_table=False).to(device)
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
                # gives class scores the variance that they would have with one row per class
                self.edges.weight.mul_(tree.depth**-0.5)

    def _is_option(self, name: str) -> bool:
        return name == "balance_every" or super()._is_option(name)

    def _check_option(self, name: str, value: Any) -> Any:
        if name == "estimator":
            check_cane_estimator(self._name, value)
        return check_count(self._name, name, value,
                           0) if name == "balance_every" else super()._check_option(name, value)

    def _update_texts(self, name: str) -> None:
        super()._update_texts(name)
        if "_step_options" in self.__dict__:
            self._search = option_text(num_candidates=self.num_candidates, beam=self.beam,
                                       routed=self.routed)
            balance = option_text(balance_every=self.balance_every,
                                  balances_16_bits=self._balances_16_bits)
            self._step_options = ",".join((self._options, self._search, balance))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        steps = self.steps  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.steps = steps  # stays on the CPU, because every step reads it
        return self

    def forward(self, input: Tensor, target: Tensor,
                generator: Optional[torch.Generator] = None) -> Tensor:
        """Computes the candidate loss in train(), and the exact loss in eval().

        Args:
            input: [*, D], in the dtype of the edges.
            target: int64 [*], in [0, N) or ignore_index.
            generator: a generator on the device of `input`. None: torch's default generator.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for float64 edges, else float32.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: as :class:`BeamTreeLoss`
        """
        if not torch.jit.is_scripting():
            check_generator(self._name, generator)
        if not self.training:
            return self.exact(input, target)
        self._queries(input, self._check_tensors(input, target))
        self._check_step()
        weight, bias, tree, layer_sizes = self.edges.weight, self.edges.bias, self.tree.tables(
        ), self.tree.layer_sizes
        steps: Optional[Tensor] = self.steps
        if not torch.jit.is_scripting():
            steps = self._find_step_counter()
        noise_text, options = self.noise.describe(), self._step_options
        if noise_text != "":
            return torch.ops.xsoftmax.beam_tree_step(input, weight, bias, target, tree, layer_sizes,
                                                     self.noise.state_tensors(), noise_text,
                                                     options, generator, steps, self.weight)
        queries, sampler_target = torch.ops.xsoftmax.tree_queries(input, target, weight, bias, tree,
                                                                  self.ignore_index, self.weight)
        candidate_ids = self._candidates(queries, generator)
        noise = self.noise.sample_outside(queries, candidate_ids, sampler_target, generator)
        ids, log_count = torch.ops.xsoftmax.always_scored_set(candidate_ids)
        # Count the step last: an error above leaves the counter unchanged.
        torch.ops.xsoftmax.beam_tree_count_step_(weight, bias, tree, layer_sizes, steps, options)
        target_log_count: List[Optional[Tensor]] = [None, noise.target_log_count]
        return torch.ops.xsoftmax.beam_tree_loss(input, weight, bias, target, tree, layer_sizes,
                                                 [ids, noise.ids], [log_count, noise.log_count],
                                                 target_log_count, [True, False], self.weight,
                                                 self._options)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        parent, leaf = (state_dict.get(f"{prefix}tree.{name}") for name in ("parent", "class_node"))
        if self.routed and isinstance(parent, Tensor) and isinstance(
                leaf, Tensor) and parent.shape == self.tree.parent.shape:
            subsets = parent == 0
            if not bool(subsets[parent[leaf].clamp(min=0)].all()):
                error_msgs.append(f"{self._name}: expected {prefix}tree.* to hold one layer of "
                                  "subsets for routed=True, got another tree")

    def _candidates(self, queries: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        """Returns the candidates [Q, Nc], padded with -1."""
        seed = draw_seed(queries, generator) if self.routed else None
        return torch.ops.xsoftmax.beam_tree_candidates(seed, queries,
                                                       self.edges.weight, self.edges.bias,
                                                       self.tree.tables(), self.tree.layer_sizes,
                                                       self._search)

    @torch.jit.export
    def candidates(self, input: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        """Returns the candidates of a training step. :func:`xsoftmax.metrics.coverage` computes how
        many targets they contain.

        Args:
            input: [*, D], in the dtype of the edges.
            generator: used only with routed=True, which samples the candidates; on the device of
                `input`. None: torch's default generator.

        Returns:
            int64 [*, Nc], padded with -1.

        Raises:
            ValueError: `input` does not have shape [*, D].
            TypeError: `input` has another dtype than the edges.
        """
        queries = self._queries(input, None).detach()
        return self._candidates(queries,
                                generator).reshape(list(input.shape[:-1]) + [self.num_candidates])

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """Computes the exact loss, in train() and eval() alike: ``F.cross_entropy(
        self.scores(input), target, self.weight, ...)``. In eval(), `forward` returns this loss.

        Each call computes :meth:`class_table` ([N, D], in float32 for 16-bit edges) but no tensor
        of shape [Q, N], so evaluate many queries per call.

        Arguments, shapes and errors as :meth:`forward`.
        """
        self._table_queries(input, self._check_tensors(input, target))
        return torch.ops.xsoftmax.tree_cross_entropy(input,
                                                     self.edges.weight, self.edges.bias, target,
                                                     self.tree.tables(), self.tree.layer_sizes,
                                                     self.weight, self._options)

    def _sum_along_paths(self, edges: Tensor, dim: int) -> Tensor:
        """Sums values of edges, along dimension `dim`, over the path to each class. In the result
        that dimension has size N."""
        return torch.ops.xsoftmax.tree_class_scores(edges, self.tree.parent, self.tree.class_node,
                                                    self.tree.layer_sizes, dim)

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        """Returns whether the next step may balance the edges. Such a step must run eagerly: a CUDA
        graph cannot capture it (make_graphed_step)."""
        return self.balance_every > 0 and (int(self.steps) + 1) % self.balance_every == 0

    @torch.jit.unused
    def _host_counters(self) -> List[Tensor]:
        return [self.steps]

    @torch.jit.unused
    def _find_step_counter(self) -> Optional[Tensor]:
        """Returns the step counter, or None if the step is not counted: under
        torch.func.functional_call, which replaces the edges, and in a compiled graph."""
        return self.steps if isinstance(
            self.edges.weight, nn.Parameter) and not torch.compiler.is_compiling() else None

    @torch.jit.export
    def balance(self) -> None:
        """Moves the mean of each node's children to the edge above that node, from the leaves
        upward.

        All class scores, and therefore the loss, stay the same. A beam that reaches a node then
        sees the mean score of the classes below it, and finds more of the best classes. The cost is
        O(E D).

        The optimizer's running averages are not changed. A loss whose backward pass has not run yet
        keeps its correct gradient, which depends only on sums over whole paths.
        """
        torch.ops.xsoftmax.beam_tree_balance_(self.edges.weight, self.edges.bias,
                                              self.tree.tables(), self.tree.layer_sizes)

    @torch.jit.export
    def class_table(self) -> tuple[Tensor, Optional[Tensor]]:
        """Returns the class scores as a plain table: ``F.linear(input, weight, bias) ==
        self.scores(input)``.

        Returns:
            (weight [N, D], bias [N] or None), in the dtype of the edges.
        """
        self.catch_up()
        bias = self.edges.bias
        return self._sum_along_paths(self.edges.weight,
                                     0), None if bias is None else self._sum_along_paths(bias, 0)

    @torch.jit.export
    def scores(self, input: Tensor) -> Tensor:
        """Computes the scores of all classes: input [*, D] -> [*, N]. Memory, dtypes and errors as
        :meth:`HierarchicalSoftmaxLoss.log_prob`."""
        return self._sum_along_paths(self._edge_scores(input),
                                     1).reshape(list(input.shape[:-1]) + [self.num_classes])

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """Computes the log-probabilities of all classes, ``F.log_softmax(self.scores(input), -1)``:
        input [*, D] -> [*, N]. Errors as :meth:`scores`."""
        return torch.log_softmax(self.scores(input), -1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, width: Optional[int] = None,
             exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Returns the k best classes that a beam search finds, best first. The search is
        approximate: it may miss some of the k best of all classes.

        Args:
            input: [*, D], in the dtype of the edges.
            k: in [0, N].
            width: the width of the beam, at least k. None: the larger of k and `beam`.
            exclude: int64 [*, E], class ids that each query must not return, padded with -1. The
                beam is then at least k + E wide.

        Returns:
            (scores, class ids), both [*, k]: float64 for float64 edges, else float32; and int64. If
            fewer than k classes are found, the remaining places hold -inf and -1. The scores are
            not log-probabilities, whose normaliser would need all classes.

        Raises:
            ValueError: k is not in [0, N], width is below k, `input` does not have shape [*, D], or
                `exclude` does not have shape [*, E].
            TypeError: k is not an int, `input` has another dtype than the edges, or `exclude` is
                not int64.
            IndexError: an id of `exclude` is not in [0, N) or -1 (checked on the CPU).
        """
        k = self._check_k(k)
        width = max(k, self.beam) if width is None else width
        if width < k:
            raise ValueError(f"{self._name}: expected width of at least k={k}, got {width}")
        scores, classes = torch.ops.xsoftmax.beam_search(
            self._table_queries(input, None), self.edges.weight, self.edges.bias,
            self.tree.first_child, self.tree.node_class,
            max(width, self._add_excluded(k, input, exclude)))
        return self._drop_excluded(scores, classes, k, input, exclude)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """Returns the best class that the beam search finds: input [*, D] -> int64 [*]. Errors as
        :meth:`topk`."""
        return self.topk(input, 1, None, None)[1].squeeze(-1)

    def extra_repr(self) -> str:
        text = super().extra_repr(
        ) + f", num_candidates={self.num_candidates}, num_noises={self.num_noises}"
        text += f", beam={self.beam}" if self.beam != self.num_candidates else ""
        text += ", noise_reduction='log_of_mean'" if self.estimator == "cane_log_of_mean" else ""
        return text + (", routed=True"
                       if self.routed else "") + f", balance_every={self.balance_every}"
