#pragma once

#include <ATen/core/Tensor.h>

// Operators on whole tables of edges, and on a few small tensors, on any device. The first two are
// ATen calls, so autograd and compilers see through them. parent, first_child, node_class and
// class_node as in label_tree.h; layer_sizes as in tree_scores.h.

namespace xsoftmax {

/// Sums values of edges, [Q, E], along the path to each class: [Q, N]. `edges` may have any shape:
/// `dim` is the dimension of the edges.
at::Tensor tree_class_scores(const at::Tensor& edges, const at::Tensor& parent,
                             const at::Tensor& class_node, at::IntArrayRef layer_sizes,
                             int64_t dim = 1);

/// Returns the log-probability of each class, [Q, N], from scores of edges [Q, E]: a softmax over
/// the children of each node (see hierarchical_softmax.h).
at::Tensor hierarchical_log_prob(const at::Tensor& edges, const at::Tensor& parent,
                                 const at::Tensor& class_node, at::IntArrayRef layer_sizes);

/// Moves the mean of the rows of each node's children to the row of the edge above the node, from
/// the leaves up, in place. table: [E, D] or [E]. Sums along paths to leaves do not change.
void tree_balance_(const at::Tensor& table, const at::Tensor& first_child,
                   at::IntArrayRef layer_sizes);
void check_tree_balance(const at::Tensor& table, const at::Tensor& first_child,
                        at::IntArrayRef layer_sizes);
/// Checks that each layer but the first consists of the children of the layer above, in order.
/// first_child: contiguous, on the CPU.
void check_children(const at::Tensor& first_child, at::IntArrayRef layer_sizes);
void tree_balance_reference(const at::Tensor& table, const at::Tensor& first_child,
                            at::IntArrayRef layer_sizes);

/// Draws up to `count` classes without replacement, uniformly, from the best-scored subset of each
/// query, for a tree with one layer of subsets. Returns int64 [Q, count], padded with -1 if the
/// subset has fewer classes. seed: int64, 0-dim, on the device of scores; query q reads Philox
/// blocks (q, 0 .. 2). scores: [Q, subsets]; among equal scores the first is the best.
at::Tensor tree_routed_candidates(const at::Tensor& seed, const at::Tensor& scores,
                                  const at::Tensor& first_child, const at::Tensor& node_class,
                                  int64_t count);
void check_routed(const at::Tensor& seed, const at::Tensor& scores, const at::Tensor& first_child,
                  const at::Tensor& node_class, int64_t count);
/// Draws the same classes on any device, by calling the CPU kernel.
at::Tensor routed_candidates_reference(const at::Tensor& seed, const at::Tensor& scores,
                                       const at::Tensor& first_child, const at::Tensor& node_class,
                                       int64_t count);

} // namespace xsoftmax
