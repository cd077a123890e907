"""Trees of clusters whose sizes follow the data: LabelTree.from_vectors(balanced=False)."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs


def groups(sizes, seed=0, width=24):
    """Returns vectors close to one centre per group, and the group of each."""
    random = np.random.default_rng(seed)
    centres = np.eye(width)[:len(sizes)]
    group = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    vectors = centres[group] + 0.05 * random.standard_normal((len(group), width))
    return sp.csr_matrix(
        (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)), group


def build(vectors, arity=4, max_leaf_size=10, seed=0, **options):
    return xs.LabelTree.from_vectors(vectors, arity, max_leaf_size=max_leaf_size, balanced=False,
                                     generator=torch.Generator().manual_seed(seed), **options)


def clusters(tree):
    """Returns the classes of each node above the leaves."""
    parents = tree.parent[tree.class_node]
    return [(parents == node).nonzero().flatten().tolist() for node in parents.unique()]


@pytest.mark.parametrize("spherical", [True, False])
@pytest.mark.parametrize("arity, max_leaf_size", [(2, 1), (4, 10), (16, 100), (3, 1000)])
def test_all_classes_are_on_the_last_layer_below_small_clusters(spherical, arity, max_leaf_size):
    vectors, _ = groups([5, 40, 100, 17, 60])
    tree = build(vectors, arity, max_leaf_size, spherical=spherical)
    found = clusters(tree)
    assert sorted(sum(found, [])) == list(range(222))
    assert max(map(len, found)) <= max_leaf_size
    inner = tree.num_nodes - 222
    assert (tree.node_class[:inner] == -1).all() and (tree.node_class[inner:] >= 0).all()
    assert tree.depth == len(tree.layer_sizes) and tree.layer_sizes[-1] == 222
    children = tree.first_child.diff()[:inner - len(found)]
    assert (children >= 1).all() and (children <= arity).all()


def test_a_group_stays_together_whatever_its_size():
    """Balanced clusters have to divide a group of 64 classes out of 120, unbalanced ones do not."""
    vectors, group = groups([64, 32, 8, 16])
    parts = {
        balanced: sum(
            sum(
                bool((group[some] == 0).any()) for some in clusters(
                    xs.LabelTree.from_vectors(vectors, 2, 20, max_leaf_size=64, balanced=balanced,
                                              generator=torch.Generator().manual_seed(seed))))
            for seed in range(5))
        for balanced in (True, False)
    }
    assert parts[True] == 10 and parts[False] <= 7


def test_any_number_of_threads_builds_the_same_tree():
    vectors, _ = groups([300, 20, 700, 45])
    threads, made = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            made.append(build(vectors, seed=3))
    finally:
        torch.set_num_threads(threads)
    assert all(
        torch.equal(one, other) for tree in made[1:]
        for one, other in zip(tree.tables(), made[0].tables()))


def test_equal_vectors_and_single_classes():
    same = sp.csr_matrix(np.ones((50, 3), np.float32))
    assert max(map(len, clusters(build(same, 2, 4)))) <= 4
    zeros = sp.csr_matrix((50, 3), dtype=np.float32)
    made = build(zeros, 2, 4, spherical=False)
    assert max(map(len, clusters(made))) <= 4 and made.depth == 5  # as if it were balanced
    assert build(same[:1]).num_classes == 1
    dense = build(torch.from_numpy(groups([30, 3])[0].toarray()))
    assert torch.equal(dense.parent, build(groups([30, 3])[0]).parent)


@pytest.mark.parametrize("negatives", ["tfn", "tfn+man"])
def test_models_train_on_such_a_tree(negatives):
    random = np.random.default_rng(0)
    vectors, group = groups([40, 10, 4, 6])
    rows = random.integers(0, 60, 800)
    X = vectors[rows]
    Y = sp.csr_matrix((np.ones(800, np.float32), (np.arange(800), rows)), shape=(800, 60))
    tree = build(xs.label_vectors.pifa(X, Y), 3, 6)
    model = xs.XRLinear.train(X, Y, tree=tree, negatives=negatives)
    assert model.depth == tree.depth
    found = model.predict(X, 1, 10)
    assert np.mean(group[found.indices] == group[rows]) > 0.95
    matcher = xs.HierarchicalMatcher(24, tree, beam=3)
    while matcher.next_layer():
        pass
    scores, labels = matcher.topk(torch.from_numpy(X[:5].toarray()), 3)
    assert (labels >= 0).all()


def test_wrong_options_are_refused():
    vectors, _ = groups([30, 3])
    with pytest.raises(TypeError, match="LabelTree.from_vectors: .*balanced"):
        xs.LabelTree.from_vectors(vectors, max_leaf_size=4, balanced="no")
    with pytest.raises(ValueError,
                       match="expected max_leaf_size of at least 1 with balanced=false"):
        xs.LabelTree.from_vectors(torch.from_numpy(vectors.toarray()), balanced=False)
    with pytest.raises(ValueError, match="arity of at least 2"):
        build(vectors, 1)
    with pytest.raises(ValueError, match="balanced tree, got balanced=false"):
        torch.ops.xsoftmax.label_tree_cuts(torch.tensor(0), [
            torch.from_numpy(vectors.indptr).long(),
            torch.from_numpy(vectors.indices),
            torch.from_numpy(vectors.data)
        ], 24, torch.arange(33, dtype=torch.int32), 0, 0, 2, "max_leaf_size=4,balanced=false")
