"""A loss over candidates scored in several parts equals that over all of them."""

import pytest
import torch

ops = torch.ops.xsoftmax
Q, N, PARTS = 7, 20, 3


def proposal(kinds, generator):
    """ids, log_count, target_log_count and distinct of the sets, in column order."""
    ids, counts, of_target, distinct = [], [], [], []
    for kind in kinds:
        if kind == "private":
            ids.append(torch.randint(N, (Q, 6), generator=generator))
        elif kind == "shared":
            ids.append(torch.randint(N, (8,), generator=generator))
        else:
            ids.append(torch.randperm(N, generator=generator)[:5])
        counts.append(torch.randn(ids[-1].shape, generator=generator, dtype=torch.float64) - 1)
        counts[-1].flatten()[1] = torch.inf  # excluded
        of_target.append(torch.randn(Q, generator=generator, dtype=torch.float64) - 1)
        distinct.append(kind == "distinct")
    return ids, counts, of_target, distinct


def in_parts(scores, target, ids, counts, of_target, distinct, options):
    """Part k has the classes with id % 3 == k."""
    shares = []
    for part in range(PARTS):
        here = [
            torch.where(one % PARTS == part, count.expand(one.shape), torch.inf)
            for one, count in zip(ids, counts)
        ]
        shares.append(
            ops.candidate_shares(scores, torch.where(target % PARTS == part, target, -1), ids, here,
                                 of_target, distinct, options))
    return ops.loss_of_shares(torch.stack(shares), distinct, options)


@pytest.mark.parametrize("kinds", [["private"], ["shared"], ["distinct"], ["private", "distinct"],
                                   ["private", "distinct", "shared"], []])
@pytest.mark.parametrize("estimator", [
    "sampled_softmax", "ranking", "nce", "negative_sampling", "importance",
    "sampled_softmax,label_smoothing=0.2", "ranking,label_smoothing=0.2",
    "sampled_softmax,remove_accidental_hits=false"
])
def test_parts_give_the_loss_of_the_whole(estimator, kinds):
    generator = torch.Generator().manual_seed(len(kinds))
    sets, options = proposal(kinds, generator), "estimator=" + estimator
    if not kinds and estimator.split(",")[0] in ("ranking", "nce"):
        pytest.skip("needs the count of the target, which no set says")
    target = torch.randint(N, (Q,), generator=generator)
    scores = torch.randn(Q, 1 + sum(one.shape[-1] for one in sets[0]), generator=generator,
                         dtype=torch.float64).requires_grad_()
    if estimator.startswith("ranking") and "distinct" in kinds and len(kinds) > 1:
        # if no part has the target, the caller removes a draw
        for one, is_distinct in zip(sets[0], sets[3]):
            if is_distinct:
                target = one[torch.arange(Q) % 3 + 2]
    want = ops.candidate_loss(scores, target, *sets, options)
    grad, = torch.autograd.grad(want.sum(), scores)
    got = in_parts(scores, target, *sets, options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), scores)[0], grad)


def test_a_part_without_candidates_has_no_nan_gradient():
    scores, target = torch.randn(2, 3, requires_grad=True), torch.tensor([-1, 4])
    shares = ops.candidate_shares(scores, target, [torch.tensor([4, 5])],
                                  [torch.full((2,), torch.inf)], [None], [True], "")
    assert shares[:, 1].isneginf().all() and shares[0, 0] == 0
    ops.loss_of_shares(shares.unsqueeze(0), [True], "").sum().backward()
    assert scores.grad.isfinite().all()


def test_refuses_what_does_not_fit():
    scores, target, sets = torch.randn(2, 3), torch.tensor([1,
                                                            2]), ([torch.tensor([4, 5])],
                                                                  [torch.zeros(2)], [None], [True])
    with pytest.raises(
            ValueError, match="candidate_shares: expected an estimator whose candidates "
            "enter as one sum .* got \"blackout\""):
        ops.candidate_shares(scores, target, *sets, "estimator=blackout")
    with pytest.raises(ValueError, match="candidate_shares: expected scores with size 3"):
        ops.candidate_shares(scores[:, :2], target, *sets, "")
    with pytest.raises(ValueError, match="loss_of_shares: expected shares with size 2"):
        ops.loss_of_shares(torch.randn(2, 2, 5), [True], "")
