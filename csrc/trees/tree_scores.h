#pragma once

#include "scores/row_gradient.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <utility>

namespace xsoftmax {

// tree_scores(input, weight, bias, parent, nodes, layer_sizes, differences_only, sparse_grad) -> scores [Q, P]: sums along paths of a tree
// (Han et al., 2018, Algorithm 2), an edge scored once a query however many of its paths share it.
//
//     edges = F.linear(input, weight, bias)                                                     # edge e ends in node e + 1
//     scores[q, p] = sum(edges[q, v - 1] for v on the path from below the root to nodes[q, p])    # the root itself: 0
//
// input [Q, D]; weight [E, D] and bias [E] or none; nodes [Q, P] int64 in [0, E]; parent [E + 1] as in label_tree.h; layer_sizes: how many
// nodes each layer below the root has, from the top. differences_only: for losses that take the scores of a query only by their
// differences. The edges on all of its P paths are then left out of all its scores: they would have no gradient (Proposition 1).
//
// scores in float32 or float64. Backward: grad_input [Q, D] and a row-sparse gradient of the edges over
// R = sum(min(Q P, size) for size in layer_sizes) rows: the edges that are touched, once each, then the last again with zeros.
at::Tensor tree_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& parent,
                       const at::Tensor& nodes, at::IntArrayRef layer_sizes, bool differences_only, std::optional<bool> sparse_grad);

/// A tensor of a tree: one dimension of `size`, int64, on input's device.
void check_nodes(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& input, const c10::SymInt& size);
/// Of at least 1 each, with the sum `edges`.
/// Returns the children [begin, end) of `node` in a tree of `nodes`, whose table may be from anybody's state dict.
/// Searches call it for each node that they come to; their composites, which read all nodes, check_all_children.
inline std::pair<int64_t, int64_t> children_of(const char* op, const int64_t* first_child, int64_t node, int64_t nodes) {
  const int64_t begin = first_child[node], end = first_child[node + 1];
  TORCH_CHECK_VALUE(begin > node && begin <= end && end <= nodes, op, ": expected first_child to rise from above node ", node, " to at most ", nodes, ", got ",
                    begin, " and ", end);
  return {begin, end};
}
/// Returns the node above `node`, which is not the root, and refuses one that does not come before it.
inline int64_t parent_of(const char* op, const int64_t* parent, int64_t node) {
  TORCH_CHECK_VALUE(parent[node] >= 0 && parent[node] < node, op, ": expected the parent of node ", node, " in [0, ", node, "), got ", parent[node]);
  return parent[node];
}
/// children_of for all nodes, of a table that is copied from a device.
void check_all_children(const char* op, const at::Tensor& first_child);
/// The node above each node, [V], 0 of the root: in range whatever first_child [V + 1] holds. Does not wait.
at::Tensor parents_of(const at::Tensor& first_child);
void check_layer_sizes(const char* op, at::IntArrayRef layer_sizes, const c10::SymInt& edges);
/// Shared by every kernel of the op and of its backward.
void check_tree_scores(const char* op, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& parent,
                       const at::Tensor& nodes, at::IntArrayRef layer_sizes);
void check_tree_scores_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& parent, const at::Tensor& nodes,
                                at::IntArrayRef layer_sizes);

/// R above for `paths` = Q P.
c10::SymInt edge_rows(const c10::SymInt& paths, at::IntArrayRef layer_sizes);

/// The scores of all edges, [Q, E] in opmath dtype, in ATen calls.
at::Tensor all_edge_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
/// The row-sparse gradient over `row_count` rows in ATen calls, for coefficients [Q, C] of edges [Q, C], -1 where there is none.
RowGradients compact_edge_gradient(const at::Tensor& edges, const at::Tensor& coefficient, const at::Tensor& input, const at::Tensor& weight, int64_t row_count,
                                   std::array<bool, 3> output_mask);

/// The composites in ATen calls: any device, and the oracle of the tests.
at::Tensor tree_scores_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& parent,
                                 const at::Tensor& nodes, at::IntArrayRef layer_sizes, bool differences_only, std::optional<bool> sparse_grad);
RowGradients tree_scores_backward_reference(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& parent,
                                            const at::Tensor& nodes, at::IntArrayRef layer_sizes, bool differences_only, std::array<bool, 3> output_mask);

} // namespace xsoftmax
