"""BeamTreeLoss: formula, candidates, checkpoints and errors."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from beam_tree_checks import make_tree_loss
from cane_checks import REDUCTIONS, check_against_formula
from sampler_checks import check_scripted_compiled_and_saved
from tree_checks import TREES
from xsoftmax import BeamTreeLoss, LabelTree
from xsoftmax.samplers import StaticSampler, UniformSampler


@pytest.mark.parametrize("noise_reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("noise", ["uniform", "skewed"])
@pytest.mark.parametrize("tree", ["balanced", "huffman", "flat", "equal mass", "routed"])
def test_beam_tree_equals_the_formula(tree, noise, bias, noise_reduction):
    """CANE over the sums of all paths, with the candidates and noise of the step."""
    routed = tree == "routed"
    tree = TREES["equal mass" if routed else tree]
    N, Q = tree.num_classes, 40
    sampler = noise if noise == "uniform" else StaticSampler(
        torch.arange(1, N + 1).double(), 12, shared=False)
    loss = make_tree_loss(tree, num_candidates=12, noise_sampler=sampler,
                          noise_reduction=noise_reduction, bias=bias, reduction="none",
                          routed=routed)
    input = torch.randn(Q, 5, dtype=torch.float64, requires_grad=True)
    # half of the targets are likely candidates
    target = torch.where(torch.rand(Q) < 0.5, loss.predict(input), torch.randint(N, (Q,)))
    torch.manual_seed(4)
    candidates = loss.candidates(input)
    drawn = loss.noise.sample_outside(input.detach(), candidates, target, None)
    torch.manual_seed(4)
    got = loss(input, target)
    assert 0.1 < xs.metrics.coverage(candidates, target) < 1
    check_against_formula(got, loss.scores(input), target, candidates.tolist(), drawn,
                          noise_reduction, (input, *loss.parameters()))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("noise", ["uniform", "log_uniform"])
def test_a_step_is_the_composition_of_its_parts(noise, routed):
    """The step without operators for the noise sampler gives the same loss and state."""
    loss = make_tree_loss(TREES["equal mass"], num_candidates=12, noise_sampler=noise, bias=True,
                          routed=routed, balance_every=2)
    parts = copy.deepcopy(loss)
    parts.noise.describe = lambda: ""
    input, target = torch.randn(40, 5,
                                dtype=torch.float64), torch.randint(TREES["equal mass"].num_classes,
                                                                    (40,))
    for _ in range(3):
        values = []
        for each in (loss, parts):
            torch.manual_seed(3)
            values.append(each(input, target))
        assert torch.equal(*values)
        assert all(
            torch.equal(a, b) for a, b in zip(loss.state_dict().values(),
                                              parts.state_dict().values()))


def test_a_refused_step_neither_counts_nor_balances():
    loss = make_tree_loss(balance_every=1)
    before = loss.edges.weight.detach().clone()
    loss.weight = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="class_weight"):
        loss(torch.randn(4, 5, dtype=torch.float64), torch.arange(4))
    assert loss.steps == 0 and torch.equal(loss.edges.weight, before)


def test_routed_candidates():
    """Different classes of the best subset, all equally likely; all of a subset that is small."""
    tree = LabelTree.from_frequencies(1.0 / torch.arange(1, 101), 6)
    loss = make_tree_loss(tree, num_candidates=7, routed=True)
    input = torch.randn(1, 5, dtype=torch.float64).expand(9000, 5)
    best = next(v for v in range(1, 7) if int(tree.first_child[v + 1] - tree.first_child[v]) > 20)
    with torch.no_grad():
        loss.edges.weight[best - 1] = 10 * input[0]
    members = tree.node_class[int(tree.first_child[best]):int(tree.first_child[best + 1])]
    torch.manual_seed(1)
    found = loss.candidates(input)
    assert torch.isin(found[found >= 0], members).all()
    assert all(
        len(set(row)) == len(row) for row in ([c for c in row if c >= 0] for row in found.tolist()))
    counts = torch.bincount(found.flatten(), minlength=100)[members].double()
    assert (counts / 9000 - 7 / len(members)).abs().max() < 0.03
    # All pairs are equally likely, too.
    there = (found.unsqueeze(2) == members).any(1).double()
    together = (there.t() @ there)[~torch.eye(len(members), dtype=torch.bool)] / 9000
    assert (together - 7 * 6 / (len(members) * (len(members) - 1))).abs().max() < 0.03
    small = [v for v in range(1, 7) if int(tree.first_child[v + 1] - tree.first_child[v]) < 7]
    assert small  # the most frequent classes are in small subsets
    with torch.no_grad():
        loss.edges.weight[small[0] - 1] = 100 * input[0]
    found = loss.candidates(input[:1])[0]
    held = tree.node_class[int(tree.first_child[small[0]]):int(tree.first_child[small[0] + 1])]
    assert sorted(found[found >= 0].tolist()) == sorted(
        held.tolist()) and found[len(held):].eq(-1).all()


def test_beam_as_wide_as_the_tree_is_the_exact_loss():
    loss = make_tree_loss(num_candidates=100)
    assert loss.num_candidates == 40 and loss.num_noises == 0 == make_tree_loss(
        num_candidates=40, noise_sampler="log_uniform").num_noises
    input, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(40, (6,))
    torch.testing.assert_close(loss(input, target), F.cross_entropy(loss.scores(input), target))
    torch.testing.assert_close(loss.eval()(input, target), loss.exact(input, target))


def test_candidates_of_a_wider_beam():
    """Exactly the best classes once the beam is as wide as the tree, also for topk and predict."""
    input = torch.randn(50, 5, dtype=torch.float64)
    loss = make_tree_loss(num_candidates=4, beam=1000)
    assert loss.beam == 40 and "beam=40" in repr(loss)
    want = loss.scores(input).topk(4).indices
    assert torch.equal(loss.candidates(input), want)
    assert torch.equal(loss.topk(input, 2)[1], want[:, :2]) and torch.equal(
        loss.predict(input), want[:, 0])
    narrow = make_tree_loss(num_candidates=4)
    assert not torch.equal(narrow.candidates(input), want)
    assert torch.equal(
        make_tree_loss(num_candidates=4, beam=4).candidates(input), narrow.candidates(input))
    assert torch.equal(torch.jit.script(loss).candidates(input), want)
    for beam in (3, 0):
        with pytest.raises(ValueError, match="BeamTreeLoss: expected beam of at least"):
            make_tree_loss(num_candidates=4, beam=beam)


@pytest.mark.parametrize("tree", TREES)
def test_scores_exact_and_topk(tree):
    tree = TREES[tree]
    loss = make_tree_loss(tree, bias=True, num_candidates=1)
    input, target = torch.randn(2, 3, 5,
                                dtype=torch.float64), torch.randint(tree.num_classes, (2, 3))
    target[0, 1] = -100
    edges = loss.edges(input)
    path = tree.path(torch.arange(tree.num_classes)) - 1
    want = torch.stack([edges[..., [e for e in row if e >= 0]].sum(-1) for row in path.tolist()],
                       -1)
    torch.testing.assert_close(loss.scores(input), want)
    torch.testing.assert_close(loss.log_prob(input), want.log_softmax(-1))
    torch.testing.assert_close(loss.exact(input, target),
                               F.cross_entropy(want.flatten(0, 1), target.flatten()))
    k = min(4, tree.num_classes)
    values, classes = loss.topk(input, k, tree.num_classes)
    torch.testing.assert_close(values, want.topk(k).values)
    torch.testing.assert_close(want.gather(-1, classes), values)
    assert loss.predict(input).shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_exact_loss_of_16_bit_edges_is_summed_in_float32(dtype, reduction):
    torch.manual_seed(0)
    loss = BeamTreeLoss(16, LabelTree.random(400, 4), num_candidates=3, num_noises=1, bias=True,
                        reduction=reduction, dtype=dtype).eval()
    input, target = torch.randn(30, 16, dtype=dtype), torch.randint(400, (30,))
    target[3] = -100
    got = loss(input, target)
    weight, bias = (torch.ops.xsoftmax.tree_class_scores(table.double(), loss.tree.parent,
                                                         loss.tree.class_node,
                                                         loss.tree.layer_sizes, 0)
                    for table in (loss.edges.weight, loss.edges.bias))
    want = F.cross_entropy(input.double() @ weight.t() + bias, target, reduction=reduction)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_losses_over_one_tree_share_checkpoints():
    tree = LabelTree.random(40, 4)
    beam, hierarchical = BeamTreeLoss(5, tree, num_candidates=3,
                                      num_noises=1), xs.HierarchicalSoftmaxLoss(5, tree)
    hierarchical.load_state_dict(beam.state_dict())
    assert torch.equal(hierarchical.edges.weight, beam.edges.weight)
    other = BeamTreeLoss(5, tree, num_candidates=3, num_noises=1)
    other.load_state_dict(hierarchical.state_dict())
    assert torch.equal(other.edges.weight, beam.edges.weight)
    input, target = torch.randn(3, 5), torch.tensor([1, 5, 39])
    assert torch.equal(hierarchical.exact(input, target), hierarchical(input, target))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_beam_tree_compiled_for_any_batch(routed, training):
    """One graph for several batch sizes, also of the exact loss in eval()."""
    loss = BeamTreeLoss(5, TREES["equal mass"], num_candidates=6, num_noises=2,
                        routed=routed).train(training)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (5, 6, 9):
        input, target = torch.randn(size, 5), torch.randint(99, (size,))
        torch.manual_seed(1)
        got = compiled(input, target)
        torch.manual_seed(1)
        torch.testing.assert_close(got, loss(input, target))


def test_opcheck():
    tree, ops, seed = LabelTree.from_frequencies(torch.arange(1, 100),
                                                 7), torch.ops.xsoftmax, torch.tensor(3)
    E = tree.num_edges
    torch.library.opcheck(ops.tree_balance_.default,
                          (torch.randn(E, 5), tree.first_child, tree.layer_sizes))
    torch.library.opcheck(ops.tree_routed_candidates.default,
                          (seed, torch.randn(6, 7), tree.first_child, tree.node_class, 5))
    torch.library.opcheck(ops.label_tree_nodes.default,
                          (tree.class_node, torch.tensor([3, -100, 98]), -100))
    torch.library.opcheck(ops.label_tree_path.default,
                          (tree.class_node, tree.parent, torch.tensor([3, 98]), tree.depth))
    edges = [
        torch.randn(3, 2, 5, requires_grad=True),
        torch.randn(E, 5, requires_grad=True),
        torch.randn(E, requires_grad=True)
    ]
    target, tables = torch.tensor([[3, 8], [-100, 5], [0, 98]]), tree.tables()
    torch.library.opcheck(ops.tree_queries.default, (edges[0], target, *edges[1:], tables, -100))
    torch.library.opcheck(ops.hierarchical_softmax_loss.default,
                          (*edges, target, tables, tree.layer_sizes, tree.group_sizes, None, ""))
    torch.library.opcheck(
        ops.tree_cross_entropy.default,
        (*edges, target, tables, tree.layer_sizes, torch.ones(99), "reduction=sum"))
    for routed in ("True", "False"):
        torch.library.opcheck(ops.beam_tree_candidates.default,
                              (seed, edges[0].flatten(0, 1), *edges[1:], tables, tree.layer_sizes,
                               f"num_candidates=3,beam=4,routed={routed}"))
    sets = [torch.randint(99, (6, 3)),
            torch.randint(99, (6, 2))], [torch.zeros(6, 3),
                                         torch.ones(6, 2)], [None, torch.ones(6)], [True, False]
    torch.library.opcheck(ops.beam_tree_loss.default,
                          (*edges, target, tables, tree.layer_sizes, *sets, None, "estimator=cane"))
    for op in (ops.tree_class_scores, ops.hierarchical_log_prob):
        torch.library.opcheck(
            op.default,
            (torch.randn(6, E, requires_grad=True), tree.parent, tree.class_node, tree.layer_sizes))


def test_loading_another_tree_changes_no_other_loss():
    """A checkpoint may hold a tree of other layers with as many nodes. The loss that loads it uses
    it; another loss built on the same tree does not."""
    counts = [torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1]), torch.ones(8)]
    one, other = (LabelTree.huffman(some) for some in counts)
    assert one.num_nodes == other.num_nodes and one.layer_sizes != other.layer_sizes
    input, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(8, (6,))
    for make in (lambda tree: make_tree_loss(tree),
                 lambda tree: xs.HierarchicalSoftmaxLoss(5, tree, dtype=torch.float64)):
        first, second, third = make(one), make(other), make(other)
        want, kept = first.log_prob(input), third.log_prob(input)
        second.load_state_dict(first.state_dict())
        torch.testing.assert_close(second.log_prob(input), want)
        assert second(input, target).isfinite()
        assert torch.equal(third.log_prob(input), kept) and other.layer_sizes != one.layer_sizes


def test_beam_tree_learns():
    """For clustered classes and a tree built from their centres, coverage and accuracy rise; the
    gradient of a step has a static number of rows."""
    torch.manual_seed(0)
    centres = (3 * torch.randn(40, 1, 16) + torch.randn(40, 8, 16)).flatten(0, 1)
    tree = LabelTree.from_vectors(centres, 8, generator=torch.Generator().manual_seed(0))
    loss = BeamTreeLoss(16, tree, num_candidates=9, num_noises=1)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.02)
    test, classes = centres + 0.3 * torch.randn(320, 16), torch.arange(320)
    assert xs.metrics.coverage(loss.candidates(test), classes) < 0.2
    for step in range(150):
        target = torch.randint(320, (200,))
        optimizer.zero_grad()
        loss(centres[target] + 0.3 * torch.randn(200, 16), target).backward()
        grad = loss.edges.weight.grad
        assert grad.is_sparse and grad._nnz() == sum(
            min(200 * 11, size) for size in tree.layer_sizes)
        optimizer.step()
    assert xs.metrics.coverage(loss.candidates(test), classes) > 0.95
    assert (loss.predict(test) == classes).float().mean() > 0.9


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_queries_change_nothing_for_the_others(impl, routed, reduction):
    """Whatever they hold, the loss and all gradients are equal."""
    results, target = [], torch.tensor([3, -100, 7, -100, 9])
    for held in (0.0, 1.0, math.inf, math.nan):
        loss = make_tree_loss(TREES["equal mass"], bias=True, routed=routed,
                              noise_sampler="log_uniform", reduction=reduction)
        input = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        input[1::2] = held
        input.requires_grad_()
        value = loss(input, target, torch.Generator().manual_seed(3))
        value.sum().backward()
        assert input.grad[1::2].eq(0).all() and input.grad[::2].ne(0).any(1).all()
        results.append(
            (value, input.grad, loss.edges.weight.grad.to_dense(), loss.edges.bias.grad.to_dense()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    if reduction == "mean":
        input.grad = loss.edges.weight.grad = None
        nothing = loss(input, torch.full((5,), -100))
        nothing.backward()
        assert nothing.isnan() and input.grad.eq(0).all() and loss.edges.weight.grad.to_dense().eq(
            0).all()


@pytest.mark.parametrize("routed", [False, True])
def test_an_error_changes_nothing(routed):
    """No step is counted, no edge is balanced, and no random number is drawn."""
    loss = make_tree_loss(TREES["equal mass"], routed=routed, balance_every=1)
    before, generator = loss.edges.weight.detach().clone(), torch.Generator().manual_seed(1)
    state = generator.get_state()
    input, target = torch.randn(2, 5, dtype=torch.float64), torch.tensor([1, 2])
    for wrong in ((input, torch.tensor([1,
                                        99])), (input, torch.tensor([1,
                                                                     -1])), (input, target.float()),
                  (input, target[:1]), (input.float(), target), (input[:, :3], target)):
        with pytest.raises((ValueError, TypeError, IndexError), match="expected"):
            loss(*wrong, generator)
        assert loss.steps == 0 and torch.equal(loss.edges.weight, before) and torch.equal(
            generator.get_state(), state)
    loss(input, target, generator)
    assert loss.steps == 1 and not torch.equal(loss.edges.weight, before) and not torch.equal(
        generator.get_state(), state)


def test_state_dict_names_match_those_of_cpp():
    """See tests/cpp/test_trees.cpp. Otherwise checkpoints could not be exchanged."""
    loss = BeamTreeLoss(5, LabelTree.balanced(9, 3), num_candidates=2, num_noises=1,
                        noise_sampler="log_uniform", bias=True, weight=torch.ones(9))
    assert sorted(loss.state_dict()) == [
        "edges.bias", "edges.weight", "steps", "tree.class_node", "tree.first_child",
        "tree.node_class", "tree.parent", "weight"
    ]
    assert [name for name, _ in loss.named_children()] == ["tree", "edges", "noise"]
    hierarchical = xs.HierarchicalSoftmaxLoss(5, LabelTree.balanced(9, 3))
    assert sorted(hierarchical.state_dict()) == [
        "edges.weight", "tree.class_node", "tree.first_child", "tree.node_class", "tree.parent"
    ]


@pytest.mark.parametrize("routed", [False, True])
def test_beam_tree_scripted_compiled_and_saved(routed):
    tree = TREES["equal mass"]
    check_scripted_compiled_and_saved(
        lambda: BeamTreeLoss(5, tree, num_candidates=6, num_noises=2, routed=routed))


def test_beam_tree_autocast():
    loss = make_tree_loss(dtype=torch.float32, num_candidates=40)
    input, target = torch.randn(6, 5).bfloat16(), torch.randint(40, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(input, target)
        classes = loss.topk(input, 3)[1]
    torch.testing.assert_close(value, loss(input.float(), target))
    assert torch.equal(classes, loss.topk(input.float(), 3)[1])


def test_routed_candidates_of_all_classes_keep_their_noise():
    """Most classes are outside the subset, however large num_candidates is."""
    tree = LabelTree.from_frequencies(torch.ones(20), 4)
    loss = make_tree_loss(tree, num_candidates=20, num_noises=3, routed=True)
    assert loss.num_noises == 3 and make_tree_loss(tree, num_candidates=20).num_noises == 0
    assert loss.candidates(torch.randn(9, 5, dtype=torch.float64)).ge(0).sum(1).eq(5).all()


def test_a_routed_loss_refuses_a_deeper_tree():
    flat, deep = LabelTree.from_nested([[0, 1], [2, 3], [4, 5]]), LabelTree.from_nested([[[0,
                                                                                           1], 2],
                                                                                         [3, 4], 5])
    assert flat.num_nodes == deep.num_nodes
    routed, other = (BeamTreeLoss(4, tree, num_candidates=2, num_noises=1, routed=tree is flat)
                     for tree in (flat, deep))
    with pytest.raises(
            RuntimeError, match="BeamTreeLoss: expected tree.* to hold one layer of "
            "subsets for routed=True"):
        routed.load_state_dict(other.state_dict())
    routed.load_state_dict(BeamTreeLoss(4, flat, num_candidates=2, num_noises=1).state_dict())


def test_to_empty_keeps_the_tree():
    loss = make_tree_loss()
    moved = make_tree_loss().to_empty(device="cpu")
    moved.edges.load_state_dict(loss.edges.state_dict())
    input = torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(moved.candidates(input), loss.candidates(input))


TREE = TREES["balanced"]
ROUTED = TREES["equal mass"]
MOST = 2**63 - 1


def routed_from(first_child):
    scores = torch.zeros(1, 7)
    return torch.ops.xsoftmax.tree_routed_candidates(
        torch.tensor(0), scores, torch.cat([first_child, ROUTED.first_child[len(first_child):]]),
        ROUTED.node_class, 5)


BAD = [
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, noise_sampler="midx"),
     ValueError,
     "BeamTreeLoss: expected a noise_sampler that does not follow a class table, since a tree has "
     "none, got MidxSampler"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1).topk(torch.zeros(2, 5), -1),
     ValueError, r"expected k in \[0, 200\], got -1"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1).topk(torch.zeros(2, 5), 201),
     ValueError, r"expected k in \[0, 200\]"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=0, num_noises=1), ValueError,
     "BeamTreeLoss: expected num_candidates of at least 1, got 0"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1, balance_every=-1), ValueError,
     "expected balance_every of at least 0, got -1"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1.5), TypeError,
     "BeamTreeLoss: expected num_noises of type int, got float"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1, routed=True), ValueError,
     "expected a tree of one layer of subsets"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=2, noise_sampler=UniformSampler(
        200, 3, shared=False)), ValueError,
     "expected a sampler that draws a multiple of num_samples = 2 for each query, got 3"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, noise_sampler=UniformSampler(
        200, 1)), ValueError, "expected a sampler of private independent draws"),
    (lambda: BeamTreeLoss(
        5, TREE, num_candidates=3, num_noises=1, noise_sampler=UniformSampler(
            200, 4, shared=False, exclude=torch.arange(7))), ValueError,
     "BeamTreeLoss: expected a noise_sampler that draws every class outside the candidates, got "
     "one that never draws 7 of them, such as 0"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, weight="even"), TypeError,
     "BeamTreeLoss: expected weight as a tensor, .*got str"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, ignore_index=None), TypeError,
     "expected ignore_index of type int, got NoneType"),
    (lambda: make_tree_loss()([1.0] * 5, torch.tensor(0)), TypeError, "BeamTreeLoss: expected "
     "input as a tensor, got list"),
    (lambda: routed_from(torch.tensor([1, 5, -(2**63)])), ValueError, r"tree_routed_candidates: "
     r"expected the children of "
     r"node 1 in \[0, 107\)"),
    (lambda: torch.ops.xsoftmax.tree_balance_(torch.zeros(TREE.num_edges, 2), TREE.first_child,
                                              [MOST, MOST, TREE.num_edges + 2]), ValueError,
     "tree_balance_: expected layer_sizes with a sum of"),
    (lambda: torch.ops.xsoftmax.tree_class_scores(torch.zeros(3, 9), TREE.parent, TREE.class_node,
                                                  TREE.layer_sizes), ValueError,
     "tree_class_scores: expected parent with size 10"),
    (lambda: torch.ops.xsoftmax.hierarchical_log_prob(torch.zeros(9), TREE.parent, TREE.class_node,
                                                      TREE.layer_sizes), ValueError,
     "hierarchical_log_prob: expected edges with 2 dimensions"),
    (lambda: make_tree_loss()(torch.zeros(2, 5).double(), torch.tensor([1, 40])), IndexError,
     r"expected target in \[0, 40\).*got 40 at \[1\]"),
    (lambda: make_tree_loss().topk(torch.zeros(2, 5).double(), 7, 3), ValueError,
     "BeamTreeLoss: expected width of at least k=7, got 3"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
