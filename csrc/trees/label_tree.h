#pragma once

#include "core/optional.h"

#include <cstdint>
#include <string_view>
#include <tuple>

// Trees whose leaves are the classes, as int64 tensors. What makes one works on the CPU, whatever device its arguments are on.

namespace xsoftmax {

// label_tree(parents [V], classes [V] or none) -> (first_child [V + 1], parent [V], node_class [V], class_node [N]): a tree in any numbering of its
// nodes, checked, and renumbered breadth-first, so that the root is node 0 and the children of a node stand together.
//
// parents: the parent of each node, -1 for the root. classes: the class of each leaf, -1 for every other node; the leaves are the classes
// 0 .. N - 1, each once; none: in the order of their nodes. Siblings keep their order. Node v has the children first_child[v] .. first_child[v + 1] - 1; parent
// is -1 for the root; node_class is -1 for inner nodes; class_node says at which leaf a class is. One node alone is a tree of one class.
using LabelTreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
LabelTreeTensors label_tree(const at::Tensor& parents, const OptionalTensor& classes = std::nullopt);

/// What label_tree makes, as operators take it: `Tensor[] tree`.
struct TreeTables {
  at::Tensor first_child, parent, node_class, class_node;
  TreeTables(const char* op, at::TensorList tables);
};

// check_label_tree(tree): that these are tables which label_tree made. ValueError, TypeError.
void check_label_tree(at::TensorList tree);

// label_tree_layers(first_child) -> int64 [2, layers]: of each layer below the root how many nodes it has, and the most children of one node
// of the layer above.
at::Tensor label_tree_layers(const at::Tensor& first_child);

// label_tree_path(class_node, parent, ids [*], depth) -> [*, depth]: the nodes from below the root to each class, -1 behind the leaf. depth: as many
// layers as the tree has below its root.
at::Tensor label_tree_path(const at::Tensor& class_node, const at::Tensor& parent, const at::Tensor& ids, int64_t depth);

// label_tree_nodes(class_node [N], target [*], ignore_index) -> nodes [*]: the leaf of each class, the root where target is ignore_index.
at::Tensor label_tree_nodes(const at::Tensor& class_node, const at::Tensor& target, int64_t ignore_index);

// Trees that label_tree takes: (parents [V], classes [V]).
using LabelTreeNodes = std::tuple<at::Tensor, at::Tensor>;

// label_tree_balanced(order [N], arity): the classes of `order`, a permutation, as leaves from left to right; every inner node cuts its own
// into at most `arity` parts whose sizes differ by at most 1. ceil(log_arity N) layers.
LabelTreeNodes label_tree_balanced(const at::Tensor& order, int64_t arity);

// label_tree_huffman(counts [N], arity): the least expected depth under frequencies counts, of any real dtype, finite, not below 0.
LabelTreeNodes label_tree_huffman(const at::Tensor& counts, int64_t arity);

// label_tree_equal_mass(counts [N], subsets): one layer of subsets with nearly the same sum of counts, below them the classes by falling
// count. 1 <= subsets <= N.
LabelTreeNodes label_tree_equal_mass(const at::Tensor& counts, int64_t subsets);

// label_tree_kmeans_order(seed, rows [N, D], arity, iterations) -> order [N]: the rows as recursive K-means with `arity` clusters lays them
// from left to right: near rows near each other. seed as in kmeans; rows floating and finite. The same for any number of threads.
at::Tensor label_tree_kmeans_order(const at::Tensor& seed, const at::Tensor& rows, int64_t arity, int64_t iterations);

// label_tree_from_vectors(seed, vectors [N, D], options): label_tree_balanced of label_tree_kmeans_order, or, with max_leaf_size, what
// label_tree_clusters makes of the dense rows. options: TreeFromVectors (xsoftmax/trees.h).
LabelTreeNodes label_tree_from_vectors(const at::Tensor& seed, const at::Tensor& vectors, std::string_view options);

} // namespace xsoftmax
