"""Trees and problems for the tests of trees."""

import torch
from hypothesis import strategies as st

from xsoftmax import LabelTree

TREES = {
    "balanced": LabelTree.balanced(200, 4),
    "flat": LabelTree.from_parents([-1] + [0] * 30),
    "huffman": LabelTree.huffman(torch.arange(1, 60).double()**3),
    "chain": LabelTree.from_parents([-1, 0, 1, 2, 3]),
    "one class": LabelTree.balanced(1),
    "equal mass": LabelTree.from_frequencies(torch.arange(1, 100), 7),
}


@st.composite
def parents_and_classes(draw):
    """Draws any tree: each node gets an earlier parent, then nodes are renumbered at random."""
    n = draw(st.integers(1, 30))
    parents = [-1] + [draw(st.integers(0, v - 1)) for v in range(1, n)]
    number = draw(st.permutations(range(n)))
    shuffled = [-1] * n
    for v, p in enumerate(parents):
        shuffled[number[v]] = -1 if p < 0 else number[p]
    leaf = [v for v in range(n) if v not in shuffled]
    classes = [-1] * n
    for v, c in zip(leaf, draw(st.permutations(range(len(leaf))))):
        classes[v] = c
    return shuffled, classes


def edge_problem(tree, Q=9, D=5, dtype=torch.float64, bias=True, seed=0, whole=False):
    """Returns input, weight and bias for the edges of a tree; `whole`: small integers."""
    g = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randint(-2, 3, shape, generator=g).to(dtype) if whole else torch.randn(
            shape, generator=g).to(dtype)

    return values(Q, D), values(tree.num_edges, D), values(tree.num_edges) if bias else None
