"""Plots of label trees."""

from typing import Any, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection


def plot_tree(tree: Any, names: Optional[Sequence[str]], ax: Any) -> Any:
    """Implements LabelTree.plot."""
    if tree.num_nodes > 500:
        raise ValueError("LabelTree.plot: expected a tree of at most 500 nodes, got "
                         f"{tree.num_nodes}")
    if names is not None and len(names) != tree.num_classes:
        raise ValueError(f"LabelTree.plot: expected names of {tree.num_classes} classes, got "
                         f"{len(names)}")
    first, parent, classes = tree.first_child.tolist(), tree.parent.tolist(
    ), tree.node_class.tolist()
    depth = [0] * tree.num_nodes
    for v in range(1, tree.num_nodes):
        depth[v] = depth[parent[v]] + 1
    x, leaves, stack = [0.0] * tree.num_nodes, 0, [(0, False)]
    while stack:
        v, done = stack.pop()
        if done:
            x[v] = (x[first[v]] + x[first[v + 1] - 1]) / 2
        elif classes[v] >= 0:
            x[v], leaves = float(leaves), leaves + 1
        else:
            stack += [(v, True),
                      *((child, False) for child in reversed(range(first[v], first[v + 1])))]
    if ax is None:
        _, ax = plt.subplots(figsize=(max(4.0, 0.22 * leaves), 1.5 + 0.7 * tree.depth),
                             layout="constrained")
    ax.add_collection(
        LineCollection([[(x[parent[v]], -depth[parent[v]]), (x[v], -depth[v])]
                        for v in range(1, tree.num_nodes)], colors="0.6", linewidths=0.8))
    inner_nodes = [v for v in range(tree.num_nodes) if classes[v] < 0]
    ax.plot([x[v] for v in inner_nodes], [-depth[v] for v in inner_nodes], "o", color="0.3",
            markersize=3)
    for v in range(tree.num_nodes):
        if classes[v] >= 0:
            ax.annotate(str(classes[v] if names is None else names[classes[v]]), (x[v], -depth[v]),
                        ha="center", va="top", fontsize=7, rotation=0 if names is None else 90,
                        xytext=(0, -2), textcoords="offset points")
    ax.margins(0.02, 0.15)
    ax.set_axis_off()
    return ax
