"""BeamTreeLoss: balancing of edges, and pending updates of row optimizers."""

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from beam_tree_checks import make_tree_loss
from score_checks import assert_same_gradients
from tree_checks import TREES
from xsoftmax import BeamTreeLoss, LabelTree


@pytest.mark.parametrize("tree", TREES)
def test_class_table_and_balance(tree):
    """Balancing keeps the scores; the edges to the children of a node other than the root then sum
    to zero."""
    tree = TREES[tree]
    loss, input = make_tree_loss(tree, bias=True), torch.randn(7, 5, dtype=torch.float64)
    torch.nn.init.normal_(loss.edges.bias)
    want = loss.scores(input)
    torch.testing.assert_close(F.linear(input, *loss.class_table()), want)
    loss.balance()
    torch.testing.assert_close(loss.scores(input), want)
    for node in range(1, tree.num_nodes):
        children = slice(int(tree.first_child[node]) - 1, int(tree.first_child[node + 1]) - 1)
        assert loss.edges.weight[children].sum(
            0).abs().max() < 1e-12 and loss.edges.bias[children].sum().abs() < 1e-12


def test_balance_every():
    """Only training steps count, also across checkpoints; 0 means never."""
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


def test_balance_skips_edges_that_do_not_learn():
    """Frozen edges, edges passed by functional_call, and calls under no_grad."""
    input, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(40, (7,))
    loss = make_tree_loss(balance_every=1)
    before = loss.edges.weight.detach().clone()
    with torch.no_grad():
        loss(input, target)
    given = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in loss.named_parameters()
    }
    torch.func.functional_call(loss, given, (input, target))
    assert torch.equal(given["edges.weight"], before)
    loss.edges.weight.requires_grad_(False)
    loss(input, target)
    assert torch.equal(loss.edges.weight, before) and loss.steps == 0
    loss.edges.weight.requires_grad_()
    loss(input, target)
    assert not torch.equal(loss.edges.weight, before) and loss.steps == 1


@pytest.mark.parametrize("call", ["forward", "exact"])
def test_balance_between_forward_and_backward(call):
    """Several losses may share one backward pass, whichever step balances: gradients depend only on
    whole paths."""
    input, target = torch.randn(9, 5, dtype=torch.float64,
                                requires_grad=True), torch.randint(40, (9,))
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
    """Kernel, composite, a column-major table, 16-bit edges."""
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
def test_a_refused_balance_changes_nothing(impl):
    """Also if only the last children are wrong."""
    tree = LabelTree.balanced(200, 4)
    late = tree.first_child.clone()
    late[tree.parent[-1]] = 0
    table = torch.randn(tree.num_edges, 5)
    before = table.clone()
    for first_child in (torch.zeros_like(late), late):
        with xs.use_impl(impl), pytest.raises(
                ValueError, match="tree_balance_: expected the "
                "children of node"):
            torch.ops.xsoftmax.tree_balance_(table, first_child, tree.layer_sizes)
    assert torch.equal(table, before)


def test_balance_raises_the_version_and_compiles():
    """Balancing a table that a backward pass needs is an error; the module's method keeps the
    gradient, and compiles."""
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
    """Also if they were cast after construction."""
    loss = BeamTreeLoss(5, TREES["balanced"], num_candidates=3, num_noises=1, balance_every=every,
                        dtype=None if late else torch.bfloat16)
    loss = loss.bfloat16()
    before = loss.edges.weight.clone()
    loss.steps.fill_(loss.balance_every - 1)
    loss(torch.randn(4, 5).bfloat16(), torch.randint(200, (4,)))
    assert torch.equal(loss.edges.weight, before) != moves


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_balance_applies_pending_updates(optimizer, weight_decay):
    """Balancing, flushing, evaluating and saving, in any order between steps of given gradients,
    lead to the scores after a final flush(). Decay is one factor for all rows without pending
    updates, and updates do not depend on the value of a row."""
    def run(*between):
        torch.manual_seed(0)
        loss = BeamTreeLoss(5, LabelTree.balanced(40, 3), num_candidates=3, num_noises=2, bias=True,
                            balance_every=0, dtype=torch.float64)
        make = {
            "adam": lambda p: xs.optim.RowAdam(p, lr=0.01, weight_decay=weight_decay),
            "sgd": lambda p: xs.optim.RowSGD(p, lr=0.01, momentum=0.9, weight_decay=weight_decay)
        }[optimizer]
        rows = make(loss.parameters())
        for step in range(30):
            touched = torch.randperm(loss.tree.num_edges)[:6].sort().values[None]
            for table in loss.edges.parameters():
                table.grad = torch.sparse_coo_tensor(
                    touched, torch.randn(6, *table.shape[1:], dtype=torch.float64), table.shape)
            rows.step()
            {
                "balance": loss.balance, "flush": rows.flush, "eval": loss.eval,
                "save": loss.state_dict, "nothing": int,
                "topk": lambda: loss.topk(torch.ones(1, 5).double(), 2)
            }[between[step % len(between)]]()
        rows.flush()
        return loss.scores(torch.eye(5, dtype=torch.float64))

    want = run("nothing")
    for between in (("balance",), ("save",), ("nothing", "balance"),
                    ("balance", "nothing", "flush", "nothing", "topk", "save", "balance", "eval")):
        torch.testing.assert_close(run(*between), want, rtol=1e-9, atol=1e-9)


def test_methods_that_read_all_edges_apply_pending_updates():
    loss = BeamTreeLoss(5, LabelTree.balanced(40, 3), num_candidates=3, num_noises=2)
    hierarchical = xs.HierarchicalSoftmaxLoss(5, LabelTree.balanced(40, 3))
    input, target = torch.randn(4, 5), torch.tensor([1, 1, 2, 39])
    both = [(loss, name) for name in ("scores", "exact", "topk", "predict", "log_prob",
                                      "class_table", "balance", "eval", "state_dict")]
    for module, name in both + [
        (hierarchical, name)
            for name in ("exact", "topk", "predict", "log_prob", "eval", "state_dict")
    ]:
        optimizer = xs.optim.RowAdam(module.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            module.train()(input[:1], target[:1]).backward()
            optimizer.step()
            module(input[1:2] * 0, target[3:]).backward()
        before = module.edges.weight.detach().clone()
        arguments = {
            "exact": (input, target), "topk": (input, 2), "class_table": (), "balance": (),
            "eval": (), "state_dict": ()
        }.get(name, (input,))
        getattr(module, name)(*arguments)
        got = module.edges.weight.detach().clone()
        assert not torch.equal(got, before), name
        optimizer.flush()
        assert torch.equal(module.edges.weight, got), name
