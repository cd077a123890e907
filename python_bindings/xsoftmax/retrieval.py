"""The best classes of very many: search by an index of the class table, and the table for faiss."""

import copy
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from . import _hooks, _long_work
from ._checks import check_count, check_tensor
from ._table import TableModule, flat_queries
from ._typing import Module
from .samplers import MidxSampler

_CELL_SIZE = 32        # of a sampler's cells, at least: smaller ones cost more than they save
_CALIBRATING = 256     # queries that say how many cells a recall takes


class SearchResult(NamedTuple):
    """What :meth:`xsoftmax.LinearLoss.search` found: of each query the scores and ids of its best classes, how many cells were read, and whether the classes
    are certified to be the best.

    Shapes: ``scores`` floating [*, k], ``ids`` int64 [*, k], ``cells_read`` int64 [*], ``certified`` bool [*].
    """

    scores: Tensor
    ids: Tensor
    cells_read: Tensor
    certified: Tensor


class SearchIndex:
    """An index of a class table as it is now, and the queries that say how many cells a recall takes; see :meth:`xsoftmax.LinearLoss.search`. It lies on the
    device of the table."""

    def __init__(self, weight: Tensor, bias: Optional[Tensor], codewords: Optional[Tuple[Tensor, Tensor]] = None, num_codewords: int = 0) -> None:
        first, second = (None, None) if codewords is None else codewords
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.tensors: List[Tensor] = _long_work.run("search index", torch.ops.xsoftmax.midx_search_index, self.weight, self.bias, first, second, num_codewords,
                                                     torch.tensor(0))
        self.num_cells = len(self.tensors[2]) - 1
        self._queries = self.weight.new_empty(0, self.weight.shape[1])
        self._budgets: Dict[Tuple[int, float], int] = {}

    def to(self, device: Union[str, int, torch.device]) -> "SearchIndex":
        """Returns the index on another device, with a copy of the table there, which it searches. A loss that was moved, ``loss.to(device)``, takes its index
        along by itself."""
        return self._beside(self.weight.to(device), None if self.bias is None else self.bias.to(device))

    def _beside(self, weight: Tensor, bias: Optional[Tensor]) -> "SearchIndex":
        """The index of an equal table, on the device of that."""
        moved = copy.copy(self)
        moved.weight, moved.bias = weight.detach(), None if bias is None else bias.detach()
        moved.tensors = [tensor.to(weight.device) for tensor in self.tensors]
        moved._queries, moved._budgets = self._queries.to(weight.device), dict(self._budgets)
        return moved

    def calibrate(self, queries: Tensor) -> None:
        """Takes queries floating [Q, D], like those to come, as those that say how many cells a recall takes. At least 256 are needed."""
        self._queries = queries.detach().to(self.weight, copy=True)
        self._budgets.clear()

    def budget(self, k: int, recall: float) -> Optional[int]:
        """How many cells the recall takes; none while too few queries are known."""
        if (k, recall) not in self._budgets:
            if len(self._queries) < _CALIBRATING:
                return None
            self._budgets[k, recall] = int(_long_work.run("recall", torch.ops.xsoftmax.search_budget, self._queries, self.weight, self.bias, self.tensors, k,
                                                           recall))
        return self._budgets[k, recall]

    def search(self, queries: Tensor, k: int, recall: Optional[float], max_cells: Optional[int]) -> SearchResult:
        """Searches for the k best classes of queries [Q, D], as :meth:`xsoftmax.LinearLoss.search` does. Errors as there."""
        if queries.device != self.weight.device:
            raise TypeError(f"search_topk: expected input on weight's device {self.weight.device}, got {queries.device}")
        if recall is not None and recall < 1:
            missing = _CALIBRATING - len(self._queries)
            if missing > 0:
                self._queries = torch.cat([self._queries, queries[:missing].detach().to(self._queries.dtype)])
            max_cells = self.budget(k, recall)
        options = "" if max_cells is None else f"max_cells={max_cells}"
        return SearchResult(*torch.ops.xsoftmax.search_topk(queries, self.weight, self.bias, self.tensors, k, options))


def _version(tensor: Optional[Tensor]) -> Tuple[Any, ...]:
    return () if tensor is None else (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, 0 if tensor.is_inference() else tensor._version)


def _count_fused_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers of torch write to parameters, and so to all views of them, without counting it in the version that says here whether an index is
    stale; the others count."""
    torch.autograd.graph.increment_version([parameter for group in optimizer.param_groups if group.get("fused") for parameter in group["params"]])


def _sampler_codewords(loss: TableModule) -> Optional[Tuple[Tensor, Tensor]]:
    """The codewords of its MIDX sampler, where that knows the table and has cells of a useful size."""
    for module in loss.modules():
        if isinstance(module, MidxSampler) and int(module.step) > 0 and loss.num_classes >= _CELL_SIZE * len(module.codewords1) ** 2:
            return module.codewords1.detach(), module.codewords2.detach()
    return None


def build_index(loss: TableModule, queries: Optional[Tensor] = None, codewords: Optional[int] = None) -> SearchIndex:
    """An index of the present table, which the loss keeps; see :meth:`xsoftmax.LinearLoss.search_index`."""
    if codewords is not None:
        check_count(loss._name, "codewords", codewords, 1)
    weight, bias = loss.linear.weight, loss.linear.bias
    if len(weight) != loss.num_classes:
        raise ValueError(f"{loss._name}: expected a class table of {loss.num_classes} rows to "
                         f"search by an index, got one of {len(weight)}")
    if weight.is_meta:
        raise ValueError(f"{loss._name}: expected a table with values to search by an index, got one on {weight.device}")
    _hooks.after_steps(_count_fused_step)
    loss.settle()
    table = _version(weight), _version(bias)  # what another thread writes from here on makes the index stale
    made = SearchIndex(weight, bias, _sampler_codewords(loss) if codewords is None else None, codewords or 0)
    if queries is not None:
        made.calibrate(flat_queries(loss._name, loss.in_features, queries, None))
    _hooks.search_indices[loss] = table, made
    return made


def _is_copy(one: Optional[Tensor], other: Optional[Tensor]) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and not other.is_meta and torch.equal(one.to(other.device), other)


def _moved_index(loss: TableModule) -> Optional[SearchIndex]:
    """The index that the loss has, where its table now lies elsewhere and is otherwise as it was; on the device of the table. Else None."""
    table, made = _hooks.search_indices.get(loss, (None, None))
    if made is None:
        return None
    weight, bias = loss.linear.weight.detach(), None if loss.linear.bias is None else loss.linear.bias.detach()
    # The old table is as it was indexed, and equal to the new one.
    if table != (_version(made.weight), _version(made.bias)) or not _is_copy(made.weight, weight) or not _is_copy(made.bias, bias):
        return None
    made = made._beside(weight, bias)
    _hooks.search_indices[loss] = (_version(loss.linear.weight), _version(loss.linear.bias)), made
    return made


def search(loss: TableModule, input: Tensor, k: int, index: str, recall: Optional[float], max_cells: Optional[int],
           exclude: Optional[Tensor] = None) -> SearchResult:
    """See :meth:`xsoftmax.LinearLoss.search`."""
    name, k = loss._name, loss._best(k)
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
    loss.settle()
    table, made = _hooks.search_indices.get(loss, (None, None))
    if table != (_version(loss.linear.weight), _version(loss.linear.bias)):
        made = _moved_index(loss) or build_index(loss)
    found = made.search(queries, loss._with_excluded(k, input, exclude), recall, max_cells)
    scores, ids = loss._without_excluded(found.scores, found.ids, k, input, exclude)
    shape = list(input.shape[:-1])
    return SearchResult(scores, ids, found.cells_read.reshape(shape), found.certified.reshape(shape))


def to_faiss(loss: Module, kind: str = "flat", *, lists: Optional[int] = None, neighbors: int = 32, ef_construction: int = 100) -> Any:
    """The class table of a loss as a `faiss <https://github.com/facebookresearch/faiss>`_ index for inner products, on CPU, in float32.

    Args:
        loss: a loss with a plain table, such as :class:`xsoftmax.SampledSoftmaxLoss`.
        kind: "flat", every class scored; "ivf", inverted lists of `lists` clusters by K-means (none: 4 sqrt(N)), of which a search reads the ``index.nprobe``
            whose centroids score most;
            "hnsw", a graph with `neighbors` links a class (at least 2), made with a beam of `ef_construction` and searched with one of ``index.hnsw.efSearch``.

    Returns:
        The faiss index: ``index.search(queries, k) -> (scores, ids)`` on numpy arrays. The bias of a class, where there is one, is one more coordinate:
        queries then end in a 1, ``numpy.pad(queries, ((0, 0), (0, 1)), constant_values=1)``.

    Raises:
        ImportError: faiss is not installed. ValueError: a kind that is unknown, a number out of range.
    """
    if kind not in ("flat", "ivf", "hnsw"):
        raise ValueError(f"to_faiss: expected kind to be \"flat\", \"ivf\" or \"hnsw\", got {kind!r}")
    for argument, value, least in (("lists", lists, 1), ("neighbors", neighbors, 2), ("ef_construction", ef_construction, 1)):
        if value is not None:
            check_count("to_faiss", argument, value, least)
    linear = getattr(loss, "linear", None)
    if not isinstance(linear, torch.nn.Linear) or not hasattr(loss, "settle"):
        raise TypeError(f"to_faiss: expected a loss with a plain class table, got {type(loss).__name__}")
    try:
        import faiss
    except ImportError as error:
        raise ImportError("to_faiss: expected faiss to be installed: pip install faiss-cpu") from error
    loss.settle()
    rows: Any = linear.weight.detach().float().cpu()
    if linear.bias is not None:
        rows = torch.cat([rows, linear.bias.detach().float().cpu().unsqueeze(1)], 1)
    rows = rows.contiguous().numpy()
    classes, width = rows.shape
    if kind == "flat":
        index = faiss.IndexFlatIP(width)
    elif kind == "ivf":
        lists = min(classes, max(1, int(4 * classes ** 0.5)) if lists is None else lists)
        # Lists by distance, as K-means makes them; a search then takes those whose centroid scores most. With lists by inner product, long rows
        # would draw all others to theirs.
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = 64
        index.train(rows)
        index.add(rows)
        scorer = faiss.IndexFlatIP(width)
        scorer.add(index.quantizer.reconstruct_n(0, lists))
        scorer.this.disown()  # it goes with the index
        index.quantizer, index.own_fields = scorer, True
        return index
    else:
        index = faiss.IndexHNSWFlat(width, neighbors, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = ef_construction
    index.add(rows)
    return index
