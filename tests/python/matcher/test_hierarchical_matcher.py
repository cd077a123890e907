"""HierarchicalMatcher against loops over its definition."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import op_samples
import xsoftmax as xs

ops = torch.ops.xsoftmax
TREES = {
    "even": xs.LabelTree.from_vectors(
        torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), 3, max_leaf_size=4),
    "uneven": xs.LabelTree.from_nested([[0, [1, 2, 3]], 4, [[5, 6], [7, [8, 9]]]])
}


def naive_shortlist(tree, parents, targets):
    children = lambda v: range(int(tree.first_child[v]), int(tree.first_child[v + 1]))
    rows = []
    for reached, wanted in zip(parents.tolist(), targets.tolist()):
        above = {v for v in reached if v >= 0} | {int(tree.parent[t]) for t in wanted if t >= 0}
        rows.append([(c, float(c in wanted)) for v in sorted(above) for c in children(v)])
    return rows


@pytest.mark.parametrize("impl", ["kernel", "reference"])
@pytest.mark.parametrize("name", TREES)
def test_shortlists_equal_a_loop(name, impl):
    tree, random = TREES[name], torch.Generator().manual_seed(1)
    for queries, width, count in ((70, 4, 3), (1, 1, 0), (3, 0, 2), (0, 2, 2)):
        parents = torch.randint(-1, tree.num_nodes, (queries, width), generator=random)
        targets = torch.randint(0, tree.num_nodes, (queries, count), generator=random)
        targets = torch.where(targets == 0, -1, targets)
        with xs.use_impl(impl):
            nodes, offsets, right = ops.shortlist(parents, targets, tree.first_child, tree.parent)
        want = naive_shortlist(tree, parents, targets)
        assert offsets.tolist() == [0, *np.cumsum([len(row) for row in want], dtype=int).tolist()]
        assert list(zip(nodes.tolist(), right.tolist())) == [pair for row in want for pair in row]


@pytest.mark.parametrize("impl", ["kernel", "reference"])
@pytest.mark.parametrize("name", TREES)
def test_shortlists_with_a_bound_equal_a_loop_plus_padding(name, impl):
    """With `most`, a query may get more places than it needs: the rest hold a valid node and the
    label -1."""
    tree, random = TREES[name], torch.Generator().manual_seed(1)
    most = tree.arity
    for queries, width, count in ((70, 4, 3), (1, 1, 0), (3, 0, 2), (0, 2, 2), (3, 40, 30)):
        parents = torch.randint(-1, tree.num_nodes, (queries, width), generator=random)
        targets = torch.randint(0, tree.num_nodes, (queries, count), generator=random)
        targets = torch.where(targets == 0, -1, targets)
        with xs.use_impl(impl):
            nodes, offsets, right = ops.shortlist(parents, targets, tree.first_child, tree.parent,
                                                  most)
        assert offsets[0] == 0 and len(nodes) == len(right) == offsets[-1]
        for q, row in enumerate(naive_shortlist(tree, parents, targets)):
            places = slice(int(offsets[q]), int(offsets[q + 1]))
            got = list(zip(nodes[places].tolist(), right[places].tolist()))
            assert got[:len(row)] == row and set(
                got[len(row):]) <= {(row[-1][0] if row else 1, -1.0)}


def test_the_layer_counter_stays_on_the_cpu():
    matcher, *_ = make()
    assert matcher.to("meta").layer.device.type == "cpu"


def make(name="even", **options):
    torch.manual_seed(0)
    tree = TREES[name]
    return xs.HierarchicalMatcher(6, tree, **options), torch.randn(20, 6), torch.randint(
        -1, tree.num_classes, (20, 3))


def naive_loss(matcher, input, target, layer):
    """Computes the loss query by query, over children of nodes that the beam reaches or that are
    right."""
    tree, begin = matcher.tree, 1 + sum(matcher.tree.layer_sizes[:layer - 1])
    end = begin + matcher.tree.layer_sizes[layer - 1]
    z = input @ matcher.edges.weight.t() + (0 if matcher.edges.bias is None else matcher.edges.bias)
    logs = -(1 - z).clamp(
        min=0)**3 if matcher.loss == "squared_hinge" else torch.nn.functional.logsigmoid(z)
    paths = [[int(v) for v in row if v > 0] for row in tree.path(torch.arange(tree.num_classes))]
    losses = []
    for q in range(len(input)):
        reached, layers = {0: 0.0}, 0
        while layers < layer - 1:
            scored = {}
            for v, score in reached.items():
                children = range(int(tree.first_child[v]), int(tree.first_child[v + 1]))
                scored |= {c: score + float(logs[q, c - 1])
                           for c in children} if len(children) else {v: score}
            reached = dict(
                sorted(scored.items(), key=lambda pair: (-pair[1], pair[0]))[:matcher.beam])
            layers += 1
        right = {
            v
            for label in target[q].tolist() if label >= 0 for v in paths[label] if begin <= v < end
        }
        by_beam = {v for v in reached if int(tree.first_child[v]) >= begin}
        by_target = {int(tree.parent[v]) for v in right}
        above = {"man": by_beam, "tfn": by_target,
                 "tfn+man": by_beam | by_target}[matcher.negatives]
        total = 0 * z[q].sum()  # with a gradient even if the shortlist is empty
        for c in range(begin, end):
            if int(tree.parent[c]) in above:
                margin = (1 if c in right else -1) * z[q, c - 1]
                total = total + ((1 - margin).clamp(min=0)**2 if matcher.loss == "squared_hinge"
                                 else torch.nn.functional.softplus(-margin))
        losses.append(total)
    return torch.stack(losses)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
@pytest.mark.parametrize("bias, negatives", [(True, "tfn+man"), (False, "tfn"), (True, "tfn"),
                                             (True, "man")])
def test_loss_and_gradient_on_every_layer_equal_a_loop(name, loss, bias, negatives):
    matcher, input, target = make(name, loss=loss, bias=bias, beam=2, negatives=negatives,
                                  reduction="none", sparse_grad=True)
    input.requires_grad_()
    for layer in range(1, matcher.tree.depth + 1):
        assert int(matcher.layer) == layer
        got, want = matcher(input, target), naive_loss(matcher, input, target, layer)
        torch.testing.assert_close(got, want)
        parameters = [input, *matcher.parameters()]
        grads, wanted = torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(
            want.sum(), parameters)
        assert grads[1].is_sparse
        for one, other in zip(grads, wanted):
            torch.testing.assert_close(one.to_dense() if one.is_sparse else one, other, atol=1e-5,
                                       rtol=1e-4)
        matcher.reduction = "mean"
        torch.testing.assert_close(matcher(input, target), want.mean())
        matcher.reduction = "sum"
        torch.testing.assert_close(matcher(input, target), want.sum())
        matcher.reduction = "none"
        assert matcher.next_layer() == (layer < matcher.tree.depth)


def test_a_new_layer_is_initialised_with_the_weights_of_its_parents():
    matcher, *_ = make()
    before = matcher.edges.weight.detach().clone()
    assert matcher.next_layer()
    first, second = matcher.tree.layer_sizes[:2]
    rows = torch.arange(first, first + second)
    torch.testing.assert_close(matcher.edges.weight[rows],
                               before[matcher.tree.parent[rows + 1] - 1])
    torch.testing.assert_close(matcher.edges.bias[rows],
                               matcher.edges.bias[matcher.tree.parent[rows + 1] - 1])
    torch.testing.assert_close(matcher.edges.weight[first + second:], before[first + second:])


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
@pytest.mark.parametrize("bias", [True, False])
def test_init_from_prototypes_equals_a_loop(name, loss, bias):
    """Rows and biases equal prototypes up to a scale and an offset that minimise the loss; other
    layers do not change."""
    matcher, input, target = make(name, loss=loss, bias=bias, beam=100)
    directions = torch.nn.functional.normalize(torch.randn(matcher.num_classes, 6))
    input = input + 2 * directions[target].sum(1)
    for layer in range(1, matcher.tree.depth + 1):
        tree, before = matcher.tree, matcher.edges.weight.detach().clone()
        begin = 1 + sum(tree.layer_sizes[:layer - 1])
        end = begin + tree.layer_sizes[layer - 1]
        matcher.init_from_prototypes(input, target)
        mean = input.mean(0) if bias else torch.zeros(6)
        above = [{
            int(v)
            for label in row.tolist() if label >= 0 for v in tree.path(torch.tensor([label]))[0]
        } for row in target]
        want = torch.zeros(end - begin, 6)
        for c in range(begin, end):
            own = [h - mean for h, nodes in zip(input, above) if c in nodes]
            if own:
                want[c - begin] = torch.stack(own).sum(0) / len(own)**0.5
        got = matcher.edges.weight.detach()[begin - 1:end - 1]
        scale = (got * want).sum() / want.square().sum()
        torch.testing.assert_close(got, scale * want)
        if bias:
            offset = matcher.edges.bias.detach()[begin - 1:end - 1] + got @ mean
            torch.testing.assert_close(offset, offset[:1].expand_as(offset), atol=1e-5, rtol=1e-4)
        assert torch.equal(before[end - 1:], matcher.edges.weight[end - 1:]) and torch.equal(
            before[:begin - 1], matcher.edges.weight[:begin - 1])

        least = matcher(input, target).item()
        rows = slice(begin - 1, end - 1)
        with torch.no_grad():
            for factor, shift in ((1.1, 0), (0.9, 0), *([(1, 0.1), (1, -0.1)] if bias else [])):
                state = {key: value.clone() for key, value in matcher.state_dict().items()}
                matcher.edges.weight[rows] *= factor
                if bias:
                    matcher.edges.bias[rows] = (matcher.edges.bias[rows] -
                                                offset[0]) * factor + offset[0] + shift
                assert matcher(input, target) > least
                matcher.load_state_dict(state)
        matcher.next_layer()


def test_prototypes_predict_labels_with_few_examples():
    """With two noisy examples per label, predictions are right without training."""
    torch.manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(60, 64))
    tree = xs.LabelTree.from_vectors(directions, 8, generator=torch.Generator().manual_seed(0),
                                     max_leaf_size=8)
    matcher = xs.HierarchicalMatcher(64, tree, loss="logistic")
    labels = torch.arange(60).repeat(2)
    input = directions[labels] + 0.03 * torch.randn(120, 64)
    while True:
        matcher.init_from_prototypes(input.view(2, 60, 64), labels.view(2, 60, 1))
        if not matcher.next_layer():
            break
    assert (matcher.predict(directions +
                            0.03 * torch.randn(60, 64)) == torch.arange(60)).float().mean() > 0.9


def test_scale_and_offset_see_all_of_a_sorted_set():
    """With more examples than the fit uses, noisy ones last, the fit minimises the loss of all."""
    torch.manual_seed(0)
    labels = torch.arange(40).repeat(250)
    noise = torch.where(torch.arange(10_000) < 4_500, 0.01, 2.0)
    input = torch.nn.functional.normalize(torch.randn(
        40, 16))[labels] + noise.unsqueeze(1) * torch.randn(10_000, 16)
    matcher = xs.HierarchicalMatcher(16, TREES["even"], loss="logistic", beam=100)
    matcher.init_from_prototypes(input, labels.unsqueeze(1))
    least = matcher(input, labels.unsqueeze(1)).item()
    for factor in (0.5, 2):
        other = xs.HierarchicalMatcher(16, TREES["even"], loss="logistic", beam=100)
        other.load_state_dict(matcher.state_dict())
        with torch.no_grad():
            other.edges.weight *= factor
            other.edges.bias *= factor
        assert other(input, labels.unsqueeze(1)) > least


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_prototypes_fit_inputs_of_very_different_lengths(seed, loss):
    """A fit that stalls at once would leave a scale of about 0."""
    torch.manual_seed(seed)
    directions, labels = torch.nn.functional.normalize(torch.randn(40,
                                                                   32)), torch.arange(40).repeat(16)
    input = (directions[labels] + 0.1 * torch.randn(640, 32)) * torch.exp(2.5 * torch.randn(640, 1))
    matcher = xs.HierarchicalMatcher(32, TREES["even"], loss=loss)
    with torch.no_grad():
        matcher.edges.weight.zero_()
        matcher.edges.bias.zero_()
    nothing = matcher(input, labels.unsqueeze(1))
    matcher.init_from_prototypes(input, labels.unsqueeze(1))
    fitted = matcher(input, labels.unsqueeze(1))
    assert fitted < nothing
    with torch.no_grad():
        for factor in (0.5, 2):
            matcher.edges.weight *= factor
            matcher.edges.bias *= factor
            assert matcher(input, labels.unsqueeze(1)) >= fitted
            matcher.edges.weight /= factor
            matcher.edges.bias /= factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_prototypes_in_other_dtypes_and_without_labels(dtype):
    matcher, input, target = make(dtype=dtype)
    matcher.init_from_prototypes(input.to(dtype), target)
    assert matcher(input.to(dtype), target).isfinite()
    matcher.init_from_prototypes(input.to(dtype), torch.full_like(target, -1))  # no right labels
    assert matcher(input.to(dtype), target).isfinite()
    matcher = xs.HierarchicalMatcher(6, xs.LabelTree.from_nested([0, [1, 2]]), beam=1, dtype=dtype)
    with torch.no_grad():
        matcher.edges.bias[0] += 100
    matcher.next_layer()
    # the beam ends in a leaf, so the layer has an empty shortlist
    matcher.init_from_prototypes(input.to(dtype), torch.zeros_like(target[:, :2]))
    assert torch.equal(matcher.edges.weight[2:], torch.zeros(2, 6, dtype=dtype))


def test_multi_hot_targets_are_refused():
    matcher, input, _ = make()
    count = matcher.num_classes
    with pytest.raises(
            ValueError, match=r"ids of labels, \[\*, T\] with T below their number, "
            rf"got shape \[20, {count}\], .*as multi-hot targets have"):
        matcher(input, torch.randint(2, (20, count), generator=torch.Generator().manual_seed(0)))


def test_prototypes_refuse_what_does_not_fit_and_change_nothing():
    matcher, input, target = make()
    before = matcher.edges.weight.detach().clone()
    broken = input.clone()
    broken[3, 2] = float("nan")
    for one, other, error, message in ((input[:0], target[:0], ValueError, "expected at least one "
                                        "example, got none"),
                                       (input, target[:3], ValueError, r"expected target of shape "
                                        r"\[20\] with one more "
                                        r"dimension"), (input, target[:, 0], ValueError,
                                                        r"expected target of "
                                                        r"shape \[20\] with one "
                                                        r"more dimension"),
                                       (input.bfloat16(), target, TypeError, "expected input of "
                                        "the table's dtype "
                                        "float32, got "
                                        "bfloat16"), (broken, target, ValueError,
                                                      "expected input of finite "
                                                      "numbers"), (input * 1e38, target, ValueError,
                                                                   "expected input .*finite"),
                                       (input, target + 40, IndexError, "class|label|target")):
        with pytest.raises(error, match=message):
            matcher.init_from_prototypes(one, other)
    assert torch.equal(matcher.edges.weight, before)


def test_a_checkpoint_with_an_invalid_layer_is_refused():
    matcher, *_ = make()
    for layer in (0, matcher.tree.depth + 1, 1.5):
        state = matcher.state_dict() | {"layer": torch.tensor(layer)}
        with pytest.raises(
                RuntimeError, match=r"expected layer as an integer in \[1, "
                rf"{matcher.tree.depth}\], got {layer}"):
            matcher.load_state_dict(state)
    assert int(matcher.layer) == 1
    deeper, flat = (xs.HierarchicalMatcher(6, xs.LabelTree.from_nested(nested))
                    for nested in ([[0, [1, 2]]], [[0], [1], 2]))
    assert deeper.tree.num_nodes == flat.tree.num_nodes and deeper.tree.depth > flat.tree.depth
    while deeper.next_layer():
        pass
    flat.load_state_dict(deeper.state_dict())  # loads the tree too
    assert int(flat.layer) == flat.tree.depth == deeper.tree.depth


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_a_wide_beam_finds_the_best_labels(loss):
    matcher, input, _ = make(loss=loss)
    while matcher.next_layer():
        pass
    torch.nn.init.normal_(matcher.edges.weight)
    z = matcher.edges(input)
    each = (-(1 - z).clamp(min=0)**3).exp() if loss == "squared_hinge" else z.sigmoid()
    whole = torch.cat([torch.ones(20, 1), each], 1)[:, matcher.tree.path(torch.arange(40))].prod(-1)
    scores, labels = matcher.topk(input, 5, beam=40)
    torch.testing.assert_close(scores, whole.topk(5).values, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(whole.gather(1, labels), scores, atol=1e-6, rtol=1e-4)
    assert torch.equal(matcher.predict(input.view(4, 5, 6)), matcher.topk(input, 1)[1].view(4, 5))


def test_it_learns_and_is_saved(tmp_path):
    """It learns labels that are linear in the input, and a checkpoint gives the same answers."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((30, 16)).astype(np.float32)
    Y = sp.csr_matrix(
        np.stack([np.isin(np.arange(30), random.choice(30, 2, replace=False))
                  for _ in range(800)]).astype(np.float32))
    X = torch.from_numpy((Y @ centres + 0.1 * random.standard_normal((800, 16))).astype(np.float32))
    tree = xs.LabelTree.from_vectors(torch.from_numpy(centres), 4,
                                     generator=torch.Generator().manual_seed(0), max_leaf_size=4)
    torch.manual_seed(0)
    matcher, target = xs.HierarchicalMatcher(16, tree, beam=3), xs.HierarchicalMatcher.targets(Y)
    assert target.shape == (800, 2)
    while True:
        optimizer = xs.optim.RowAdam(matcher.parameters(), lr=0.03)
        for step in range(120):
            rows = torch.randint(0, 700, (64,))
            loss = matcher(X[rows], target[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not matcher.next_layer():
            break
    assert xs.metrics.precision_at_k(matcher.topk(X[700:], 1)[1], Y[700:], 1) > 0.9
    torch.save(matcher.state_dict(), tmp_path / "matcher.pt")
    other = xs.HierarchicalMatcher(16, tree, beam=3)
    other.load_state_dict(torch.load(tmp_path / "matcher.pt"))
    assert torch.equal(other.topk(X, 3)[1], matcher.topk(X, 3)[1])


def test_it_works_scripted_compiled_and_in_bfloat16():
    matcher, input, target = make(beam=2)
    matcher.next_layer()
    want = matcher(input, target)
    torch.testing.assert_close(torch.jit.script(matcher)(input, target), want)
    torch.testing.assert_close(torch.compile(matcher, backend="eager")(input, target), want)
    low = make(beam=2, dtype=torch.bfloat16)[0]
    assert low(input.bfloat16(), target).isfinite()


@pytest.mark.parametrize(
    "name", ["matcher_init_layer_", "matcher_loss", "matcher_next_layer_", "matcher_topk"])
def test_opcheck(name):
    torch.library.opcheck(getattr(ops, name).default, op_samples.samples()[name])


def test_assigned_options_take_effect_and_are_validated():
    matcher, input, target = make(beam=1)
    matcher.next_layer()
    for option, value in (("beam", 100), ("loss", "logistic"), ("reduction", "sum")):
        setattr(matcher, option, value)
        torch.testing.assert_close(
            matcher(input, target),
            naive_loss(matcher, input, target, 2).sum() /
            (20 if matcher.reduction == "mean" else 1))
    for option, value in (("beam", 0), ("loss", "hinge"), ("reduction", "max")):
        with pytest.raises(ValueError, match=f"HierarchicalMatcher: expected .*{option}"):
            setattr(matcher, option, value)


def test_batches_without_labels_or_queries():
    matcher, input, target = make()
    assert matcher(input, torch.full((20, 1), -1)).isfinite() and matcher(
        input, torch.zeros(20, 0, dtype=torch.int64)).isfinite()
    assert matcher(input[:0], target[:0]).isnan()  # the mean of no losses, as in torch.nn


BAD = [
    (lambda m, x, t: m(x[:, :5], t), ValueError, "6"),
    (lambda m, x, t: m(x, t[:3]), ValueError, r"target of shape \[20\] with one more dimension"),
    (lambda m, x, t: m(x, t + 40), IndexError, "40"),
    (lambda m, x, t: m(x, t.float()), TypeError, "int64"),
    (lambda m, x, t: m.topk(x, 3), ValueError, "all of .* layers trained, got layer 1 at work"),
    (lambda m, x, t: xs.HierarchicalMatcher(6, "tree"), TypeError, "LabelTree, got str"),
    (lambda m, x, t: xs.HierarchicalMatcher(6, xs.LabelTree.balanced(1)), ValueError,
     "at least 2 nodes"),
    (lambda m, x, t: xs.HierarchicalMatcher(6, m.tree, loss="hinge"), ValueError, "loss as one of"),
    (lambda m, x, t: xs.HierarchicalMatcher(6, m.tree, beam=0), ValueError, "beam"),
    (lambda m, x, t: xs.HierarchicalMatcher(6, m.tree, reduction="max"), ValueError, "reduction"),
    (lambda m, x, t: ops.shortlist(t, t, m.tree.first_child, m.tree.parent[1:]), ValueError,
     "shortlist: expected first_child"),
    (lambda m, x, t: ops.shortlist(t + 100, t * 0 - 1, m.tree.first_child, m.tree.parent),
     IndexError, "parents in"),
    (lambda m, x, t: ops.shortlist(t * 0, t * 0, m.tree.first_child, m.tree.parent), IndexError,
     r"targets in \[1"),
    (lambda m, x, t: ops.shortlist(t * 0, t * 0 - 1, m.tree.first_child + 100, m.tree.parent),
     ValueError, "first_child to rise"),
    (lambda m, x, t: ops.beam_search(x, m.edges.weight, None, m.tree.first_child, m.tree.node_class,
                                     3, "sigmoid"), ValueError, "transform as"),
]


@pytest.mark.parametrize("call, error, message", BAD)
def test_bad_input(call, error, message):
    matcher, input, target = make()
    with pytest.raises(error, match=message):
        call(matcher, input, target)


def test_targets_skips_stored_zeros_and_does_not_change_the_matrix():
    import scipy.sparse as sp

    Y = sp.csr_matrix((np.array([1, 0, 1.0]), np.array([2, 0, 1]), np.array([0, 2, 3])),
                      shape=(2, 4))
    assert xs.HierarchicalMatcher.targets(Y).tolist() == [[2], [1]] and Y.nnz == 3
    with pytest.raises(TypeError, match="expected Y as a scipy sparse matrix, got ndarray"):
        xs.HierarchicalMatcher.targets(np.eye(3))
