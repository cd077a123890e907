#pragma once

#include <ATen/core/Tensor.h>

// What the modules do with whole tables of edges or with few small tensors, on any device. Autograd and compilers see through the first two,
// which are ATen calls. parent, first_child, node_class, class_node as in label_tree.h; layer_sizes as in tree_scores.h.

namespace xsoftmax {

/// Something of each edge, [Q, E], summed along the path to each class: [Q, N]. dim: which dimension of `edges` is theirs; any of any tensor.
at::Tensor tree_class_scores(const at::Tensor& edges, const at::Tensor& parent, const at::Tensor& class_node, at::IntArrayRef layer_sizes, int64_t dim = 1);

/// The log-probability of each class, [Q, N], for scores of edges [Q, E]: a softmax over the children of each node (see
/// hierarchical_softmax.h).
at::Tensor hierarchical_log_prob(const at::Tensor& edges, const at::Tensor& parent, const at::Tensor& class_node, at::IntArrayRef layer_sizes);

/// Moves the mean of the rows of a node's children to the row of the edge above it, from the leaves up: table [E, D] or [E], in place. No
/// sum along a path to a leaf changes.
void tree_balance_(const at::Tensor& table, const at::Tensor& first_child, at::IntArrayRef layer_sizes);
void check_tree_balance(const at::Tensor& table, const at::Tensor& first_child, at::IntArrayRef layer_sizes);
/// That each layer but the first is the children of the layer above, in its order. first_child: contiguous, on the CPU.
void check_children(const at::Tensor& first_child, at::IntArrayRef layer_sizes);
void tree_balance_reference(const at::Tensor& table, const at::Tensor& first_child, at::IntArrayRef layer_sizes);

/// Of a tree of one layer of subsets, up to `count` classes of the subset of the best score, a uniform set of them without repeats: int64
/// [Q, count], -1 where it has fewer. seed int64, 0-dim, on the device of scores; query q reads Philox blocks (q, 0 .. 2). scores [Q, subsets],
/// the first of equal ones the best.
at::Tensor tree_routed_candidates(const at::Tensor& seed, const at::Tensor& scores, const at::Tensor& first_child, const at::Tensor& node_class, int64_t count);
void check_routed(const at::Tensor& seed, const at::Tensor& scores, const at::Tensor& first_child, const at::Tensor& node_class, int64_t count);
/// The draws of the CPU, for any device.
at::Tensor routed_candidates_reference(const at::Tensor& seed, const at::Tensor& scores, const at::Tensor& first_child, const at::Tensor& node_class,
                                       int64_t count);

} // namespace xsoftmax
