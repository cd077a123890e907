"""Top-k search in a class table through an index, and export of the table to faiss."""

import copy
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from ._core import hooks, long_work
from ._core.checks import check_count, check_tensor
from .tables.table_module import TableModule, flat_queries
from ._core.typing import Module
from .samplers import MidxSampler

_CELL_SIZE = 32  # minimum average size of a sampler's cells: smaller cells cost more than they save
_CALIBRATION_QUERIES = 256  # example queries needed to translate a recall into a cell budget


class SearchResult(NamedTuple):
    """The result of :meth:`xsoftmax.LinearLoss.search`.

    - scores: floating [*, k], the scores of the best classes, best first.
    - ids: int64 [*, k], the ids of these classes.
    - cells_read: int64 [*], the number of cells read for each query.
    - certified: bool [*], whether these are provably the best k classes.
    """

    scores: Tensor
    ids: Tensor
    cells_read: Tensor
    certified: Tensor


class SearchIndex:
    """Index of a snapshot of a class table, on the device of the table, with the example queries
    that determine how many cells a recall takes; see :meth:`xsoftmax.LinearLoss.search`."""
    def __init__(self, weight: Tensor, bias: Optional[Tensor],
                 codewords: Optional[Tuple[Tensor, Tensor]] = None, num_codewords: int = 0,
                 queries: Optional[Tensor] = None) -> None:
        hooks.after_steps(_count_fused_step)
        # Read before the build, so that writes by other threads during it make the index stale.
        self._versions = _version(weight), _version(bias)
        first, second = (None, None) if codewords is None else codewords
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.tensors: List[Tensor] = long_work.run(
            "search index", torch.ops.xsoftmax.midx_search_index, self.weight, self.bias, first,
            second, num_codewords, torch.tensor(0),
            None if queries is None else queries.detach().to(self.weight))
        self.num_cells = len(self.tensors[2]) - 1
        self._queries = self.weight.new_empty(0, self.weight.shape[1])
        self._budgets: Dict[Tuple[int, float], int] = {}
        if queries is not None:
            self.calibrate(queries)

    def _is_current(self, weight: Tensor, bias: Optional[Tensor]) -> bool:
        """Returns whether this is the indexed table, unchanged. Writes that PyTorch does not count,
        such as those through ``.data``, are not noticed."""
        return self._versions == (_version(weight), _version(bias))

    def to(self, device: Union[str, int, torch.device]) -> "SearchIndex":
        """Returns the index on another device, together with a copy of the table, which it
        searches.

        A loss that is moved by ``loss.to(device)`` moves its index too.
        """
        return self._copy_to(self.weight.to(device),
                             None if self.bias is None else self.bias.to(device))

    def _copy_to(self, weight: Tensor, bias: Optional[Tensor]) -> "SearchIndex":
        """Returns a copy of the index for an equal table, on the device of that table."""
        index = copy.copy(self)
        index._versions = _version(weight), _version(bias)
        index.weight, index.bias = weight.detach(), None if bias is None else bias.detach()
        index.tensors = [tensor.to(weight.device) for tensor in self.tensors]
        index._queries, index._budgets = self._queries.to(weight.device), dict(self._budgets)
        return index

    def calibrate(self, queries: Tensor) -> None:
        """Sets the example queries that determine how many cells a recall takes.

        Args:
            queries: floating [Q, D], at least 256, distributed like the queries to be searched.
        """
        self._queries = queries.detach().to(self.weight, copy=True)
        self._budgets.clear()

    def budget(self, k: int, recall: float) -> Optional[int]:
        """Returns the number of cells needed for a recall, or None while there are too few example
        queries."""
        if (k, recall) not in self._budgets:
            if len(self._queries) < _CALIBRATION_QUERIES:
                return None
            self._budgets[k, recall] = int(
                long_work.run("recall", torch.ops.xsoftmax.search_budget, self._queries,
                              self.weight, self.bias, self.tensors, k, recall))
        return self._budgets[k, recall]

    def search(self, queries: Tensor, k: int, recall: Optional[float],
               max_cells: Optional[int]) -> SearchResult:
        """Searches for the k best classes of queries [Q, D]. Arguments and errors as
        :meth:`xsoftmax.LinearLoss.search`."""
        if queries.device != self.weight.device:
            raise TypeError(f"search_topk: expected input on weight's device {self.weight.device}, "
                            f"got {queries.device}")
        if recall is not None and recall < 1:
            num_missing = _CALIBRATION_QUERIES - len(self._queries)
            if num_missing > 0:
                self._queries = torch.cat(
                    [self._queries, queries[:num_missing].detach().to(self._queries.dtype)])
            max_cells = self.budget(k, recall)
        options = "" if max_cells is None else f"max_cells={max_cells}"
        return SearchResult(*torch.ops.xsoftmax.search_topk(queries, self.weight, self.bias,
                                                            self.tensors, k, options))


def _version(tensor: Optional[Tensor]) -> Tuple[Any, ...]:
    return () if tensor is None else (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype,
                                      0 if tensor.is_inference() else tensor._version)


def _count_fused_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Increments the version counters that a fused optimizer of torch leaves unchanged.

    Fused optimizers write to parameters, and so to all views of them, without incrementing the
    autograd version counter, by which the library recognises a stale index. All other optimizers
    increment it.
    """
    torch.autograd.graph.increment_version([
        parameter for group in optimizer.param_groups if group.get("fused")
        for parameter in group["params"]
    ])


def _sampler_codewords(loss: TableModule) -> Optional[Tuple[Tensor, Tensor]]:
    """Returns the codewords of the loss's MIDX sampler if it has been refreshed and its cells are
    large enough to be useful, else None."""
    for module in loss.modules():
        if isinstance(module, MidxSampler) and int(
                module.step) > 0 and loss.num_classes >= _CELL_SIZE * len(module.codewords1)**2:
            return module.codewords1.detach(), module.codewords2.detach()
    return None


def build_index(loss: TableModule, queries: Optional[Tensor] = None,
                codewords: Optional[int] = None) -> SearchIndex:
    """Builds an index of the current table and stores it with the loss; see
    :meth:`xsoftmax.LinearLoss.search_index`."""
    if codewords is not None:
        check_count(loss._name, "codewords", codewords, 1)
    weight, bias = loss.linear.weight, loss.linear.bias
    if len(weight) != loss.num_classes:
        raise ValueError(f"{loss._name}: expected a class table of {loss.num_classes} rows to "
                         f"search by an index, got one of {len(weight)}")
    if weight.is_meta:
        raise ValueError(f"{loss._name}: expected a table with values to search by an index, got "
                         f"one on {weight.device}")
    flat = None if queries is None else flat_queries(loss._name, loss.in_features, queries, None)
    loss.catch_up()
    index = SearchIndex(weight, bias,
                        _sampler_codewords(loss) if codewords is None else None, codewords or 0,
                        flat)
    hooks.search_indices[loss] = index
    return index


def _is_copy(first: Optional[Tensor], second: Optional[Tensor]) -> bool:
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and not second.is_meta and torch.equal(
        first.to(second.device), second)


def _move_index(loss: TableModule) -> Optional[SearchIndex]:
    """Returns the stored index on the device of the table, if the table was moved but not changed,
    else None."""
    index: Optional[SearchIndex] = hooks.search_indices.get(loss)
    if index is None:
        return None
    weight, bias = loss.linear.weight.detach(
    ), None if loss.linear.bias is None else loss.linear.bias.detach()
    # The old table must be unchanged since it was indexed, and equal to the new one.
    if not index._is_current(index.weight, index.bias) or not _is_copy(
            index.weight, weight) or not _is_copy(index.bias, bias):
        return None
    index = index._copy_to(weight, bias)
    hooks.search_indices[loss] = index
    return index


def search(loss: TableModule, input: Tensor, k: int, index: str, recall: Optional[float],
           max_cells: Optional[int], exclude: Optional[Tensor] = None) -> SearchResult:
    """Implements :meth:`xsoftmax.LinearLoss.search`."""
    name, k = loss._name, loss._check_k(k)
    check_tensor(name, "input", input)
    if torch.compiler.is_exporting():
        raise ValueError(f"{name}: expected topk in torch.export, got search: export "
                         "torch.ops.xsoftmax.search_topk with the tensors of a SearchIndex")
    if index != "midx":
        raise ValueError(f"{name}: expected index=\"midx\", got {index!r}")
    if recall is not None and not (isinstance(recall, (int, float)) and 0 < recall <= 1):
        raise ValueError(f"{name}: expected recall in (0, 1], got {recall!r}")
    if max_cells is not None:
        check_count(name, "max_cells", max_cells, 1)
        if recall is not None:
            raise ValueError(f"{name}: expected recall or max_cells, got both, {recall} and "
                             f"{max_cells}")
    queries = flat_queries(name, loss.in_features, input, None)
    loss.catch_up()
    search_index: Optional[SearchIndex] = hooks.search_indices.get(loss)
    if search_index is None or not search_index._is_current(loss.linear.weight, loss.linear.bias):
        search_index = _move_index(loss) or build_index(loss)
    result = search_index.search(queries, loss._add_excluded(k, input, exclude), recall, max_cells)
    scores, ids = loss._drop_excluded(result.scores, result.ids, k, input, exclude)
    shape = list(input.shape[:-1])
    return SearchResult(scores, ids, result.cells_read.reshape(shape),
                        result.certified.reshape(shape))


def to_faiss(loss: Module, kind: str = "flat", *, lists: Optional[int] = None, neighbors: int = 32,
             ef_construction: int = 100) -> Any:
    """Exports the class table of a loss as a `faiss <https://github.com/facebookresearch/faiss>`_
    index for inner products, on the CPU, in float32.

    If the loss has a bias, it becomes one more coordinate of each class; append a 1 to the queries:
    ``numpy.pad(queries, ((0, 0), (0, 1)), constant_values=1)``.

    Args:
        loss: a loss with a plain table, such as :class:`xsoftmax.SampledSoftmaxLoss`.
        kind: "flat" scores every class. "ivf" builds `lists` inverted lists by K-means; a search
            reads the ``index.nprobe`` lists whose centroids score highest. "hnsw" builds a graph
            with a beam of `ef_construction`; a search uses a beam of ``index.hnsw.efSearch``.
        lists: number of lists for "ivf"; None: 4 sqrt(N).
        neighbors: links per class for "hnsw", at least 2.
        ef_construction: width of the beam that builds the "hnsw" graph, at least 1.

    Returns:
        The faiss index: ``index.search(queries, k) -> (scores, ids)`` on numpy arrays.

    Raises:
        ImportError: faiss is not installed.
        ValueError: `kind` is unknown, or a number is out of range.
        TypeError: `loss` has no plain class table.
    """
    if kind not in ("flat", "ivf", "hnsw"):
        raise ValueError("to_faiss: expected kind to be \"flat\", \"ivf\" or \"hnsw\", got "
                         f"{kind!r}")
    for argument, value, least in (("lists", lists, 1), ("neighbors", neighbors, 2),
                                   ("ef_construction", ef_construction, 1)):
        if value is not None:
            check_count("to_faiss", argument, value, least)
    linear = getattr(loss, "linear", None)
    if not isinstance(linear, torch.nn.Linear) or not hasattr(loss, "catch_up"):
        raise TypeError("to_faiss: expected a loss with a plain class table, got "
                        f"{type(loss).__name__}")
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "to_faiss: expected faiss to be installed: pip install faiss-cpu") from error
    loss.catch_up()
    rows: Any = linear.weight.detach().float().cpu()
    if linear.bias is not None:
        rows = torch.cat([rows, linear.bias.detach().float().cpu().unsqueeze(1)], 1)
    rows = rows.contiguous().numpy()
    classes, width = rows.shape
    if kind == "flat":
        index = faiss.IndexFlatIP(width)
    elif kind == "ivf":
        lists = min(classes, max(1, int(4 * classes**0.5)) if lists is None else lists)
        # Assign rows to lists by distance, as K-means does, but search the lists whose centroids
        # score highest. Assignment by inner product would put most rows into the lists of a few
        # centroids with large norms.
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, lists,
                                   faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = 64
        index.train(rows)
        index.add(rows)
        scorer = faiss.IndexFlatIP(width)
        scorer.add(index.quantizer.reconstruct_n(0, lists))
        scorer.this.disown()  # owned by the index from here on
        index.quantizer, index.own_fields = scorer, True
        return index
    else:
        index = faiss.IndexHNSWFlat(width, neighbors, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = ef_construction
    index.add(rows)
    return index
