"""Bytes of the kernels of label trees and of top-k, for test_bytes.py."""

import torch

import xsoftmax as xs
from byte_case import Case, case, ops

QUERIES, DIM = 32, 128
ROW = DIM * 4


def tree_of(classes: int, branching: int):
    """Returns a balanced tree, and edges and queries in float32."""
    torch.manual_seed(0)
    tree = xs.LabelTree.balanced(classes, branching)
    return tree, torch.randn(tree.num_edges, DIM), torch.randn(QUERIES, DIM)


@case
def paths_of_a_tree():
    """All siblings of the nodes of a path are scored, and read again for the gradient. Children of
    one node are neighbours in the table."""
    tree, edges, input = tree_of(4096, 16)
    nodes = tree.class_node[torch.randperm(4096)[:QUERIES]]
    sizes, groups = tree.layer_sizes, tree.group_sizes
    siblings, scored, node = sum(groups), 0, nodes
    for count in reversed(groups):
        node = tree.parent[node]
        scored += node.unique().numel() * count
    results = QUERIES * (4 + ROW + siblings * 4)
    return Case(
        lambda: ops.hierarchical_softmax_forward(input, edges, None, tree.first_child, tree.parent,
                                                 nodes, sizes, groups, [True, True]),
        "hierarchical_softmax_kernel", memory=scored * ROW + QUERIES * ROW + results,
        blocks=QUERIES * siblings * ROW + QUERIES * ROW + results,
        shape=f"Q {QUERIES}, 4,096 classes in 3 layers, D {DIM}, float32")


@case
def beam_of_a_tree():
    """A beam of all nodes: each edge is scored."""
    tree, edges, input = tree_of(64, 8)
    results = QUERIES * 64 * (4 + 8)
    return Case(
        lambda: ops.beam_search(input, edges, None, tree.first_child, tree.node_class, 64,
                                "identity"), "beam_search_kernel",
        memory=edges.nbytes + input.nbytes + results,
        blocks=QUERIES * edges.nbytes + input.nbytes + results,
        shape=f"Q {QUERIES}, beam of 64, all of 64 classes in 2 layers, D {DIM}, float32")


@case
def largest_logits():
    """Products are read, and a key of eight bytes is written for each."""
    torch.manual_seed(0)
    input, weight = torch.randn(QUERIES, DIM), torch.randn(4096, DIM)
    return Case(lambda: ops.linear_topk(input, weight, None, 5), "fold_logits_kernel",
                memory=QUERIES * 4096 * (4 + 8), shape=f"Q {QUERIES}, N 4,096, float32")
