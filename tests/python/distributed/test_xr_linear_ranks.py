"""XRLinear trained by the ranks of a process group equals one process bit for bit."""

import io
import os
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from ranks import needs_gloo, ranks
from xr_linear_checks import parts, problem, same, small
from xsoftmax.tools import cli

pytestmark = needs_gloo


def relevance_of(Y):
    weights = Y.copy()
    weights.data = np.random.default_rng(3).uniform(0.2, 2, Y.nnz).astype(np.float32)
    return weights


def near(Y):
    """Returns (example, label) pairs for user negatives."""
    random = np.random.default_rng(4)
    return sp.csr_matrix(
        (np.ones(200), (random.integers(0, Y.shape[0], 200), random.integers(0, Y.shape[1], 200))),
        shape=Y.shape)


def tree_of(Y):
    return xs.LabelTree.from_vectors(xs.label_vectors.pii(Y), 4,
                                     generator=torch.Generator().manual_seed(5), max_leaf_size=7)


CASES = {
    "tfn": {},
    "man": dict(negatives="man", beam=2),
    "tfn+man": dict(negatives="tfn+man", beam=2, max_weights=4),
    "of each layer": dict(negatives=["tfn", "man", "tfn+user", "tfn+man+user"],
                          user_negatives=near),
    "relevance": dict(relevance=relevance_of, loss="logistic", dtype=torch.float32),
    "hinge": dict(loss="hinge", bias=0.0, threshold=0.0),
    "initial": dict(initial=lambda Y: small(*problem(labels=90), tolerance=1.0), tolerance=0.01,
                    threshold=0.0, dtype=torch.float32),
    "a tree": dict(tree=tree_of),
}


def train(case, seed=0, group=None, **more):
    X, Y = problem(labels=90)
    options = {
        name: value(Y) if callable(value) else value
        for name, value in (CASES[case] | more).items()
    }
    return small(X, Y, group=group, **options) if seed == 0 else xs.XRLinear.train(
        X, Y, arity=3, max_leaf_size=5, generator=torch.Generator().manual_seed(seed), group=group,
        **options)


def figures(model):
    return [{name: value
             for name, value in layer.items() if "seconds" not in name} for layer in model.stats]


def of_rank(rank, size, case):
    # the seed of rank 0 is used
    model = train(case, seed=rank, group=torch.distributed.group.WORLD)
    return parts(model), figures(model), model.stats


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_model_equals_that_of_one_process(case, size):
    one = train(case)
    found = ranks(size).run(of_rank, size, case)
    for of_parts, of_figures, stats in found:
        assert same(of_parts, parts(one)) and [part.dtype for part in of_parts
                                               ] == [part.dtype for part in parts(one)]
        assert of_figures == figures(one) and stats == found[0][2]


def with_outliers(rank, group):
    """Trains a model in which only one rank has weights too small for float16."""
    X, Y = problem(labels=90)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = small(X, Y, threshold=0.0, tolerance=1e-3,
                      group=torch.distributed.group.WORLD if group else None)
    return [model.model.layer(depth)[-1] for depth in range(model.depth)]


def test_weights_have_one_dtype_on_all_ranks():
    one = with_outliers(0, False)
    assert {values.dtype for values in one} == {torch.float16, torch.float32}
    assert all(same(found, one) for found in ranks(2).run(with_outliers, True))


def refuses_float16(rank):
    X, Y = problem(labels=90)
    with pytest.raises((ValueError, RuntimeError), match="for float16, got") as caught:
        small(X, Y, threshold=0.0, tolerance=1e-3, dtype=torch.float16,
              group=torch.distributed.group.WORLD)
    return type(caught.value).__name__


def test_weights_beyond_float16_are_an_error_on_all_ranks():
    """On a rank that has such weights as in one process, on others with the number of that rank."""
    with pytest.raises(ValueError, match="for float16, got"):
        small(*problem(labels=90), threshold=0.0, tolerance=1e-3, dtype=torch.float16)
    assert "ValueError" in ranks(2).run(refuses_float16)


def disagrees(rank, what, words):
    X, Y = problem(labels=90)
    options = dict(arity=3, max_leaf_size=5, group=torch.distributed.group.WORLD)
    if what == "X":
        X.data[7] += 0.25 * rank
    elif what == "Y":
        Y = Y if rank == 0 else Y[:, ::-1].tocsr()
    elif what == "tree":
        options |= {
            "tree": xs.LabelTree.from_vectors(xs.label_vectors.pii(Y), 3, max_leaf_size=5 + rank)
        }
    elif what == "relevance":
        options |= {"relevance": Y * (1 + rank)}
    else:
        options |= {what: (2, 3)[rank]} if what in ("beam", "arity") else {what: (0.1, 0.2)[rank]}
    with pytest.raises(ValueError, match="XRLinear.train: expected the same on all ranks, got "
                       f"{words}"):
        xs.XRLinear.train(X, Y, **options)
    return True


@pytest.mark.parametrize(
    "what, words",
    [("X", r"X of \[300, 60\] \(digest \w+\) on rank 0 and \[300, 60\] \(digest \w+\) on rank 1"),
     ("Y", r"Y of .*digest"), ("relevance", "relevance of digest"), ("tree", "tree of digest"),
     ("arity", "tree of 2 children .* and 3 children"),
     ("beam", "beam of 2 on rank 0 and 3 on rank 1"),
     ("threshold", "threshold of 0.1 on rank 0 and "
      "0.2 on rank 1"), ("tolerance", "tolerance of 0.1 on rank 0 and 0.2 on rank 1")])
def test_different_arguments_raise_an_error_with_both_values(what, words):
    assert ranks(2).run(disagrees, what, words) == [True, True]


def fails_on_one(rank, where):
    X, Y = problem(labels=90)
    failing, options = 1, {}
    if where == "arguments" and rank == failing:
        options["loss"] = "squared"
    if where == "layer" and rank == failing:

        def stop(layer, *_):
            if layer == 2:
                raise MemoryError("no more")

        options["progress"] = stop
    start = time.perf_counter()
    with pytest.raises(Exception) as caught:
        small(X, Y, group=torch.distributed.group.WORLD, **options)
    return type(caught.value).__name__, str(caught.value), time.perf_counter() - start


@pytest.mark.parametrize("where, error", [("arguments", "ValueError"), ("layer", "MemoryError")])
def test_an_error_on_one_rank_ends_the_others_at_once(where, error):
    (others, text, seconds), (name, own, _), (_, third, _) = ranks(3).run(fails_on_one, where)
    # the time-out of the group is a minute
    assert (name, others) == (error, "RuntimeError") and seconds < 20
    assert text == third == f"XRLinear.train: rank 1 failed: {error}: {own}"
    # the group still works
    assert all(same(found, parts(train("tfn"))) for found, *_ in ranks(3).run(of_rank, 3, "tfn"))


def shows(rank):
    text, calls = io.StringIO(), []
    X, Y = problem(labels=90)
    stderr, sys.stderr = sys.stderr, text
    text.isatty = lambda: True
    try:
        small(X, Y, group=torch.distributed.group.WORLD, progress=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            small(X * 1e3, Y, group=torch.distributed.group.WORLD,
                  progress=lambda *state: calls.append(state))
    finally:
        sys.stderr = stderr
    return "layer 4 of 4" in text.getvalue(), sum(
        "threshold" in str(one.message) for one in caught) > 0, calls[-1][2] == calls[-1][3]


def test_only_rank_0_shows_progress_and_warnings():
    assert ranks(2).run(shows) == [(True, True, True), (False, False, True)]


def by_group(rank, kind):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    group = {"mesh": mesh, "group": mesh.get_group(), "grid": "cpu"}[kind]
    if kind == "grid":
        with pytest.raises(
                TypeError, match="XRLinear.train: expected group to be a process group, "
                "a DeviceMesh or None, got str"):
            train("tfn", group=group)
        return parts(train("tfn"))
    return parts(train("tfn", group=group))


@pytest.mark.parametrize("kind", ["mesh", "group", "grid"])
def test_group_may_be_a_process_group_or_a_mesh(kind):
    assert all(same(found, parts(train("tfn"))) for found in ranks(2).run(by_group, kind))


@pytest.mark.slow
def test_torchrun_trains_the_model_of_one_process(tmp_path):
    X, Y = problem(labels=90)
    sp.save_npz(tmp_path / "x.npz", X)
    sp.save_npz(tmp_path / "y.npz", Y)
    arguments = [
        "train",
        str(tmp_path / "x.npz"), "--labels",
        str(tmp_path / "y.npz"), "--arity", "3", "--max-leaf-size", "5", "--seed", "7"
    ]
    assert cli.main([*arguments, str(tmp_path / "one"), "--quiet"]) == 0
    ran = subprocess.run([
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "xsoftmax", *arguments,
        str(tmp_path / "two")
    ], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    one, two = xs.XRLinear.load(tmp_path / "one"), xs.XRLinear.load(tmp_path / "two")
    assert same(parts(one), parts(two)) and figures(one) == figures(two)
    assert ran.stdout.strip() == repr(one)  # printed once


def tree_tables(rank, size, arity, leaf):
    vectors = sp.random(201, 40, 0.15, format="csr", dtype=np.float32, random_state=2)
    group = None if size == 1 else torch.distributed.group.WORLD
    tree = xs.LabelTree.from_vectors(vectors, arity, generator=torch.Generator().manual_seed(rank),
                                     max_leaf_size=leaf, group=group)
    return tree.tables()


def test_a_process_group_ends_when_it_is_destroyed():
    """A group that is still referenced keeps threads, which may abort the process at its end."""
    code = """if True:
        import gc, os
        import scipy.sparse, torch, xsoftmax
        def threads():
            return len(os.listdir("/proc/self/task"))
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(),
                                             rank=0, world_size=1)
        before = threads()
        vectors = scipy.sparse.random(40, 9, 0.5, format="csr", dtype="float32", random_state=1)
        xsoftmax.LabelTree.from_vectors(vectors, 4, max_leaf_size=5,
                                        group=torch.distributed.group.WORLD)
        xsoftmax.distributed.shard_classes(xsoftmax.LinearCrossEntropyLoss(4, 9))
        xsoftmax.distributed.replicate(xsoftmax.LinearCrossEntropyLoss(4, 9))
        torch.distributed.destroy_process_group()
        gc.collect()
        assert threads() < before, [threads(), before]
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("arity, leaf", [(2, 1), (3, 4), (16, 10), (5, 300), (2, 120)])
def test_a_tree_built_by_ranks_equals_that_of_one_process(size, arity, leaf):
    one = tree_tables(0, 1, arity, leaf)
    assert all(same(found, one) for found in ranks(size).run(tree_tables, size, arity, leaf))


def refused_trees(rank):
    vectors, group = sp.random(50, 9, 0.5, format="csr", dtype=np.float32,
                               random_state=0), torch.distributed.group.WORLD
    with pytest.raises(
            TypeError, match="LabelTree.from_vectors: expected max_leaf_size and a "
            "scipy sparse matrix with group, got Tensor"):
        xs.LabelTree.from_vectors(torch.from_numpy(vectors.toarray()), 3, max_leaf_size=4,
                                  group=group)
    with pytest.raises(ValueError, match=r"got vectors of \[50, 9\] \(digest \w+\) on rank 0 and "
                       r"\[50, 9\]"):
        xs.LabelTree.from_vectors(vectors * np.float32(1 + rank), 3, max_leaf_size=4, group=group)
    with pytest.raises(ValueError, match="expected arity of at least 2, got 1"):
        xs.LabelTree.from_vectors(vectors, 1, max_leaf_size=4, group=group)
    return True


def test_trees_that_ranks_cannot_build_together_are_refused():
    assert ranks(2).run(refused_trees) == [True, True]


def test_a_layer_trained_in_parts_equals_the_whole_layer():
    """linear_layers_train on ranges of parents, concatenated, equals one call, order of visits
    included; one parent has many children."""
    random = np.random.default_rng(0)
    rows = sp.random(60, 30, 0.3, format="csr", dtype=np.float32, random_state=1)
    examples = torch.from_numpy(rows.indptr).long(), torch.from_numpy(
        rows.indices), torch.from_numpy(rows.data)
    first_child = torch.tensor([0, 3, 3, 20, 300, 304])

    def lists(count):
        each = [
            np.sort(random.choice(60, random.integers(0, 40), replace=False)) for _ in range(count)
        ]
        return torch.tensor([0, *np.cumsum([len(one) for one in each])
                             ]), torch.from_numpy(np.concatenate(each).astype(np.int32))

    parents, labels = lists(5), lists(304)

    def made(first, last):
        return torch.ops.xsoftmax.linear_layers_train(
            examples, 30, [first_child], parents, labels, [], [],
            [f"threshold=0,seed=3,first_parent={first},last_parent={last}"])

    whole = made(0, "none")
    assert whole[2].dtype == torch.int32  # a parent has more than 256 children
    for cuts in ([0, 1, 2, 3, 4, 5], [0, 0, 3, 5, 5]):
        found = [made(first, last) for first, last in zip(cuts, cuts[1:])]
        assert torch.equal(torch.cat([one[0].diff() for one in found]), whole[0].diff())
        assert all(same([torch.cat([one[i] for one in found])], [whole[i]]) for i in range(1, 5))
        assert torch.equal(torch.stack([one[5] for one in found]).sum(0), whole[5])
    for first, last in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(
                ValueError, match="expected 0 <= first_parent <= last_parent <= 5, the "
                f"parents, got {first} and {last}"):
            made(first, last)
