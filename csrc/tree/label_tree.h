#pragma once

#include "op/optional.h"

#include <cstdint>
#include <string_view>
#include <tuple>

// Trees whose leaves are the classes, stored as int64 tensors. Functions that build trees run on
// the CPU, whatever device their arguments are on.

namespace xsoftmax {

// label_tree(parents [V], classes [V] or none) -> (first_child [V + 1], parent [V], node_class [V],
// class_node [N]): checks a tree whose nodes are numbered in any order and renumbers them
// breadth-first, so that the root is node 0 and the children of a node are consecutive.
//
// parents: the parent of each node, -1 for the root. classes: the class of each leaf, -1 for every
// other node; each class 0 .. N - 1 occurs once. If none, leaves get classes in the order of their
// nodes. Siblings keep their order. The children of node v are first_child[v] .. first_child[v + 1]
// - 1; parent is -1 for the root; node_class is -1 for inner nodes; class_node is the leaf of each
// class. A single node is a tree of one class.
using LabelTreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
LabelTreeTensors label_tree(const at::Tensor& parents,
                            const OptionalTensor& classes = std::nullopt);

/// The result of label_tree as operators take it: `Tensor[] tree`.
struct TreeTables {
  at::Tensor first_child, parent, node_class, class_node;
  TreeTables(const char* op, at::TensorList tables);
};

// check_label_tree(tree): checks that label_tree could have made these tables. Throws ValueError or
// TypeError.
void check_label_tree(at::TensorList tree);

// label_tree_layers(first_child) -> int64 [2, layers]: returns, for each layer below the root, its
// number of nodes and the largest number of children of one node in the layer above.
at::Tensor label_tree_layers(const at::Tensor& first_child);

// label_tree_path(class_node, parent, ids [*], depth) -> [*, depth]: returns the nodes on the path
// to each class, without the root, padded with -1 after the leaf. depth: the number of layers below
// the root.
at::Tensor label_tree_path(const at::Tensor& class_node, const at::Tensor& parent,
                           const at::Tensor& ids, int64_t depth);

// label_tree_nodes(class_node [N], target [*], ignore_index) -> nodes [*]: returns the leaf of each
// class, or the root where target is ignore_index.
at::Tensor label_tree_nodes(const at::Tensor& class_node, const at::Tensor& target,
                            int64_t ignore_index);

// Arguments for label_tree: (parents [V], classes [V]).
using LabelTreeNodes = std::tuple<at::Tensor, at::Tensor>;

// label_tree_balanced(order [N], arity): builds a tree whose leaves, from left to right, are the
// classes in `order`, a permutation. Every inner node splits its classes into at most `arity` parts
// whose sizes differ by at most 1, which gives ceil(log_arity N) layers.
LabelTreeNodes label_tree_balanced(const at::Tensor& order, int64_t arity);

// label_tree_huffman(counts [N], arity): builds the tree with the smallest expected depth for the
// given frequencies. counts: any real dtype, finite, non-negative.
LabelTreeNodes label_tree_huffman(const at::Tensor& counts, int64_t arity);

// label_tree_equal_mass(counts [N], subsets): builds one layer of subsets with nearly equal sums of
// counts; below each subset, its classes by descending count. 1 <= subsets <= N.
LabelTreeNodes label_tree_equal_mass(const at::Tensor& counts, int64_t subsets);

// label_tree_kmeans_order(seed, rows [N, D], arity, iterations) -> order [N]: orders rows by
// recursive K-means with `arity` clusters, so that similar rows are close to each other. seed as in
// kmeans; rows floating and finite. The result does not depend on the number of threads.
at::Tensor label_tree_kmeans_order(const at::Tensor& seed, const at::Tensor& rows, int64_t arity,
                                   int64_t iterations);

// label_tree_from_vectors(seed, vectors [N, D], options): returns label_tree_balanced of
// label_tree_kmeans_order; if max_leaf_size is set, label_tree_clusters of the dense rows. options:
// TreeFromVectors (xsoftmax/trees.h).
LabelTreeNodes label_tree_from_vectors(const at::Tensor& seed, const at::Tensor& vectors,
                                       std::string_view options);

} // namespace xsoftmax
