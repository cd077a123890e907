"""topk(..., exclude=ids): exactly the best classes that are not excluded, for all losses and
indices."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs

ops = torch.ops.xsoftmax
N, D, Q = 60, 8, 7


def seen(queries=Q, width=12, num_classes=N):
    """Padded lists of ids, of a different length for each query, some ids twice."""
    generator = torch.Generator().manual_seed(1)
    exclude = torch.randint(0, num_classes, (queries, width), generator=generator)
    exclude[torch.rand(queries, width, generator=generator) < 0.3] = -1
    exclude[0] = -1
    return exclude


def expected(scores, exclude, k):
    """From all scores [Q, N]; missing results are -inf and -1."""
    wanted = torch.ones_like(scores, dtype=torch.bool)
    for row, ids in zip(wanted, exclude):
        row[ids[ids >= 0]] = False
    values, ids = scores.masked_fill(~wanted, -torch.inf).topk(k)
    return values, ids.masked_fill(values == -torch.inf, -1)


def losses():
    torch.manual_seed(0)
    tree = xs.LabelTree.balanced(torch.randperm(N), 4)
    return {
        "exact": xs.LinearCrossEntropyLoss(D, N, bias=True),
        "sampled": xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=5),
        "hierarchical": xs.HierarchicalSoftmaxLoss(D, tree),
        "beam tree": xs.BeamTreeLoss(D, tree, num_candidates=N, num_noises=2),
    }


def scores_of(loss, input):
    return loss.scores(input) if hasattr(loss, "scores") else loss.log_prob(input)


@pytest.mark.parametrize("name", losses())
@pytest.mark.parametrize("k", [1, 5, N])
def test_equals_topk_of_masked_scores(name, k):
    loss = losses()[name].eval()
    input, exclude = torch.randn(Q, D), seen()
    values, ids = loss.topk(input, k, exclude=exclude)
    want_values, want_ids = expected(scores_of(loss, input), exclude, k)
    torch.testing.assert_close(values, want_values)
    assert torch.equal(ids, want_ids)
    for mine, plain in zip(loss.topk(input, k, exclude=torch.full((Q, 3), -1)), loss.topk(input,
                                                                                          k)):
        assert torch.equal(mine, plain), "nothing is excluded"
    assert all(
        torch.equal(a, b)
        for a, b in zip(loss.topk(input, k, exclude=exclude[:, :0]), loss.topk(input, k)))


@pytest.mark.parametrize("name", losses())
def test_torchscript_shapes_and_export(name):
    loss = losses()[name].eval()
    input, exclude = torch.randn(2, 3, D), seen(6).view(2, 3, -1)
    want = loss.topk(input, 4, exclude=exclude)
    assert want[0].shape == (2, 3, 4)
    for mine, theirs in zip(torch.jit.script(loss).topk(input, 4, exclude=exclude), want):
        assert torch.equal(mine, theirs)
    assert loss.topk(input[0, 0], 4, exclude=exclude[0, 0])[1].tolist() == want[1][0, 0].tolist()
    with pytest.raises(ValueError, match="expected exclude of shape"):
        loss.topk(input, 4, exclude=exclude[0])
    with pytest.raises(IndexError, match=r"expected exclude in \[0, 60\)"):
        loss.topk(input, 4, exclude=exclude + N)
    with pytest.raises(TypeError, match="exclude"):
        loss.topk(input, 4, exclude=exclude.float())


def test_search_by_an_index():
    torch.manual_seed(0)
    loss = xs.LinearCrossEntropyLoss(D, 2000, bias=True)
    input, exclude = torch.randn(Q, D), loss.topk(torch.randn(1, D), 40)[1].expand(Q, 40)
    exclude = torch.cat([loss.topk(input, 5)[1][:, ::2], exclude], 1)
    found = loss.search(input, 6, exclude=exclude)
    want_values, want_ids = expected(loss.linear(input), exclude, 6)
    torch.testing.assert_close(found.scores, want_values)
    assert torch.equal(found.ids, want_ids) and found.certified.all()


def test_matchers():
    random = np.random.default_rng(0)
    X = sp.random(200, 30, 0.3, "csr", np.float32, random_state=1)
    Y = sp.csr_matrix((np.ones(200, np.float32), random.integers(0, 20, 200), np.arange(201)),
                      shape=(200, 20))
    model = xs.XRLinear.train(X, Y, arity=4, max_leaf_size=4, threshold=0.0)
    queries, exclude = X[:Q], seen(Q, 6, 20)
    scores = torch.from_numpy(model.predict(queries, 20, 20).toarray())
    values, ids = model.topk(queries, 20, 20, exclude=exclude)
    want_values, want_ids = expected(scores, exclude, 20)
    torch.testing.assert_close(values, want_values.clamp_min(0))
    assert all(sorted(a) == sorted(b)
               for a, b in zip(ids.tolist(), want_ids.tolist())) and ids.shape == (Q, 20)
    assert model.topk(queries, 25, 20, exclude=exclude)[0].shape == (Q, 25)


def test_hierarchical_matcher():
    torch.manual_seed(0)
    tree = xs.LabelTree.balanced(torch.randperm(N), 4)
    matcher = xs.HierarchicalMatcher(D, tree)
    matcher.layer.fill_(tree.depth)
    input, exclude = torch.randn(Q, D), seen()
    values, labels = matcher.topk(input, N, N)
    scores = torch.zeros(Q, N).scatter(1, labels, values)  # a beam of all labels scores every one
    for k in (1, 5, N):
        got, ids = matcher.topk(input, k, N, exclude=exclude)
        want_values, want_ids = expected(scores, exclude, k)
        torch.testing.assert_close(got, want_values.clamp_min(0))
        assert torch.equal(ids, want_ids)
    # A narrow beam is widened by the number of excluded ids, so these do not displace results.
    unwanted = matcher.topk(input, 10, N)[1]
    assert (matcher.topk(input, 3, 3, exclude=unwanted)[1] >= 0).all()


def test_operator():
    values, ids = torch.tensor([[5.0, 4.0, 3.0, -torch.inf]]), torch.tensor([[7, 3, 9, -1]])
    for exclude, want in (([3, -1, 3], [7, 9]), ([9, 7], [3, -1]), ([3, 7, 9], [-1, -1]),
                          ([-1], [7, 3]), ([], [7, 3])):
        found, found_ids = ops.exclude_topk(values, ids, torch.tensor([exclude], dtype=torch.int64),
                                            10, 2)
        assert found_ids.tolist() == [want], exclude
        assert found.isinf().tolist() == [[i < 0 for i in want]]
    torch.library.opcheck(ops.exclude_topk, (values, ids, torch.tensor([[3, -1]]), 10, 2))
    empty = ops.exclude_topk(values[:0], ids[:0], torch.zeros(0, 3, dtype=torch.int64), 10, 2)
    assert empty[0].shape == empty[1].shape == (0, 2)
    with pytest.raises(ValueError, match=r"exclude_topk: expected k in \[0, 4\]"):
        ops.exclude_topk(values, ids, ids, 10, 5)
