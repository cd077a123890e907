"""LabelTree: every constructor, against plain Python."""

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xsoftmax as xs
from tree_checks import parents_and_classes
from xsoftmax import LabelTree


def check(tree):
    """The buffers agree with each other and with the documentation of the class."""
    first, parent, node_class, class_node = (t.tolist() for t in (tree.first_child, tree.parent,
                                                                  tree.node_class, tree.class_node))
    nodes = len(parent)
    assert len(first) == nodes + 1 and first[0] == 1 and first[-1] == nodes and parent[0] == -1
    depth = [0] * nodes
    for v in range(nodes):
        children = range(first[v], first[v + 1])
        assert all(parent[child] == v for child in children)
        assert (node_class[v] >= 0) == (len(children) == 0)
        depth[v] = depth[parent[v]] + 1 if v else 0
    assert depth == sorted(depth)  # breadth-first
    assert sorted(c for c in node_class if c >= 0) == list(range(tree.num_classes))
    assert all(node_class[v] == c for c, v in enumerate(class_node))
    assert tree.num_nodes == nodes == tree.num_edges + 1 and tree.depth == max(depth)
    assert tree.arity == max(first[v + 1] - first[v] for v in range(nodes))
    return depth


def path(tree, class_id):
    node, nodes = int(tree.class_node[class_id]), []
    while node != 0:
        nodes.append(node)
        node = int(tree.parent[node])
    return nodes[::-1]


def leaves(tree):
    """Classes from left to right."""
    open_, found = [0], []
    while open_:
        v = open_.pop()
        found += [int(tree.node_class[v])] if tree.node_class[v] >= 0 else []
        open_ += range(int(tree.first_child[v + 1]) - 1, int(tree.first_child[v]) - 1, -1)
    return found


@given(parents_and_classes())
def test_from_parents(nodes):
    parents, classes = nodes
    tree = LabelTree.from_parents(parents, classes)
    check(tree)

    # The classes below each node determine the tree.
    def below(parent, class_of):
        sets = [set() for _ in parent]
        for v, c in enumerate(class_of):
            node = v
            while c >= 0 and node >= 0:
                sets[node].add(c)
                node = parent[node]
        return sorted(sorted(s) for s in sets)

    assert below(parents, classes) == below(tree.parent.tolist(), tree.node_class.tolist())


@given(parents_and_classes())
def test_path(nodes):
    tree = LabelTree.from_parents(*nodes)
    ids = torch.arange(tree.num_classes).repeat(2).view(2, -1)
    for module in (tree, torch.jit.script(tree)):
        paths = module.path(ids)
        assert paths.shape == (2, tree.num_classes, tree.depth)
        for c in range(tree.num_classes):
            want = path(tree, c)
            assert paths[1, c].tolist() == want + [-1] * (tree.depth - len(want))


def test_siblings_and_classes_keep_their_order():
    tree = LabelTree.from_parents([3, 3, 0, -1, 0])
    check(tree)
    assert tree.node_class.tolist() == [-1, -1, 0, 1, 2] and leaves(tree) == [1, 2, 0]


def test_from_nested():
    tree = LabelTree.from_nested([[0, 3], [1, [2, 4]], 5])
    check(tree)
    assert leaves(tree) == [0, 3, 1, 2, 4, 5] and tree.depth == 3 and tree.arity == 3
    assert LabelTree.from_nested([0]).depth == 1 and LabelTree.from_nested(0).depth == 0


@pytest.mark.parametrize("arity", [2, 3, 10])
@pytest.mark.parametrize("n", [1, 2, 3, 9, 10, 11, 100, 101, 1000])
def test_balanced(n, arity):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    tree = LabelTree.balanced(order, arity)
    depth = check(tree)
    assert leaves(tree) == order.tolist() and tree.arity <= arity
    layers = next(d for d in itertools.count() if arity**d >= n)
    at = [depth[int(v)] for v in tree.class_node]
    assert tree.depth == layers and min(at) >= layers - 1
    assert leaves(LabelTree.balanced(n, arity)) == list(range(n))


def test_random():
    trees = [LabelTree.random(50, 4, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert leaves(trees[0]) == leaves(trees[1]) != leaves(trees[2])


@pytest.mark.parametrize("arity", [2, 3, 5])
@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_huffman_is_optimal(arity, counts):
    """The cost is that of the textbook algorithm, padded with empty classes."""
    tree = LabelTree.huffman(torch.tensor(counts), arity)
    depth = check(tree)
    heap = list(map(float, counts))
    while len(heap) > 1 and (len(heap) - 1) % (arity - 1):
        heap.append(0.0)
    heapq.heapify(heap)
    best = 0.0
    while len(heap) > 1:
        joined = sum(heapq.heappop(heap) for _ in range(arity))
        best += joined
        heapq.heappush(heap, joined)
    assert sum(c * depth[int(tree.class_node[i])] for i, c in enumerate(counts)) == best


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_from_frequencies(counts, data):
    subsets = data.draw(st.integers(1, len(counts)))
    tree = LabelTree.from_frequencies(torch.tensor(counts), subsets)
    check(tree)
    assert tree.depth == 2 and int(tree.first_child[1]) == 1 + subsets
    got = [counts[c] for c in leaves(tree)]
    assert got == sorted(counts, reverse=True)
    sums = [
        sum(counts[c]
            for c in tree.node_class[int(tree.first_child[v]):int(tree.first_child[v +
                                                                                   1])].tolist())
        for v in range(1, subsets + 1)
    ]
    # A subset of several classes starts and ends within half a class of the ideal place.
    goal, rest = sum(counts) / subsets, max(counts)
    ends = list(itertools.accumulate(sums))
    sizes = tree.first_child.diff()[1:subsets + 1].tolist()
    if max(counts) <= goal and min(sizes[:-1], default=2) > 1:
        assert all(abs(end - goal * (s + 1)) <= rest / 2 + 1e-9 for s, end in enumerate(ends))


def clusters(per_cluster, num_clusters, width=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(num_clusters).repeat(per_cluster)
    centres = torch.randn(num_clusters, width, generator=generator)[label] * 20
    return (centres + torch.randn(len(label), width, generator=generator)).to(dtype), label


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_cluster", [8, 1000])
def test_from_vectors_puts_near_classes_together(per_cluster, dtype):
    """For clusters far apart, neighbours are of one cluster except at its ends."""
    vectors, label = clusters(per_cluster, 8, dtype=dtype)
    tree = LabelTree.from_vectors(vectors, 8, generator=torch.Generator().manual_seed(0))
    check(tree)
    order = label[leaves(tree)]
    assert (order[1:] != order[:-1]).sum() == 7


def test_from_vectors_is_the_same_for_any_number_of_threads(same_for_any_threads):
    vectors, _ = clusters(1500, 4)
    same_for_any_threads(
        lambda:
        [LabelTree.from_vectors(vectors, 5, generator=torch.Generator().manual_seed(1)).node_class])


@pytest.mark.parametrize("vectors", [
    torch.ones(5000, 3),
    torch.zeros(30, 0),
    torch.randn(1, 4),
    torch.arange(300.0)[:, None].square()
], ids=["all alike", "no columns", "one", "a line"])
def test_from_vectors_of_odd_shapes(vectors):
    tree = LabelTree.from_vectors(vectors, 3)
    check(tree)
    assert sorted(leaves(tree)) == list(range(len(vectors)))


def test_save_load(tmp_path):
    tree = LabelTree.random(30, 3)
    tree.save(tmp_path / "tree.pt")
    loaded = LabelTree.load(tmp_path / "tree.pt")
    for name, buffer in tree.state_dict().items():
        assert torch.equal(buffer, loaded.state_dict()[name])
    assert repr(loaded) == repr(tree) == "LabelTree(num_classes=30, num_nodes=46, depth=4, arity=3)"
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    for name, content in (("text.pt", b"some text"), ("empty.pt", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
                ValueError, match="LabelTree.load: expected a file of LabelTree.save, "
                f"got another one, or a part of one: .*{name}"):
            LabelTree.load(tmp_path / name)
    torch.save(tree.state_dict() | {"first_child": tree.first_child + 1}, tmp_path / "other.pt")
    with pytest.raises(
            ValueError, match="LabelTree.load: expected a tree, got tables that "
            "contradict each other"):
        LabelTree.load(tmp_path / "other.pt")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(
            ValueError, match=r"LabelTree.load: expected a file of LabelTree.save, got "
            r"another one: .*other.pt"):
        LabelTree.load(tmp_path / "other.pt")


def test_load_state_dict_of_another_tree():
    """With as many nodes and classes, but deeper."""
    tree, other = LabelTree.from_nested([[0, 1, 2], [3, 4]]), LabelTree.from_nested([[0, [1, 2]], 3,
                                                                                     4])
    tree.load_state_dict(other.state_dict())
    check(tree)
    assert torch.equal(tree.path(torch.arange(5)), other.path(torch.arange(5)))


def test_plot(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    tree = LabelTree.from_nested([[0, 3], [1, [2, 4]], 5])
    axes = tree.plot([f"class {c}" for c in range(6)])
    texts = {text.get_text(): text.xy for text in axes.texts}
    # from left to right, by depth
    assert texts["class 0"] == (0.0, -2) and texts["class 5"] == (5.0, -1)
    axes.figure.savefig(tmp_path / "tree.png")
    with pytest.raises(ValueError, match="expected a tree of at most 500 nodes, got 1111"):
        LabelTree.balanced(1000).plot()
    with pytest.raises(ValueError, match="expected names of 6 classes, got 2"):
        tree.plot(["a", "b"])


@pytest.mark.parametrize("make, error, message", [
    (lambda: LabelTree.from_parents([-1, -1]), ValueError, r"label_tree: expected one root \(a "
     r"parent of -1\), got nodes 0 and 1"),
    (lambda: LabelTree.from_parents([1, 0]), ValueError, r"expected one root \(a parent of -1\), "
     r"got none"),
    (lambda: LabelTree.from_parents([-1, 0, 3, 2]), ValueError,
     "expected every node below the root, got node 2, whose parents form a cycle"),
    (lambda: LabelTree.from_parents([-1, 0, 7]), ValueError, r"expected parents in \[-1, 3\), got "
     r"7 for node 2"),
    (lambda: LabelTree.from_parents([]), ValueError, "expected parents of at least one node, got "
     "none"),
    (lambda: LabelTree.from_parents([-1, 0.5]), TypeError, "label_tree: expected parents of dtype "
     "int64, got float32"),
    (lambda: LabelTree.from_parents([-1, 0, 0], [-1, 0, 0]), ValueError, "expected each class "
     "once, got class 0 twice, "
     "at nodes 1 and 2"),
    (lambda: LabelTree.from_parents([-1, 0, 0], [0, 1, 2]), ValueError,
     "expected classes of leaves only, got 0 for node 0, which has children"),
    (lambda: LabelTree.from_parents([-1, 0, 0], [-1, 0, -1]), ValueError,
     "expected a class for every leaf, got -1 for node 2, which has no children"),
    (lambda: LabelTree.from_parents([-1, 0, 0], [-1, 0, 2]), ValueError,
     "expected the classes 0 to 1, one for each of 2 leaves, got class 2"),
    (lambda: LabelTree.from_parents([-1, 0, 0], [-1, 0]), ValueError,
     r"expected classes with size 3 \(the nodes of parents\) in dimension 0, got shape \[2\]"),
    (lambda: LabelTree.from_nested([0, []]), ValueError, "expected lists that hold something, got "
     "an empty one"),
    (lambda: LabelTree.from_nested([0, -1]), ValueError, "expected classes in"),
    (lambda: LabelTree.from_nested([0, "a"]), TypeError, "expected lists and ints, got str"),
    (lambda: LabelTree.balanced([0, 1, 1]), ValueError, "expected each class once, got class 1 "
     "twice"),
    (lambda: LabelTree.balanced(0), ValueError, "expected the number of classes of at least 1, got "
     "0"),
    (lambda: LabelTree.random(10, 1), ValueError, "label_tree_balanced: expected arity of at least "
     "2, got 1"),
    (lambda: LabelTree.huffman(torch.tensor([1.0, -1.0])), ValueError,
     "expected counts that are finite and not below 0, got -1 for class 1"),
    (lambda: LabelTree.huffman(torch.ones(0)), ValueError, "expected counts of at least one class, "
     "got none"),
    (lambda: LabelTree.from_frequencies(torch.ones(3), 4), ValueError, r"expected subsets in \[1, "
     r"3\], got 4"),
    (lambda: LabelTree.from_frequencies(torch.ones(2, 2), 1), ValueError, "counts"),
    (lambda: LabelTree.from_vectors(torch.ones(3)), ValueError, r"expected vectors with 2 "
     r"dimensions, got shape \[3\]"),
    (lambda: LabelTree.from_vectors(torch.ones(3, 2).long(), max_leaf_size=2), TypeError,
     "expected vectors of dtype float32.* got int64"),
    (lambda: LabelTree.from_vectors(torch.ones(3, 2).to_sparse()), TypeError, "expected vectors as "
     "a dense .* tensor, "
     "got layout Sparse"),
    (lambda: LabelTree.from_vectors(torch.full((3, 2), float("nan"))), ValueError,
     "expected rows that are finite, got an infinity or NaN"),
    (lambda: LabelTree.from_vectors(torch.ones(0, 2)), ValueError, "expected rows of at least one "
     "class, got none"),
])
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_tree_is_a_module():
    """Its buffers are in the state dict of the module that contains it, and move with that
    module."""
    holder = torch.nn.Module()
    holder.tree = LabelTree.balanced(7, 2)
    assert set(holder.state_dict()) == {
        f"tree.{name}"
        for name in ("first_child", "parent", "node_class", "class_node")
    }
    assert holder.double().tree.parent.dtype == torch.int64 and holder.to(
        "meta").tree.parent.is_meta
    assert xs.LabelTree is LabelTree


def test_a_malformed_state_dict_is_refused():
    """The tree stays unchanged."""
    tree = LabelTree.random(50, 4)
    before = {name: table.clone() for name, table in tree.state_dict().items()}
    for name, at, value in (("parent", 5, 60), ("parent", -1, 0), ("first_child", 2,
                                                                   int(tree.first_child[2]) + 1),
                            ("node_class", -1,
                             int(tree.node_class[-2])), ("class_node", 0, int(tree.class_node[1]))):
        state = {key: table.clone() for key, table in before.items()}
        state[name][at] = value
        with pytest.raises(RuntimeError, match=r"LabelTree: expected .* to hold a tree, got"):
            tree.load_state_dict(state)
        assert all(torch.equal(table, before[key]) for key, table in tree.state_dict().items())


def cyclic():
    nested = [0]
    nested.append(nested)
    return nested


@pytest.mark.parametrize("call, error, message", [
    (lambda: LabelTree.balanced(5, 2.5), TypeError, "LabelTree.balanced: expected arity of type "
     "int, got float"),
    (lambda: LabelTree.huffman([1, 2], 2.0), TypeError, "LabelTree.huffman: expected arity of type "
     "int, got float"),
    (lambda: LabelTree.from_frequencies([1, 2], 1.5), TypeError, "LabelTree.from_frequencies: "
     "expected subsets of type int, "
     "got float"),
    (lambda: LabelTree.from_parents("abc"), TypeError, "LabelTree.from_parents: expected parents "
     "as int64 numbers, got str"),
    (lambda: LabelTree.from_parents(None), TypeError, "LabelTree.from_parents: expected parents as "
     "int64 numbers, got NoneType"),
    (lambda: LabelTree.from_nested([0, 10**30]), ValueError, "LabelTree.from_nested: expected "
     "classes in"),
    (lambda: LabelTree.from_nested(cyclic()), ValueError, "LabelTree.from_nested: expected each "
     "list in one place"),
    (lambda: LabelTree.random("a"), TypeError, "LabelTree.random: expected the number of classes "
     "of type int|num_classes of type int"),
    (lambda: LabelTree.from_vectors([[1.0, 2.0]]), TypeError, "LabelTree.from_vectors: expected "
     "vectors as a tensor, .* got list"),
    (lambda: LabelTree.balanced(9, 3).path(torch.tensor([9])), IndexError, r"expected target in "
     r"\[0, 9\)"),
    (lambda: LabelTree.balanced(9, 3).path(torch.tensor([-1])), IndexError, r"expected target in "
     r"\[0, 9\)"),
])
def test_more_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- clusters of sparse vectors


def sparse_vectors(n, features=60, density=0.1, seed=0):
    import scipy.sparse as sp

    return sp.random(n, features, density, format="csr", dtype=np.float32,
                     random_state=np.random.default_rng(seed))


@pytest.mark.parametrize("n, arity, leaf", [(1, 2, 1), (5, 2, 1), (100, 16, 100), (101, 16, 100),
                                            (1000, 16, 10), (333, 3, 7), (257, 2, 4)])
def test_clusters_have_their_shape(n, arity, leaf):
    """Every class once, on the last layer; at most `arity` children above clusters of at most
    `leaf`, all of nearly equal size; few layers."""
    tree = LabelTree.from_vectors(sparse_vectors(n), arity, max_leaf_size=leaf)
    assert tree.num_classes == n and sorted(tree.node_class[tree.node_class >= 0].tolist()) == list(
        range(n))
    clusters = -(-n // leaf)
    layers = 1
    while arity**(layers - 1) < clusters:
        layers += 1
    assert tree.depth == (layers if clusters > 1 else 1)
    assert tree.layer_sizes[-1] == n and (tree.depth == 1 or tree.layer_sizes[-2] == clusters)
    children = tree.first_child.diff()
    inner = children[(tree.node_class < 0) & (children > 0)]
    above = tree.num_nodes - n - (clusters if clusters > 1 else 1)
    assert (inner[:above]
            <= arity).all() and (inner[above:]
                                 <= leaf).all() and inner[above:].max() - inner[above:].min() <= 1


@pytest.mark.parametrize("spherical", [True, False])
def test_any_number_of_threads_builds_the_same_clusters(same_for_any_threads, spherical):
    vectors = sparse_vectors(3000, density=0.1)  # from 1,024 rows on, threads share a part
    options = dict(max_leaf_size=9, spherical=spherical)
    same_for_any_threads(lambda: [
        LabelTree.from_vectors(vectors, 4, generator=torch.Generator().manual_seed(3), **options).
        node_class
    ])


def test_clusters_match_those_of_the_vectors():
    """Eight directions with thirty noisy classes each, dense or sparse: no cluster mixes two."""
    random = np.random.default_rng(0)
    centre = np.repeat(np.eye(8, 20) * 5, 30, axis=0)
    vectors = (centre + random.normal(size=(240, 20)) * 0.3).astype(np.float32)
    import scipy.sparse as sp

    for form in (torch.from_numpy(vectors), sp.csr_matrix(vectors)):
        tree = LabelTree.from_vectors(form, 8, iterations=20,
                                      generator=torch.Generator().manual_seed(0), max_leaf_size=30)
        cluster = tree.parent[tree.class_node]
        pure = sum(
            len(set((torch.arange(240)[cluster == v] // 30).tolist())) == 1
            for v in cluster.unique())
        assert tree.layer_sizes == [8, 240] and pure >= 6  # 2-means may cut one direction in two


def test_bad_clusters():
    import scipy.sparse as sp

    vectors = sparse_vectors(20)
    for call, error, message in (
        (lambda: LabelTree.from_vectors(vectors, 1, max_leaf_size=3), ValueError,
         "arity of at least 2"),
        (lambda: LabelTree.from_vectors(vectors, 4, max_leaf_size=0), ValueError,
         "max_leaf_size of at least 1, got 0"),
        (lambda: LabelTree.from_vectors(vectors.tocoo(), 4), TypeError, "an array or, with "
         "max_leaf_size, a scipy "
         "sparse matrix, got coo"),
        (lambda: LabelTree.from_vectors(vectors * np.nan, 4, max_leaf_size=3), ValueError,
         "with finite numbers, got nan"),
        (lambda: LabelTree.from_vectors(sp.csr_matrix(
            (0, 4), dtype=np.float32), 4, max_leaf_size=3), ValueError, "vectors of 1 to"),
    ):
        with pytest.raises(error, match=message):
            call()
