#pragma once

#include "table/row_gradient.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <utility>

namespace xsoftmax {

// tree_scores(input, weight, bias, parent, nodes, layer_sizes, differences_only, sparse_grad) ->
// scores [Q, P]: returns sums along paths of a tree (Han et al., 2018, Algorithm 2). An edge is
// scored once per query, however many of the query's paths share it.
//
//     edges = F.linear(input, weight, bias)           # edge e ends in node e + 1
//     scores[q, p] = sum(edges[q, v - 1]
//                        for v on the path from below the root to nodes[q, p])    # root: 0
//
// input [Q, D]; weight [E, D] and bias [E] or none; nodes [Q, P] int64 in [0, E]; parent [E + 1] as
// in label_tree.h; layer_sizes: the number of nodes in each layer below the root, from the top.
// differences_only: set it for losses that depend only on differences between the scores of a
// query. Edges on all P paths of a query are then left out of its scores: their gradient would be
// zero (Proposition 1).
//
// scores in float32 or float64. Backward: grad_input [Q, D] and a row-sparse gradient of the edges
// over R = sum(min(Q P, size) for size in layer_sizes) rows: each touched edge once, then the last
// one repeated with zeros.
at::Tensor tree_scores(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, const at::Tensor& parent,
                       const at::Tensor& nodes, at::IntArrayRef layer_sizes, bool differences_only,
                       std::optional<bool> sparse_grad);

/// Checks a tensor of a tree: int64, one dimension of `size`, on input's device.
void check_nodes(const char* op, const char* name, const at::Tensor& tensor,
                 const at::Tensor& input, const c10::SymInt& size);
/// Returns the children [begin, end) of `node` in a tree of `nodes` nodes. Throws ValueError for a
/// bad range, because the table may come from an untrusted state dict. Searches call this for each
/// node they visit; their composites, which read all nodes, call check_all_children.
inline std::pair<int64_t, int64_t> children_of(const char* op, const int64_t* first_child,
                                               int64_t node, int64_t nodes) {
  const int64_t begin = first_child[node], end = first_child[node + 1];
  TORCH_CHECK_VALUE(begin > node && begin <= end && end <= nodes, op,
                    ": expected first_child to rise from above node ", node, " to at most ", nodes,
                    ", got ", begin, " and ", end);
  return {begin, end};
}
/// Returns the parent of `node`, which is not the root. Throws ValueError if the parent does not
/// come before the node.
inline int64_t parent_of(const char* op, const int64_t* parent, int64_t node) {
  TORCH_CHECK_VALUE(parent[node] >= 0 && parent[node] < node, op, ": expected the parent of node ",
                    node, " in [0, ", node, "), got ", parent[node]);
  return parent[node];
}
/// Checks children_of for all nodes of a table, which is copied from its device.
void check_all_children(const char* op, const at::Tensor& first_child);
/// Returns the parent of each node, [V], and 0 for the root. The result is in range whatever
/// first_child [V + 1] holds. Does not synchronise with the device.
at::Tensor parents_of(const at::Tensor& first_child);
void check_layer_sizes(const char* op, at::IntArrayRef layer_sizes, const c10::SymInt& edges);
/// Check the arguments; shared by all kernels of the operator and of its backward.
void check_tree_scores(const char* op, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, const at::Tensor& parent,
                       const at::Tensor& nodes, at::IntArrayRef layer_sizes);
void check_tree_scores_backward(const at::Tensor& grad, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& parent,
                                const at::Tensor& nodes, at::IntArrayRef layer_sizes);

/// Returns R above for `paths` = Q P.
c10::SymInt edge_rows(const c10::SymInt& paths, at::IntArrayRef layer_sizes);

/// Returns the scores of all edges, [Q, E] in the opmath dtype, in ATen calls.
at::Tensor all_edge_scores(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias);
/// Returns the row-sparse gradient over `row_count` rows, in ATen calls. edges [Q, C]: -1 where
/// there is none; coefficient [Q, C].
RowGradients compact_edge_gradient(const at::Tensor& edges, const at::Tensor& coefficient,
                                   const at::Tensor& input, const at::Tensor& weight,
                                   int64_t row_count, std::array<bool, 3> output_mask);

/// Composites in ATen calls: run on any device, test oracle.
at::Tensor tree_scores_reference(const at::Tensor& input, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias, const at::Tensor& parent,
                                 const at::Tensor& nodes, at::IntArrayRef layer_sizes,
                                 bool differences_only, std::optional<bool> sparse_grad);
RowGradients tree_scores_backward_reference(const at::Tensor& grad, const at::Tensor& input,
                                            const at::Tensor& weight, const at::Tensor& parent,
                                            const at::Tensor& nodes, at::IntArrayRef layer_sizes,
                                            bool differences_only, std::array<bool, 3> output_mask);

} // namespace xsoftmax
