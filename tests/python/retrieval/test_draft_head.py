"""draft_head: likely tokens by a short search, with a recall that is measured."""

import pytest
import torch

import xsoftmax as xs


def model(classes=4000, width=24):
    """A head of clusters, and hidden states near them."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(40, width, generator=generator)
    head = torch.nn.Linear(width, classes, bias=False)
    with torch.no_grad():
        head.weight.copy_(centres[torch.arange(classes) % 40] +
                          0.3 * torch.randn(classes, width, generator=generator))
    near = torch.randint(40, (1000,), generator=generator)
    return head, centres[near] + torch.randn(1000, width, generator=generator)


@pytest.mark.parametrize("recall", [0.5, 0.95, 1.0])
def test_it_finds_the_share_that_was_asked_for(recall):
    head, hidden = model()
    draft = xs.draft_head(head, hidden[:700], k=5, recall=recall)
    found = draft(hidden[700:].view(3, 100, 24))
    assert found.ids.shape == found.scores.shape == (3, 100, 5)
    exact = head(hidden[700:]).topk(5)
    shares = (exact.indices[:, :, None] == found.ids.view(300, 1, 5)).any(2).double()
    assert shares.mean() > recall - 0.03 and abs(shares.mean() - draft.recall) < 0.04
    assert abs(shares[:, 0].mean() - draft.best_recall) < 0.06
    assert draft.max_cells <= draft.num_cells
    torch.testing.assert_close(found.scores.view(300, 5),
                               head(hidden[700:]).gather(1, found.ids.view(300, 5)))
    if recall < 1:
        assert draft.max_cells < draft.num_cells / 2


def test_one_hidden_state_without_a_batch():
    head, hidden = model()
    draft = xs.draft_head(head, hidden[:700], k=5)
    found, batch = draft(hidden[700]), draft(hidden[700:701])
    assert found.ids.shape == found.scores.shape == (5,)
    assert torch.equal(found.ids, batch.ids[0]) and torch.equal(found.scores, batch.scores[0])


def test_changed_weights_are_measured_again():
    torch.manual_seed(0)
    head, hidden = model()
    draft = xs.draft_head(head, hidden, k=3)
    before = draft.recall, draft.best_recall
    with torch.no_grad():
        head.weight.copy_(torch.randn_like(head.weight))  # no clusters, so no cell is better
    found = draft(hidden[:50])
    assert (found.ids < 4000).all() and not found.scores.requires_grad
    assert draft.recall > 0.85 and (draft.recall, draft.best_recall) != before
    half = head.bfloat16()
    assert draft(hidden[:5].bfloat16()).ids.shape == (5, 3) and half is draft.lm_head


@pytest.mark.parametrize("change, error, message", [
    (dict(lm_head=torch.nn.Identity()), TypeError, "lm_head as nn.Linear, got Identity"),
    (dict(lm_head=torch.nn.Linear(24, 4000, device="meta")), ValueError, "lm_head with values"),
    (dict(hidden=[1.0]), TypeError, "hidden"),
    (dict(hidden=torch.zeros(600, 7)), ValueError, r"hidden of shape \[Q, 24\], got \[600, 7\]"),
    (dict(hidden=torch.zeros(511, 24)), ValueError, "at least 512 hidden states, got 511"),
    (dict(hidden=torch.full((600, 24), torch.nan)), ValueError, "finite"),
    (dict(k=0), ValueError, "k of at least 1"),
    (dict(k=4001), ValueError, "k of at most 4000"),
    (dict(recall=0), ValueError, r"recall in \(0, 1\], got 0"),
    (dict(recall="all"), ValueError, r"recall in \(0, 1\], got 'all'"),
])
def test_bad_arguments_are_named(change, error, message):
    head, hidden = model()
    with pytest.raises(error, match=message) as caught:
        xs.draft_head(**(dict(lm_head=head, hidden=hidden) | change))
    assert "draft_head" in str(caught.value)


def test_bad_hidden_states_are_named():
    head, hidden = model()
    draft = xs.draft_head(head, hidden)
    with pytest.raises(ValueError, match=r"DraftHead: expected hidden of shape \[\*, 24\]"):
        draft(torch.zeros(3, 23))
    with pytest.raises(TypeError, match="DraftHead: expected floating hidden, got torch.int64"):
        draft(torch.zeros(3, 24, dtype=torch.int64))
    with pytest.raises(Exception, match="DraftHead: expected the model's lm_head in torch.export"):
        torch.export.export(draft, (torch.zeros(3, 24),), strict=False)
