"""The output layer of a model that drafts tokens for another one."""

import torch
from torch import Tensor, nn

from ._core.checks import check_count, check_tensor
from .retrieval import SearchIndex, SearchResult

_CALIBRATION = 256  # hidden states from which the number of cells is chosen


class DraftHead(nn.Module):
    """Finds likely tokens of hidden states by a short search; see :func:`draft_head`.

    Attributes:
        lm_head: the output layer, shared with the model.
        k: the number of tokens.
        max_cells: the number of cells of the index that a search reads.
        num_cells: the number of cells of the index.
        recall: the share of the best k tokens that was found, for hidden states that the choice of
            ``max_cells`` did not use.
        best_recall: the share of those hidden states whose best token was found.
    """

    recall: float
    best_recall: float
    max_cells: int
    num_cells: int

    def __init__(self, lm_head: nn.Linear, hidden: Tensor, k: int, recall: float) -> None:
        super().__init__()
        self.lm_head, self.k, self._wanted = lm_head, k, recall
        self._hidden = hidden.detach().clone()
        self._index = self._build()

    @torch.no_grad()
    def _build(self) -> SearchIndex:
        index = SearchIndex(self.lm_head.weight, self.lm_head.bias,
                            queries=self._hidden[:_CALIBRATION])
        budget = index.budget(self.k, self._wanted)
        assert budget is not None  # there are enough queries
        self.max_cells, self.num_cells = budget, index.num_cells
        others = self._hidden[_CALIBRATION:].to(self.lm_head.weight)
        exact = index.search(others, self.k, None, None).ids
        found = index.search(others, self.k, None, budget).ids
        found = found.sort(1).values
        place = torch.searchsorted(found, exact).clamp_max(self.k - 1)
        is_found = (found.gather(1, place) == exact).double()
        self.recall, self.best_recall = float(is_found.mean()), float(is_found[:, 0].mean())
        return index

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> SearchResult:
        """Returns scores and ids of likely tokens, [*, k], best first, for hidden states [*, D]."""
        check_tensor("DraftHead", "hidden", hidden)
        weight, bias = self.lm_head.weight, self.lm_head.bias
        if torch.compiler.is_exporting():
            raise ValueError("DraftHead: expected the model's lm_head in torch.export, got a draft "
                             "head: export torch.ops.xsoftmax.search_topk with the tensors of a "
                             "SearchIndex")
        if not hidden.is_floating_point():
            raise TypeError(f"DraftHead: expected floating hidden, got {hidden.dtype}")
        if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
            raise ValueError(f"DraftHead: expected hidden of shape [*, {weight.shape[1]}], got "
                             f"{list(hidden.shape)}")
        if not self._index._is_current(weight, bias):
            self._index = self._build()
        queries = hidden.reshape(-1, hidden.shape[-1]).to(weight)
        found = self._index.search(queries, self.k, None, self.max_cells)
        return SearchResult(*(part.reshape((*hidden.shape[:-1], *part.shape[1:]))
                              for part in found))


def draft_head(lm_head: nn.Linear, hidden: Tensor, k: int = 8, recall: float = 0.95) -> DraftHead:
    r"""Creates a head for drafting tokens that reads a small part of the output layer::

        draft = xs.draft_head(model.lm_head, hidden)  # hidden states of some text
        found = draft(state)                          # scores [*, 8], ids [*, 8]
        prob = found.scores.softmax(-1)               # a distribution over these ids

    A model that drafts tokens for another one to verify needs few likely tokens of each hidden
    state, and any distribution over them: missed tokens cost speed, not correctness. This head is

    .. code-block:: python

        lm_head(state).topk(k)

    up to tokens that a search of ``max_cells`` cells misses: fewer than ``1 - recall`` of the best
    k, on average over hidden states like the given ones. ``draft.recall`` says how many were found
    for the hidden states after the first 256, which were not used to choose ``max_cells``;
    ``draft.best_recall`` how often the best token was.

    The weights are shared. When they have changed, the next call builds a new index and measures
    again. It does not notice writes through ``.data``, NumPy or ``torch.from_dlpack``, which
    PyTorch does not count: create a new draft head after them. There is no gradient.

    Args:
        lm_head: the output layer of the draft model, nn.Linear from D to N.
        hidden: floating [Q, D], at least 512 hidden states in random order, of text like that to
            be drafted.
        k: the number of tokens, at least 1.
        recall: the share of the best k tokens to find, in (0, 1].

    Raises:
        TypeError: lm_head is no nn.Linear, or hidden no tensor.
        ValueError: hidden has another shape, too few rows, or a value that is not finite; k or
            recall is out of range; or lm_head is on the meta device.
    """
    name = "draft_head"
    if not isinstance(lm_head, nn.Linear):
        raise TypeError(f"{name}: expected lm_head as nn.Linear, got {type(lm_head).__name__}")
    if lm_head.weight.is_meta:
        raise ValueError(f"{name}: expected lm_head with values, got one on the meta device")
    check_tensor(name, "hidden", hidden)
    if not hidden.is_floating_point():
        raise TypeError(f"{name}: expected floating hidden, got {hidden.dtype}")
    if hidden.dim() != 2 or hidden.shape[1] != lm_head.in_features:
        raise ValueError(f"{name}: expected hidden of shape [Q, {lm_head.in_features}], got "
                         f"{list(hidden.shape)}")
    if len(hidden) < 2 * _CALIBRATION:
        raise ValueError(f"{name}: expected at least {2 * _CALIBRATION} hidden states, got "
                         f"{len(hidden)}")
    if not hidden.isfinite().all():
        raise ValueError(f"{name}: expected hidden with finite values, got others")
    if lm_head.out_features == 0:
        raise ValueError(f"{name}: expected lm_head with at least one token, got none")
    check_count(name, "k", k, 1)
    if k > lm_head.out_features:
        raise ValueError(f"{name}: expected k of at most {lm_head.out_features}, the number of "
                         f"tokens, got {k}")
    if isinstance(recall, bool) or not isinstance(recall, (int, float)) or not 0 < recall <= 1:
        raise ValueError(f"{name}: expected recall in (0, 1], got {recall!r}")
    return DraftHead(lm_head, hidden, k, float(recall))
