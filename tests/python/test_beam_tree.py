"""BeamTreeLoss: the formula, its candidates, the balance of its edges, and what users meet."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from cane_checks import REDUCTIONS, naive
from sampler_checks import check_scripted_compiled_and_saved
from score_checks import assert_same_gradients
from tree_checks import TREES
from xsoftmax import BeamTreeLoss, LabelTree
from xsoftmax.samplers import StaticSampler, UniformSampler


def make_tree_loss(tree=None, D=5, dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    kwargs = dict(num_candidates=5, num_noises=3) | kwargs
    loss = BeamTreeLoss(D, LabelTree.balanced(40, 3) if tree is None else tree, dtype=dtype, **kwargs)
    torch.nn.init.normal_(loss.edges.weight)
    return loss


@pytest.mark.parametrize("noise_reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("noise", ["uniform", "skewed"])
@pytest.mark.parametrize("tree", ["balanced", "huffman", "flat", "equal mass", "routed"])
def test_beam_tree_equals_the_formula(tree, noise, bias, noise_reduction):
    """CANE over the sums of all paths, with the candidates and the noise of the step."""
    routed = tree == "routed"
    tree = TREES["equal mass" if routed else tree]
    N, Q = tree.num_classes, 40
    sampler = noise if noise == "uniform" else StaticSampler(torch.arange(1, N + 1).double(), 12, shared=False)
    loss = make_tree_loss(tree, num_candidates=12, noise_sampler=sampler, noise_reduction=noise_reduction, bias=bias, reduction="none",
                          routed=routed)
    input = torch.randn(Q, 5, dtype=torch.float64, requires_grad=True)
    target = torch.where(torch.rand(Q) < 0.5, loss.predict(input), torch.randint(N, (Q,)))  # often among the candidates
    torch.manual_seed(4)
    candidates = loss.candidates(input)
    drawn = loss.noise.sample_outside(input.detach(), candidates, target, None)
    torch.manual_seed(4)
    got = loss(input, target)
    assert 0.1 < xs.metrics.coverage(candidates, target) < 1
    want = naive(loss.scores(input), target, candidates.tolist(), drawn.ids, drawn.log_count.double() - math.log(3),
                 drawn.target_log_count.double() - math.log(3), noise_reduction)
    torch.testing.assert_close(got, want)
    leaves = (input, *loss.parameters())
    ways = torch.randn(Q, dtype=torch.float64)
    assert_same_gradients(torch.autograd.grad(got @ ways, leaves), torch.autograd.grad(want @ ways, leaves))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("noise", ["uniform", "log_uniform"])
def test_a_step_is_the_composition_of_its_parts(noise, routed):
    """As a noise sampler that describes itself to no operator is used."""
    loss = make_tree_loss(TREES["equal mass"], num_candidates=12, noise_sampler=noise, bias=True, routed=routed, balance_every=2)
    parts = copy.deepcopy(loss)
    parts.noise.describe = lambda: ""
    input, target = torch.randn(40, 5, dtype=torch.float64), torch.randint(TREES["equal mass"].num_classes, (40,))
    for _ in range(3):
        values = []
        for each in (loss, parts):
            torch.manual_seed(3)
            values.append(each(input, target))
        assert torch.equal(*values)
        assert all(torch.equal(a, b) for a, b in zip(loss.state_dict().values(), parts.state_dict().values()))


def test_a_refused_step_is_not_counted():
    loss = make_tree_loss(balance_every=1)
    before = loss.edges.weight.detach().clone()
    loss.weight = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="class_weight"):
        loss(torch.randn(4, 5, dtype=torch.float64), torch.arange(4))
    assert loss.steps == 0 and torch.equal(loss.edges.weight, before)


def test_routed_candidates():
    """Different classes of the best subset, all of it where it is small; each class of it alike often."""
    tree = LabelTree.from_frequencies(1.0 / torch.arange(1, 101), 6)
    loss = make_tree_loss(tree, num_candidates=7, routed=True)
    input = torch.randn(1, 5, dtype=torch.float64).expand(9000, 5)
    best = next(v for v in range(1, 7) if int(tree.first_child[v + 1] - tree.first_child[v]) > 20)
    with torch.no_grad():
        loss.edges.weight[best - 1] = 10 * input[0]
    members = tree.node_class[int(tree.first_child[best]) : int(tree.first_child[best + 1])]
    torch.manual_seed(1)
    found = loss.candidates(input)
    assert torch.isin(found[found >= 0], members).all()
    assert all(len(set(row)) == len(row) for row in ([c for c in row if c >= 0] for row in found.tolist()))
    counts = torch.bincount(found.flatten(), minlength=100)[members].double()
    assert (counts / 9000 - 7 / len(members)).abs().max() < 0.03
    # Any two of them together alike often, too.
    there = (found.unsqueeze(2) == members).any(1).double()
    together = (there.t() @ there)[~torch.eye(len(members), dtype=torch.bool)] / 9000
    assert (together - 7 * 6 / (len(members) * (len(members) - 1))).abs().max() < 0.03
    small = [v for v in range(1, 7) if int(tree.first_child[v + 1] - tree.first_child[v]) < 7]
    assert small  # the most frequent classes stand in small subsets
    with torch.no_grad():
        loss.edges.weight[small[0] - 1] = 100 * input[0]
    found = loss.candidates(input[:1])[0]
    held = tree.node_class[int(tree.first_child[small[0]]) : int(tree.first_child[small[0] + 1])]
    assert sorted(found[found >= 0].tolist()) == sorted(held.tolist()) and found[len(held) :].eq(-1).all()


def test_beam_as_wide_as_the_tree_is_the_exact_loss():
    loss = make_tree_loss(num_candidates=100)
    assert loss.num_candidates == 40 and loss.num_noises == 0 == make_tree_loss(num_candidates=40, noise_sampler="log_uniform").num_noises
    input, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(40, (6,))
    torch.testing.assert_close(loss(input, target), F.cross_entropy(loss.scores(input), target))
    torch.testing.assert_close(loss.eval()(input, target), loss.exact(input, target))


def test_candidates_of_a_wider_beam():
    """The best of all classes once the beam is as wide as the tree; topk and predict look as far."""
    input = torch.randn(50, 5, dtype=torch.float64)
    loss = make_tree_loss(num_candidates=4, beam=1000)
    assert loss.beam == 40 and "beam=40" in repr(loss)
    want = loss.scores(input).topk(4).indices
    assert torch.equal(loss.candidates(input), want)
    assert torch.equal(loss.topk(input, 2)[1], want[:, :2]) and torch.equal(loss.predict(input), want[:, 0])
    narrow = make_tree_loss(num_candidates=4)
    assert not torch.equal(narrow.candidates(input), want)
    assert torch.equal(make_tree_loss(num_candidates=4, beam=4).candidates(input), narrow.candidates(input))
    assert torch.equal(torch.jit.script(loss).candidates(input), want)
    for beam in (3, 0):
        with pytest.raises(ValueError, match="BeamTreeLoss: expected beam of at least"):
            make_tree_loss(num_candidates=4, beam=beam)


@pytest.mark.parametrize("tree", TREES)
def test_scores_exact_and_topk(tree):
    tree = TREES[tree]
    loss = make_tree_loss(tree, bias=True, num_candidates=1)
    input, target = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(tree.num_classes, (2, 3))
    target[0, 1] = -100
    edges = loss.edges(input)
    path = tree.path(torch.arange(tree.num_classes)) - 1
    want = torch.stack([edges[..., [e for e in row if e >= 0]].sum(-1) for row in path.tolist()], -1)
    torch.testing.assert_close(loss.scores(input), want)
    torch.testing.assert_close(loss.log_prob(input), want.log_softmax(-1))
    torch.testing.assert_close(loss.exact(input, target), F.cross_entropy(want.flatten(0, 1), target.flatten()))
    k = min(4, tree.num_classes)
    values, classes = loss.topk(input, k, tree.num_classes)
    torch.testing.assert_close(values, want.topk(k).values)
    torch.testing.assert_close(want.gather(-1, classes), values)
    assert loss.predict(input).shape == (2, 3)


@pytest.mark.parametrize("tree", TREES)
def test_class_table_and_balance(tree):
    """Balanced edges give the same scores; the children of a node that is not the root then sum to zero."""
    tree = TREES[tree]
    loss, input = make_tree_loss(tree, bias=True), torch.randn(7, 5, dtype=torch.float64)
    torch.nn.init.normal_(loss.edges.bias)
    want = loss.scores(input)
    torch.testing.assert_close(F.linear(input, *loss.class_table()), want)
    loss.balance()
    torch.testing.assert_close(loss.scores(input), want)
    for node in range(1, tree.num_nodes):
        children = slice(int(tree.first_child[node]) - 1, int(tree.first_child[node + 1]) - 1)
        assert loss.edges.weight[children].sum(0).abs().max() < 1e-12 and loss.edges.bias[children].sum().abs() < 1e-12


def test_balance_every():
    """In training alone; counted across checkpoints; by 0 never."""
    input, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(40, (7,))
    loss = make_tree_loss(balance_every=3)
    other = make_tree_loss(balance_every=3)

    def balanced(loss):
        children = slice(int(loss.tree.first_child[1]) - 1, int(loss.tree.first_child[2]) - 1)
        return bool(loss.edges.weight[children].sum(0).abs().max() < 1e-12)

    loss.eval()(input, target)
    for step in range(1, 4):
        assert not balanced(loss)
        loss.train()(input, target)
        if step == 2:
            other.load_state_dict(loss.state_dict())
            other(input, target)
            assert balanced(other)
    assert balanced(loss)
    never = make_tree_loss(balance_every=0)
    for _ in range(5):
        never(input, target)
    assert not balanced(never)
    assert make_tree_loss().balance_every == 100


def test_balance_leaves_alone_what_does_not_learn():
    """Edges that are frozen, that are someone else's, or of a call that records no gradient."""
    input, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(40, (7,))
    loss = make_tree_loss(balance_every=1)
    before = loss.edges.weight.detach().clone()
    with torch.no_grad():
        loss(input, target)
    given = {name: parameter.detach().clone().requires_grad_() for name, parameter in loss.named_parameters()}
    torch.func.functional_call(loss, given, (input, target))
    assert torch.equal(given["edges.weight"], before)
    loss.edges.weight.requires_grad_(False)
    loss(input, target)
    assert torch.equal(loss.edges.weight, before) and loss.steps == 0
    loss.edges.weight.requires_grad_()
    loss(input, target)
    assert not torch.equal(loss.edges.weight, before) and loss.steps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_exact_loss_of_16_bit_edges_is_summed_in_float32(dtype, reduction):
    torch.manual_seed(0)
    loss = BeamTreeLoss(16, LabelTree.random(400, 4), num_candidates=3, num_noises=1, bias=True, reduction=reduction, dtype=dtype).eval()
    input, target = torch.randn(30, 16, dtype=dtype), torch.randint(400, (30,))
    target[3] = -100
    got = loss(input, target)
    weight, bias = (torch.ops.xsoftmax.tree_class_scores(table.double(), loss.tree.parent, loss.tree.class_node, loss.tree.layer_sizes, 0)
                    for table in (loss.edges.weight, loss.edges.bias))
    want = F.cross_entropy(input.double() @ weight.t() + bias, target, reduction=reduction)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_losses_over_one_tree_share_checkpoints():
    tree = LabelTree.random(40, 4)
    beam, hierarchical = BeamTreeLoss(5, tree, num_candidates=3, num_noises=1), xs.HierarchicalSoftmaxLoss(5, tree)
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
    """One graph for several sizes: in eval() the exact loss, too."""
    loss = BeamTreeLoss(5, TREES["equal mass"], num_candidates=6, num_noises=2, routed=routed).train(training)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (5, 6, 9):
        input, target = torch.randn(size, 5), torch.randint(99, (size,))
        torch.manual_seed(1)
        got = compiled(input, target)
        torch.manual_seed(1)
        torch.testing.assert_close(got, loss(input, target))


@pytest.mark.parametrize("call", ["forward", "exact"])
def test_balance_between_forward_and_backward(call):
    """Several losses may wait for one backward pass, whichever step balances: their gradients depend on whole paths alone."""
    input, target = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randint(40, (9,))
    gradients = []
    for balanced in (False, True):
        loss = make_tree_loss(bias=True)
        torch.manual_seed(2)
        value = getattr(loss, call)(input, target)
        if balanced:
            loss.balance()
        gradients.append(torch.autograd.grad(value, (input, *loss.parameters())))
    assert_same_gradients(*gradients)


def test_balance_of_edges_in_any_layout():
    """The kernel, the composite, a table in columns, 16-bit edges."""
    for tree in TREES.values():
        table = torch.randn(tree.num_edges, 5, dtype=torch.float64)
        results = []
        for name in ("kernel", "reference"):
            with xs.use_impl(name):
                results.append(table.clone())
                torch.ops.xsoftmax.tree_balance_(results[-1], tree.first_child, tree.layer_sizes)
        results.append(table.clone().t().contiguous().t())
        torch.ops.xsoftmax.tree_balance_(results[-1], tree.first_child, tree.layer_sizes)
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(results[0], results[2])
        low = table.bfloat16()
        torch.ops.xsoftmax.tree_balance_(low, tree.first_child, tree.layer_sizes)
        torch.testing.assert_close(low.double(), results[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_a_table_that_cannot_be_balanced_is_left_alone(impl):
    """Also where only the last of the children are wrong."""
    tree = LabelTree.balanced(200, 4)
    late = tree.first_child.clone()
    late[tree.parent[-1]] = 0
    table = torch.randn(tree.num_edges, 5)
    before = table.clone()
    for first_child in (torch.zeros_like(late), late):
        with xs.use_impl(impl), pytest.raises(ValueError, match="tree_balance_: expected the children of node"):
            torch.ops.xsoftmax.tree_balance_(table, first_child, tree.layer_sizes)
    assert torch.equal(table, before)


def test_balance_raises_the_version_and_compiles():
    """Called on a table that a backward pass waits for it is an error; the module's own method keeps the gradient, and compiles."""
    tree = LabelTree.balanced(40, 3)
    table = torch.randn(tree.num_edges, 5, requires_grad=True)
    value = table.square().sum()
    with torch.no_grad():
        torch.ops.xsoftmax.tree_balance_(table, tree.first_child, tree.layer_sizes)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    eager, compiled, scripted = (make_tree_loss(bias=True) for _ in range(3))
    eager.balance()
    torch.compile(lambda: compiled.balance(), fullgraph=True, backend="aot_eager")()
    torch.jit.script(scripted).balance()
    before = make_tree_loss(bias=True)
    for name, wanted in eager.edges.named_parameters():
        assert not torch.allclose(wanted, getattr(before.edges, name))
        torch.testing.assert_close(getattr(compiled.edges, name), wanted)
        torch.testing.assert_close(getattr(scripted.edges, name), wanted)


@pytest.mark.parametrize("every, moves", [(None, False), (1, True)])
@pytest.mark.parametrize("late", [False, True])
def test_16_bit_edges_are_balanced_on_request_only(late, every, moves):
    """Also where they became so after the constructor."""
    loss = BeamTreeLoss(5, TREES["balanced"], num_candidates=3, num_noises=1, balance_every=every, dtype=None if late else torch.bfloat16)
    loss = loss.bfloat16()
    before = loss.edges.weight.clone()
    loss.steps.fill_(loss.balance_every - 1)
    loss(torch.randn(4, 5).bfloat16(), torch.randint(200, (4,)))
    assert torch.equal(loss.edges.weight, before) != moves


def test_opcheck_of_what_the_module_does():
    tree, ops, seed = LabelTree.from_frequencies(torch.arange(1, 100), 7), torch.ops.xsoftmax, torch.tensor(3)
    E = tree.num_edges
    torch.library.opcheck(ops.tree_balance_.default, (torch.randn(E, 5), tree.first_child, tree.layer_sizes))
    torch.library.opcheck(ops.tree_routed_candidates.default, (seed, torch.randn(6, 7), tree.first_child, tree.node_class, 5))
    torch.library.opcheck(ops.label_tree_nodes.default, (tree.class_node, torch.tensor([3, -100, 98]), -100))
    torch.library.opcheck(ops.label_tree_path.default, (tree.class_node, tree.parent, torch.tensor([3, 98]), tree.depth))
    edges = [torch.randn(3, 2, 5, requires_grad=True), torch.randn(E, 5, requires_grad=True), torch.randn(E, requires_grad=True)]
    target, tables = torch.tensor([[3, 8], [-100, 5], [0, 98]]), tree.tables()
    torch.library.opcheck(ops.tree_queries.default, (edges[0], target, *edges[1:], tables, -100))
    torch.library.opcheck(ops.hierarchical_softmax_loss.default, (*edges, target, tables, tree.layer_sizes, tree.group_sizes, None, ""))
    torch.library.opcheck(ops.tree_cross_entropy.default, (*edges, target, tables, tree.layer_sizes, torch.ones(99), "reduction=sum"))
    for routed in ("True", "False"):
        torch.library.opcheck(ops.beam_tree_candidates.default, (seed, edges[0].flatten(0, 1), *edges[1:], tables, tree.layer_sizes,
                                                                 f"num_candidates=3,beam=4,routed={routed}"))
    sets = [torch.randint(99, (6, 3)), torch.randint(99, (6, 2))], [torch.zeros(6, 3), torch.ones(6, 2)], [None, torch.ones(6)], [True, False]
    torch.library.opcheck(ops.beam_tree_loss.default, (*edges, target, tables, tree.layer_sizes, *sets, None, "estimator=cane"))
    for op in (ops.tree_class_scores, ops.hierarchical_log_prob):
        torch.library.opcheck(op.default, (torch.randn(6, E, requires_grad=True), tree.parent, tree.class_node, tree.layer_sizes))


def test_a_loss_has_a_tree_of_its_own():
    """A checkpoint with a tree of other layers, and as many nodes: the loss goes on with that tree, another with its own."""
    counts = [torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1]), torch.ones(8)]
    one, other = (LabelTree.huffman(some) for some in counts)
    assert one.num_nodes == other.num_nodes and one.layer_sizes != other.layer_sizes
    input, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(8, (6,))
    for make in (lambda tree: make_tree_loss(tree), lambda tree: xs.HierarchicalSoftmaxLoss(5, tree, dtype=torch.float64)):
        first, second, third = make(one), make(other), make(other)
        want, kept = first.log_prob(input), third.log_prob(input)
        second.load_state_dict(first.state_dict())
        torch.testing.assert_close(second.log_prob(input), want)
        assert second(input, target).isfinite()
        assert torch.equal(third.log_prob(input), kept) and other.layer_sizes != one.layer_sizes


def test_beam_tree_learns():
    """Classes in clusters, the tree built of their centres: coverage and accuracy rise; a step's gradient has a static number of rows."""
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
        assert grad.is_sparse and grad._nnz() == sum(min(200 * 11, size) for size in tree.layer_sizes)
        optimizer.step()
    assert xs.metrics.coverage(loss.candidates(test), classes) > 0.95
    assert (loss.predict(test) == classes).float().mean() > 0.9


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_queries_change_nothing_for_the_others(impl, routed, reduction):
    """Whatever they hold, the loss and all gradients are the same."""
    results, target = [], torch.tensor([3, -100, 7, -100, 9])
    for held in (0.0, 1.0, math.inf, math.nan):
        loss = make_tree_loss(TREES["equal mass"], bias=True, routed=routed, noise_sampler="log_uniform", reduction=reduction)
        input = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        input[1::2] = held
        input.requires_grad_()
        value = loss(input, target, torch.Generator().manual_seed(3))
        value.sum().backward()
        assert input.grad[1::2].eq(0).all() and input.grad[::2].ne(0).any(1).all()
        results.append((value, input.grad, loss.edges.weight.grad.to_dense(), loss.edges.bias.grad.to_dense()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    if reduction == "mean":
        input.grad = loss.edges.weight.grad = None
        nothing = loss(input, torch.full((5,), -100))
        nothing.backward()
        assert nothing.isnan() and input.grad.eq(0).all() and loss.edges.weight.grad.to_dense().eq(0).all()


@pytest.mark.parametrize("routed", [False, True])
def test_an_error_changes_nothing(routed):
    """No step is counted, no edge is balanced, no number is drawn."""
    loss = make_tree_loss(TREES["equal mass"], routed=routed, balance_every=1)
    before, generator = loss.edges.weight.detach().clone(), torch.Generator().manual_seed(1)
    state = generator.get_state()
    input, target = torch.randn(2, 5, dtype=torch.float64), torch.tensor([1, 2])
    for wrong in ((input, torch.tensor([1, 99])), (input, torch.tensor([1, -1])), (input, target.float()), (input, target[:1]),
                  (input.float(), target), (input[:, :3], target)):
        with pytest.raises((ValueError, TypeError, IndexError), match="expected"):
            loss(*wrong, generator)
        assert loss.steps == 0 and torch.equal(loss.edges.weight, before) and torch.equal(generator.get_state(), state)
    loss(input, target, generator)
    assert loss.steps == 1 and not torch.equal(loss.edges.weight, before) and not torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_balance_settles_what_rows_owe(optimizer, weight_decay):
    """Balancing, flushing, evaluating and saving, in any order between steps of given gradients, leave the scores that flush() ends with: decay is
    one factor for all rows that owe nothing, and what moves a row does not depend on where it is."""
    def run(*between):
        torch.manual_seed(0)
        loss = BeamTreeLoss(5, LabelTree.balanced(40, 3), num_candidates=3, num_noises=2, bias=True, balance_every=0, dtype=torch.float64)
        make = {"adam": lambda p: xs.optim.RowAdam(p, lr=0.01, weight_decay=weight_decay),
                "sgd": lambda p: xs.optim.RowSGD(p, lr=0.01, momentum=0.9, weight_decay=weight_decay)}[optimizer]
        rows = make(loss.parameters())
        for step in range(30):
            touched = torch.randperm(loss.tree.num_edges)[:6].sort().values[None]
            for table in loss.edges.parameters():
                table.grad = torch.sparse_coo_tensor(touched, torch.randn(6, *table.shape[1:], dtype=torch.float64), table.shape)
            rows.step()
            {"balance": loss.balance, "flush": rows.flush, "eval": loss.eval, "save": loss.state_dict, "nothing": int,
             "topk": lambda: loss.topk(torch.ones(1, 5).double(), 2)}[between[step % len(between)]]()
        rows.flush()
        return loss.scores(torch.eye(5, dtype=torch.float64))

    want = run("nothing")
    for between in (("balance",), ("save",), ("nothing", "balance"), ("balance", "nothing", "flush", "nothing", "topk", "save", "balance", "eval")):
        torch.testing.assert_close(run(*between), want, rtol=1e-9, atol=1e-9)


def test_what_reads_all_edges_settles_them():
    loss = BeamTreeLoss(5, LabelTree.balanced(40, 3), num_candidates=3, num_noises=2)
    hierarchical = xs.HierarchicalSoftmaxLoss(5, LabelTree.balanced(40, 3))
    input, target = torch.randn(4, 5), torch.tensor([1, 1, 2, 39])
    both = [(loss, name) for name in ("scores", "exact", "topk", "predict", "log_prob", "class_table", "balance", "eval", "state_dict")]
    for module, name in both + [(hierarchical, name) for name in ("exact", "topk", "predict", "log_prob", "eval", "state_dict")]:
        optimizer = xs.optim.RowAdam(module.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            module.train()(input[:1], target[:1]).backward()
            optimizer.step()
            module(input[1:2] * 0, target[3:]).backward()
        before = module.edges.weight.detach().clone()
        arguments = {"exact": (input, target), "topk": (input, 2), "class_table": (), "balance": (), "eval": (), "state_dict": ()}.get(name, (input,))
        getattr(module, name)(*arguments)
        got = module.edges.weight.detach().clone()
        assert not torch.equal(got, before), name
        optimizer.flush()
        assert torch.equal(module.edges.weight, got), name


def test_names_of_state():
    """Those of tests/cpp/test_trees.cpp: checkpoints go both ways."""
    loss = BeamTreeLoss(5, LabelTree.balanced(9, 3), num_candidates=2, num_noises=1, noise_sampler="log_uniform", bias=True, weight=torch.ones(9))
    assert sorted(loss.state_dict()) == ["edges.bias", "edges.weight", "steps", "tree.class_node", "tree.first_child", "tree.node_class",
                                         "tree.parent", "weight"]
    assert [name for name, _ in loss.named_children()] == ["tree", "edges", "noise"]
    hierarchical = xs.HierarchicalSoftmaxLoss(5, LabelTree.balanced(9, 3))
    assert sorted(hierarchical.state_dict()) == ["edges.weight", "tree.class_node", "tree.first_child", "tree.node_class", "tree.parent"]


@pytest.mark.parametrize("routed", [False, True])
def test_beam_tree_scripted_compiled_and_saved(routed):
    tree = TREES["equal mass"]
    check_scripted_compiled_and_saved(lambda: BeamTreeLoss(5, tree, num_candidates=6, num_noises=2, routed=routed))


def test_beam_tree_autocast():
    loss = make_tree_loss(dtype=torch.float32, num_candidates=40)
    input, target = torch.randn(6, 5).bfloat16(), torch.randint(40, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(input, target)
        classes = loss.topk(input, 3)[1]
    torch.testing.assert_close(value, loss(input.float(), target))
    assert torch.equal(classes, loss.topk(input.float(), 3)[1])


def test_routed_candidates_of_all_classes_keep_their_noise():
    """Most classes are outside the subset, however many candidates there may be."""
    tree = LabelTree.from_frequencies(torch.ones(20), 4)
    loss = make_tree_loss(tree, num_candidates=20, num_noises=3, routed=True)
    assert loss.num_noises == 3 and make_tree_loss(tree, num_candidates=20).num_noises == 0
    assert loss.candidates(torch.randn(9, 5, dtype=torch.float64)).ge(0).sum(1).eq(5).all()


def test_a_routed_loss_loads_its_own_kind_of_tree_alone():
    flat, deep = LabelTree.from_nested([[0, 1], [2, 3], [4, 5]]), LabelTree.from_nested([[[0, 1], 2], [3, 4], 5])
    assert flat.num_nodes == deep.num_nodes
    routed, other = (BeamTreeLoss(4, tree, num_candidates=2, num_noises=1, routed=tree is flat) for tree in (flat, deep))
    with pytest.raises(RuntimeError, match="BeamTreeLoss: expected tree.* to hold one layer of subsets for routed=True"):
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
    return torch.ops.xsoftmax.tree_routed_candidates(torch.tensor(0), scores, torch.cat([first_child, ROUTED.first_child[len(first_child) :]]),
                                                     ROUTED.node_class, 5)


BAD = [
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, noise_sampler="midx"), ValueError,
     "BeamTreeLoss: expected a noise_sampler that does not follow a class table, since a tree has none, got MidxSampler"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1).topk(torch.zeros(2, 5), -1), ValueError, r"expected k in \[0, 200\], got -1"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1).topk(torch.zeros(2, 5), 201), ValueError, r"expected k in \[0, 200\]"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=0, num_noises=1), ValueError, "BeamTreeLoss: expected num_candidates of at least 1, got 0"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1, balance_every=-1), ValueError, "expected balance_every of at least 0, got -1"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1.5), TypeError, "BeamTreeLoss: expected num_noises of type int, got float"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1, routed=True), ValueError, "expected a tree of one layer of subsets"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=2, noise_sampler=UniformSampler(200, 3, shared=False)), ValueError,
     "expected a sampler that draws a multiple of num_samples = 2 for each query, got 3"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, noise_sampler=UniformSampler(200, 1)), ValueError,
     "expected a sampler of private independent draws"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, noise_sampler=UniformSampler(200, 4, shared=False, exclude=torch.arange(7))), ValueError,
     "BeamTreeLoss: expected a noise_sampler that draws every class outside the candidates, got one that never draws 7 of them, such as 0"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, weight="even"), TypeError, "BeamTreeLoss: expected weight as a tensor, .*got str"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, ignore_index=None), TypeError, "expected ignore_index of type int, got NoneType"),
    (lambda: make_tree_loss()([1.0] * 5, torch.tensor(0)), TypeError, "BeamTreeLoss: expected input as a tensor, got list"),
    (lambda: routed_from(torch.tensor([1, 5, -(2**63)])), ValueError, r"tree_routed_candidates: expected the children of node 1 in \[0, 107\)"),
    (lambda: torch.ops.xsoftmax.tree_balance_(torch.zeros(TREE.num_edges, 2), TREE.first_child, [MOST, MOST, TREE.num_edges + 2]), ValueError,
     "tree_balance_: expected layer_sizes with a sum of"),
    (lambda: torch.ops.xsoftmax.tree_class_scores(torch.zeros(3, 9), TREE.parent, TREE.class_node, TREE.layer_sizes), ValueError,
     "tree_class_scores: expected parent with size 10"),
    (lambda: torch.ops.xsoftmax.hierarchical_log_prob(torch.zeros(9), TREE.parent, TREE.class_node, TREE.layer_sizes), ValueError,
     "hierarchical_log_prob: expected edges with 2 dimensions"),
    (lambda: make_tree_loss()(torch.zeros(2, 5).double(), torch.tensor([1, 40])), IndexError, r"expected target in \[0, 40\).*got 40 at \[1\]"),
    (lambda: make_tree_loss().topk(torch.zeros(2, 5).double(), 7, 3), ValueError, "BeamTreeLoss: expected width of at least k=7, got 3"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
