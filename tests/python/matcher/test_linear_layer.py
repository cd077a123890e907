"""linear_layers_train against a solver of torch, and search in layers against dense products."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from xsoftmax._core.options import option_text

ops = torch.ops.xsoftmax
LOSSES = ["squared_hinge", "hinge", "logistic"]
OPTIONS = dict(tolerance=1e-4, sweeps=2000, threshold=0.0)


def problem(rows=60, features=40, parents=3, children=7, seed=0, density=0.2):
    """Returns sparse rows, the rows of each parent, the rows of each child, and first_child.

    The first parent has all rows, others half of them; children have some rows of their parent.
    """
    random = np.random.default_rng(seed)
    x = sp.random(rows, features, density, format="csr", dtype=np.float32, random_state=random)
    x.sort_indices()
    of_parent = [np.arange(rows)] + [
        np.sort(random.choice(rows, rows // 2, replace=False)) for _ in range(parents - 1)
    ]
    of_child = [
        np.sort(random.choice(of_parent[p], max(1,
                                                len(of_parent[p]) // 4), replace=False))
        for p in range(parents) for _ in range(children)
    ]
    return x, of_parent, of_child, torch.arange(parents + 1) * children


def lists(parts):
    offsets = torch.tensor([0, *np.cumsum([len(part) for part in parts])])
    return offsets, torch.from_numpy(np.concatenate([np.zeros(0, int), *parts]).astype(np.int32))


def rows_of(x):
    return torch.from_numpy(x.indptr.astype(np.int64)), torch.from_numpy(x.indices.astype(
        np.int32)), torch.from_numpy(x.data)


def train(x, of_parent, of_child, first_child, costs=None, **options):
    options = option_text(**(OPTIONS | options))
    *layer, _ = ops.linear_layers_train(rows_of(x), x.shape[1], [first_child], lists(of_parent),
                                        lists(of_child), [] if costs is None else [costs], [],
                                        [options])
    return layer


def dense(layer, first_child, features):
    """Returns dense weights [C, features + 1], the bias last."""
    chunk, feature, more, child, value, _ = layer
    entry = torch.cat([torch.zeros(1, dtype=torch.int64), (more.long() + 1).cumsum(0)])
    weight = torch.zeros(int(first_child[-1]), features + 1)
    for p in range(len(first_child) - 1):
        for row in range(int(chunk[p]), int(chunk[p + 1])):
            for e in range(int(entry[row]), int(entry[row + 1])):
                weight[int(first_child[p]) + int(child[e]), int(feature[row])] = value[e]
    return weight


def objective(weight, x, y, cost, loss):
    margin = y * (x @ weight)
    hinge = (1 - margin).clamp(min=0)
    losses = {
        "squared_hinge": hinge.square(), "hinge": hinge,
        "logistic": torch.nn.functional.softplus(-margin)
    }
    return weight.square().sum() / 2 + (cost * losses[loss]).sum()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("children", [1, 5, 16, 19])
def test_weights_minimise_the_objective(loss, children):
    """LBFGS from the weights found does not lower the objective beyond the tolerance, for any
    number of children."""
    x, of_parent, of_child, first_child = problem(children=children)
    costs = torch.rand(sum(len(child) for child in of_child)) + 0.5
    layer = train(x, of_parent, of_child, first_child, costs, loss=loss, positive_cost=2.0,
                  negative_cost=0.5)
    assert layer[5][1] == 0  # all classifiers converged
    weight = dense(layer, first_child, x.shape[1]).double()
    whole = torch.cat(
        [torch.from_numpy(x.toarray()).double(),
         torch.ones(x.shape[0], 1, dtype=torch.float64)], 1)
    at = 0
    for c, child in enumerate(of_child):
        rows = torch.from_numpy(of_parent[c // children])
        mine = torch.isin(rows, torch.from_numpy(child))
        y, cost = torch.where(mine, 1.0, -1.0).double(), torch.full((len(rows),), 0.5,
                                                                    dtype=torch.float64)
        cost[mine] = 2.0 * costs[at:at + len(child)].double()
        at += len(child)
        found = objective(weight[c], whole[rows], y, cost, loss)
        best = weight[c].clone().requires_grad_()
        optimizer = torch.optim.LBFGS([best], max_iter=200, tolerance_grad=1e-10,
                                      tolerance_change=1e-14, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            value = objective(best, whole[rows], y, cost, loss)
            value.backward()
            return value

        optimizer.step(closure)
        assert found <= objective(best, whole[rows], y, cost, loss) * (1 + 1e-3), (loss, c)


def test_any_number_of_threads_finds_the_same_weights(same_for_any_threads):
    x, of_parent, of_child, first_child = problem(rows=200, parents=9, children=21)
    same_for_any_threads(lambda: train(x, of_parent, of_child, first_child))


def test_threshold_and_max_weights_drop_the_smallest_weights():
    x, of_parent, of_child, first_child = problem()
    whole = dense(train(x, of_parent, of_child, first_child), first_child, x.shape[1])
    some = dense(train(x, of_parent, of_child, first_child, threshold=0.1), first_child, x.shape[1])
    assert torch.equal(some, torch.where(whole.abs() >= 0.1, whole,
                                         0.0)) and 0 < (some != 0).sum() < (whole != 0).sum()
    few = dense(train(x, of_parent, of_child, first_child, max_weights=5), first_child, x.shape[1])
    assert ((few != 0).sum(1) == 5).all()
    torch.testing.assert_close(few.abs().sum(1), whole.abs().topk(5).values.sum(1))


def test_max_weights_holds_when_many_weights_are_equal():
    x, of_parent, of_child, first_child = problem(density=0.3)
    x = sp.hstack([x, x, x], format="csr")
    x.sort_indices()
    free = dense(train(x, of_parent, of_child, first_child), first_child, x.shape[1])
    kept = dense(train(x, of_parent, of_child, first_child, max_weights=7), first_child, x.shape[1])
    assert ((kept != 0).sum(1) == 7).all()
    for whole, some in zip(free, kept):
        assert torch.equal(
            some[some != 0],
            whole[some != 0]) and some[some != 0].abs().min() >= whole[some == 0].abs().max()


def test_logistic_classifiers_with_large_margins_converge():
    x, of_parent, of_child, first_child = problem(rows=30, density=0.5)
    costs = dict(positive_cost=10.0, negative_cost=10.0)
    layer = train(x * np.float32(60), of_parent, of_child, first_child, loss="logistic",
                  tolerance=0.01, **costs)
    assert layer[5][1] == 0
    weight = dense(layer, first_child, x.shape[1])
    whole = torch.cat([torch.from_numpy(x.toarray()) * 60, torch.ones(30, 1)], 1)
    assert (whole @ weight.T).abs().max() > 18


def test_training_does_not_stop_at_equal_nonzero_gradients():
    """A sweep in which all gradients are near -1 has not converged.

    One row shares a feature with each of ninety others and is visited last.
    """
    x = sp.csr_matrix(
        np.hstack([np.ones((91, 1)),
                   np.vstack([np.zeros((1, 90)), 30 * np.eye(90)])]).astype(np.float32))

    def loss(tolerance, seed):
        layer = train(x, [np.arange(91)], [np.arange(91)], torch.tensor([0, 1]), bias=0.0,
                      tolerance=tolerance, seed=seed)
        assert layer[5][1] == 0
        weight = dense(layer, torch.tensor([0, 1]), x.shape[1])[0, :-1]
        return objective(weight, torch.from_numpy(x.toarray()), torch.ones(91), 1.0,
                         "squared_hinge")

    for seed in (6, 59, 149):
        assert loss(0.1, seed) < 1.05 * loss(1e-5, seed)


def test_empty_parents_children_and_rows():
    x, *_ = problem()
    empty = np.zeros(0, int)
    layer = train(x, [np.arange(60), empty, empty],
                  [np.arange(4), empty, np.arange(3)], torch.tensor([0, 2, 2, 3]))
    weight = dense(layer, torch.tensor([0, 2, 2, 3]), x.shape[1])
    # the last child has no rows of its parent
    assert weight[0].abs().sum() > 0 and weight[2].abs().sum() == 0
    assert train(sp.csr_matrix((0, 5), dtype=np.float32), [empty], [empty],
                 torch.tensor([0, 1]))[4].numel() == 0


def test_a_parent_with_more_than_256_children():
    x, *_ = problem(rows=300)
    first_child = torch.tensor([0, 300])
    layer = train(x, [np.arange(300)], [np.array([c]) for c in range(300)], first_child)
    assert layer[3].dtype == torch.int32 and layer[3].max() == 299
    scores = torch.from_numpy(x.toarray()) @ dense(
        layer, first_child, x.shape[1])[:, :-1].t() + dense(layer, first_child, x.shape[1])[:, -1]
    assert (scores.argmax(1) == torch.arange(300)).double().mean() > 0.9


def model(x, layers, labels, bias=1.0):
    return torch.classes.xsoftmax.XRLinear(x.shape[1], bias, "l3-hinge", labels,
                                           [[first, *layer[:5]] for first, layer in layers])


TRANSFORMS = {
    "identity": lambda z: z, "sigmoid": torch.sigmoid, "l3-hinge": lambda z:
    (-(1 - z).clamp(min=0)**3).exp(), "l1-hinge": lambda z: (-(1 - z).clamp(min=0)).exp(),
    "log-sigmoid": torch.nn.functional.logsigmoid,
    "log-l2-hinge": lambda z: -(1 - z).clamp(min=0)**2
}


def two_layers():
    x, of_parent, of_child, first_child = problem(parents=4, children=6)
    top = torch.tensor([0, 4])
    layers = [(top, train(x, [np.arange(60)], of_parent, top)),
              (first_child, train(x, of_parent, of_child, first_child))]
    return x, layers, torch.randperm(24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("combiner", ["multiply", "add", "last"])
@pytest.mark.parametrize("where", ["sparse", "dense", "both"])
def test_search_with_a_wide_beam_equals_dense_products(transform, combiner, where):
    x, layers, labels = two_layers()
    whole = torch.cat([torch.from_numpy(x.toarray()), torch.ones(60, 1)], 1)
    z = [
        TRANSFORMS[transform](whole @ dense(layer, first, x.shape[1]).t())
        for first, layer in layers
    ]
    above = z[0].repeat_interleave(6, 1)
    scores = {"multiply": above * z[1], "add": above + z[1], "last": z[1]}[combiner]
    want, order = scores.sort(dim=1, descending=True, stable=True)
    cut = {"sparse": x.shape[1], "dense": 0, "both": 25}[where]
    block = None if where == "sparse" else torch.from_numpy(x[:, cut:].toarray())
    got = model(x, layers,
                labels).predict(*rows_of(x[:, :cut].tocsr()), block, 0 if block is None else cut,
                                24, 4, transform, combiner, None)
    assert got[0].tolist() == list(range(0, 61 * 24, 24))
    torch.testing.assert_close(got[2].view(60, 24), want, rtol=1e-4, atol=1e-5)
    ours = scores.gather(1, torch.argsort(labels)[got[1].view(60, 24)])
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


def test_a_narrow_beam_returns_only_children_of_the_best_parents():
    """Beam 1 returns only children of the best parent, `only` restricts labels, and a single query
    gives the answers of a batch."""
    x, layers, labels = two_layers()
    found = model(x, layers, labels)
    offsets, columns, values = rows_of(x)
    whole = torch.cat([torch.from_numpy(x.toarray()), torch.ones(60, 1)], 1)
    best = (whole @ dense(layers[0][1], layers[0][0], x.shape[1]).t()).argmax(1)
    batch = found.predict(offsets, columns, values, None, 0, 9, 1, "sigmoid", "multiply", None)
    assert batch[0].tolist() == list(range(0, 61 * 6, 6))
    for q in range(60):
        one = slice(int(offsets[q]), int(offsets[q + 1]))
        single = found.predict(torch.tensor([0, one.stop - one.start]), columns[one], values[one],
                               None, 0, 9, 1, "sigmoid", "multiply", None)
        assert torch.equal(single[1], batch[1][6 * q:6 * q + 6]) and torch.equal(
            single[2], batch[2][6 * q:6 * q + 6])
        assert sorted(single[1].tolist()) == sorted(labels[6 * best[q]:6 * best[q] + 6].tolist())
    only = torch.tensor([3, 17])
    few = found.predict(offsets, columns, values, None, 0, 9, 4, "sigmoid", "multiply", only)
    assert few[0].tolist() == list(range(0, 61 * 2, 2)) and set(few[1].tolist()) == {3, 17}
    assert found.predict(torch.zeros(1, dtype=torch.int64), columns[:0], values[:0], None, 0, 9, 4,
                         "sigmoid", "multiply", None)[1].numel() == 0


def test_a_scripted_and_saved_model_gives_the_same_answers(tmp_path):
    class Answers(torch.nn.Module):
        def __init__(self, found):
            super().__init__()
            self.model = found

        def forward(self, offsets: torch.Tensor, columns: torch.Tensor,
                    values: torch.Tensor) -> torch.Tensor:
            return self.model.predict(offsets, columns, values, None, 0, 3, 2, "l3-hinge",
                                      "multiply", None)[1]

    x, layers, labels = two_layers()
    answers = Answers(model(x, layers, labels))
    torch.jit.save(torch.jit.script(answers), tmp_path / "answers.pt")
    assert torch.equal(torch.jit.load(tmp_path / "answers.pt")(*rows_of(x)), answers(*rows_of(x)))


X, PARENTS, CHILDREN, FIRST = problem()
BAD = [
    (dict(loss="huber"), ValueError,
     "expected loss as squared_hinge, hinge or logistic, got huber"),
    (dict(tolerance=0.0), ValueError, "expected tolerance as a finite number above 0"),
    (dict(positive_cost=-1.0), ValueError, "expected positive_cost"),
    (dict(sweeps=0), ValueError, "sweeps of at least 1"),
    (dict(threshold=-0.1), ValueError, "threshold as a finite number"),
    (dict(max_weights=0), ValueError, "max_weights of at least 1 or none, got 0"),
    (dict(bias=float("nan")), ValueError, "bias as a finite number"),
    (dict(negative_cost=1e-50), ValueError, "expected negative_cost"),
    (dict(cost=1.0), ValueError, "expected options among loss, bias"),
    (dict(sweeps=2.5), ValueError, "expected option sweeps as an integer"),
]


@pytest.mark.parametrize("options, error, message", BAD)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match="linear_layers_train: .*" + message):
        train(X, PARENTS, CHILDREN, FIRST, **options)


def test_wrong_tensors_are_refused():
    offsets, columns, values = rows_of(X)
    parent, child = lists(PARENTS), lists(CHILDREN)

    def call(rows=(offsets, columns, values), features=40, first=FIRST, parent=parent, child=child,
             costs=None, initial=(), options=""):
        return ops.linear_layers_train(rows, features, [first], parent, child,
                                       [] if costs is None else [costs], initial, [options])

    call()
    with pytest.raises(ValueError, match="linear_layers_train: expected rows as 3 tensors"):
        ops.linear_layers_train([], 5, [], [], [], [], [], [])
    for change, error, message in (
        (dict(features=30), IndexError, r"columns in \[0, 30\), got"),
        (dict(rows=(offsets[:-1], columns, values)), ValueError, "offsets that end"),
        (dict(rows=(offsets, columns.flip(0), values)), ValueError, "columns that rise in each "
         "list"),
        (dict(rows=(offsets, columns - 1, values)), IndexError, r"columns in \[0, 40\), got -1"),
        (dict(rows=(offsets, columns.long(), values)), TypeError, "columns of dtype int32"),
        (dict(rows=(offsets, columns, values * float("nan"))), ValueError, "values that are "
         "finite, got nan"),
        (dict(first=FIRST[:-1]), ValueError, "parent_offsets with size 3"),
        (dict(first=FIRST + 1), ValueError, r"first_child\[0\] to be 0"),
        (dict(parent=(parent[0], parent[1] + 1)), IndexError, r"parent_rows in \[0, 60\), got 60"),
        (dict(rows=(offsets, columns)), ValueError, "rows as 3 tensors, offsets, columns and "
         "values, got 2"),
        (dict(parent=parent[:1]), ValueError, "parents as 2 tensors"),
        (dict(child=(*child, child[0])), ValueError, "labels as 2 tensors"),
        (dict(initial=(FIRST,)), ValueError, "initial as 6 tensors"),
        (dict(initial=(FIRST + 1, *call()[:5])), ValueError, "a layer with this first_child"),
        (dict(costs=torch.ones(3)), ValueError, "label_costs with size"),
        (dict(costs=-torch.ones(len(child[1]))), ValueError, "not below 0"),
        (dict(costs=torch.full((len(child[1]),), 1e38), options="positive_cost=10"), ValueError,
         r"positive_cost times label_costs as finite numbers, got 10 times 1e\+38"),
        (dict(first=FIRST.to("meta")), TypeError, "first_child on the CPU, got meta"),
    ):
        with pytest.raises(error, match=message):
            call(**change)


@pytest.mark.parametrize("half", [False, True])
def test_layers_trained_together_equal_layers_trained_alone(half):
    """Layers of 1, 3 and 48 parents, some with several groups, with a cost for each label, in one
    pool, for one and several threads."""
    layers = [
        problem(seed=seed, parents=parents, children=children)[1:]
        for seed, (parents, children) in enumerate([(1, 3), (3, 120), (48, 5)])
    ]
    costs = [1 + torch.rand(sum(map(len, layer[1]))) for layer in layers]
    options = dict(seed=7, half=half, threshold=1e-4)
    alone = [train(X, *layer, cost, **options) for layer, cost in zip(layers, costs)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 5):
            torch.set_num_threads(count)
            *parts, tasks = ops.linear_layers_train(
                rows_of(X), X.shape[1], [layer[2] for layer in layers],
                [part for layer in layers for part in lists(layer[0])],
                [part for layer in layers
                 for part in lists(layer[1])], costs, [], [option_text(**(OPTIONS | options))] * 3)
            assert all(
                torch.equal(part, one)
                for part, one in zip(parts, (one for layer in alone for one in layer)))
            assert sorted(set(tasks[:, 0].tolist())) == [0, 1, 2] and (tasks[:, 3] > 0).all()
            assert tasks[:, 0].diff().min() >= 0  # in the order of layers
    finally:
        torch.set_num_threads(threads)


def test_an_error_of_a_shared_parent_is_raised_on_several_threads():
    """The tasks of a parent with 500 children share its rows. Weights too small for float16 raise
    an error, and the next call works."""
    x, *layer = problem(rows=200, parents=1, children=500)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        with pytest.raises(ValueError, match="for float16"):
            train(x * 1e6, *layer, threshold=0.0, bias=0.0, half=True)
        tasks = ops.linear_layers_train(rows_of(x), x.shape[1], [layer[2]], lists(layer[0]),
                                        lists(layer[1]), [], [], [option_text(**OPTIONS)])[-1]
    finally:
        torch.set_num_threads(threads)
    assert len(tasks) > 5


def test_weights_of_float16_are_those_of_float32_rounded():
    layer, half = train(X, PARENTS, CHILDREN, FIRST), train(X, PARENTS, CHILDREN, FIRST,
                                                            threshold=1e-4, half=True)
    same = train(X, PARENTS, CHILDREN, FIRST, threshold=1e-4)
    assert half[4].dtype == torch.float16 and layer[4].dtype == torch.float32
    assert torch.equal(half[4], same[4].half())
    assert all(torch.equal(one, other) for one, other in zip(half[:4], same[:4]))
    with pytest.raises(
            ValueError, match="linear_layers_train: expected weights of absolute value in "
            r"\[6.1e-05, 65504\] for float16, got .*; raise threshold"):
        train(X * 1e6, PARENTS, CHILDREN, FIRST, threshold=0.0, bias=0.0, half=True)


def test_rows_of_nodes_are_those_of_a_dense_matrix():
    """Checks the union of two matrices with enough pairs for several threads, and costs of one."""
    random = np.random.default_rng(0)
    first, second = (sp.random(3000, 90, 0.4, format="csr", dtype=np.float32, random_state=seed)
                     for seed in (1, 2))
    nodes = [torch.from_numpy(random.integers(0, 50, 90).astype(np.int32)) for _ in range(2)]
    paired = np.zeros((3000, 50), np.float32)
    for matrix, node in zip((first, second), nodes):
        for column in range(90):
            paired[:, node[column]] = np.maximum(paired[:, node[column]],
                                                 matrix[:, [column]].toarray()[:, 0])
    matrices = [rows_of(matrix) for matrix in (first, second)]
    offsets, rows, costs = ops.node_rows([part[0] for part in matrices],
                                         [part[1] for part in matrices], nodes, 50)
    want_node, want_row = paired.T.nonzero()
    assert rows.tolist() == want_row.tolist() and len(costs) == 0
    assert offsets.diff().tolist() == np.bincount(want_node, minlength=50).tolist()
    alone = np.zeros((3000, 50), np.float32)
    for column in range(90):
        np.maximum(alone[:, nodes[0][column]], first[:, [column]].toarray()[:, 0],
                   out=alone[:, nodes[0][column]])
    _, _, costs = ops.node_rows([matrices[0][0]], [matrices[0][1]], nodes[:1], 50, matrices[0][2])
    assert np.array_equal(costs.numpy(), alone.T[alone.T > 0])


def test_wrong_rows_of_nodes_are_refused():
    offsets, columns, values = rows_of(X)
    nodes = torch.zeros(40, dtype=torch.int32)
    for arguments, error, message in (
        (([], [], [], 1), ValueError, "at least one matrix, got 0, 0 and 0"),
        (([offsets], [columns], [nodes + 1], 1), IndexError, r"nodes in \[0, 1\), got 1"),
        (([offsets], [columns + 1], [nodes], 1), IndexError, r"columns in \[0, 40\), got 40"),
        (([offsets], [columns], [nodes.long()], 1), TypeError, "nodes of dtype int32"),
        (([offsets, offsets[:-1]], [columns, columns[:int(offsets[-2])]], [nodes] * 2, 1),
         ValueError, "those of the first matrix"),
        (([offsets] * 2, [columns] * 2, [nodes] * 2, 1, values), ValueError,
         "costs with one matrix, got 2"),
        (([offsets], [columns], [nodes], 1, values[1:]), ValueError, "costs with size"),
        (([offsets], [columns], [nodes], -1), ValueError, r"num_nodes in \[0, 2\^31 - 1\), got -1"),
        (([offsets], [columns], [nodes], 2**62), ValueError, "num_nodes in"),
    ):
        with pytest.raises(error, match="node_rows: .*" + message):
            ops.node_rows(*arguments)


def test_a_broken_model_and_wrong_queries_are_refused():
    x, layers, labels = two_layers()
    with pytest.raises((ValueError, IndexError), match="labels with size 24"):
        model(x, layers, labels[1:])
    for part, change, message in ((1, lambda t: t + 1, "chunk"), (2, lambda t: t.flip(0),
                                                                  "feature to rise"),
                                  (3, lambda t: t + 1, "more"), (4, lambda t: t + 200, "child in"),
                                  (5, lambda t: t * float("inf"), "value with finite")):
        broken = [
            layers[0],
            (layers[1][0],
             tuple(change(t) if i == part - 1 else t for i, t in enumerate(layers[1][1])))
        ]
        with pytest.raises((ValueError, IndexError), match=message):
            model(x, broken, labels)
    good, (offsets, columns, values) = model(x, layers, labels), rows_of(x)
    for arguments, message in (((offsets, columns + 40, values, None, 0, 5, 5, "identity", "add",
                                 None), "columns in"), ((offsets, columns, values, None, 0, -1, 5,
                                                         "identity", "add", None),
                                                        "topk of at least 0"),
                               ((offsets, columns, values, None, 0, 5, 0, "identity", "add", None),
                                "beam of at least 1"), ((offsets, columns, values, None, 0, 5, 5,
                                                         "l7-hinge", "add", None),
                                                        "expected transform as"),
                               ((offsets, columns, values, None, 0, 5, 5, "identity", "mean", None),
                                "expected combiner as"), ((offsets, columns, values,
                                                           torch.zeros(60, 3), 9, 5, 5, "identity",
                                                           "add", None), "add up to 40"),
                               ((offsets, columns, values, None, 0, 5, 5, "identity", "add",
                                 torch.tensor([24])), r"only in \[0, 24\)")):
        with pytest.raises((ValueError, IndexError), match=message):
            good.predict(*arguments)
