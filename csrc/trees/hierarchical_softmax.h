#pragma once

#include "scores/row_gradient.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <tuple>

namespace xsoftmax {

// hierarchical_softmax(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes, sparse_grad) -> loss [Q]: minus the
// log-probability of the way from the root of a tree to a node, a softmax over the children of each node on it (Morin and Bengio, 2005). Users
// call hierarchical_softmax_loss (tree_losses.h).
//
//     edges = F.linear(input, weight, bias)                                             # edge e ends in node e + 1
//     loss[q] = sum(logsumexp(edges[q, siblings of v - 1]) - edges[q, v - 1] for v on the path from below the root to nodes[q])
//
// input [Q, D]; weight [E, D] and bias [E] or none; first_child [E + 2] and parent [E + 1] as in label_tree.h; nodes [Q] int64 in [0, E],
// the root has a loss of 0; layer_sizes and group_sizes: of each layer below the root, how many nodes it has, and the largest number of
// children of one node.
//
// loss in float32 or float64. Backward: grad_input [Q, D] and a row-sparse gradient of the edges over R = sum(min(Q group, size)) rows: the
// edges that are touched, once each, then the last again with zeros. The gradients are made with the loss, where they are wanted.
at::Tensor hierarchical_softmax(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                                const at::Tensor& parent, const at::Tensor& nodes, at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                                std::optional<bool> sparse_grad);

// hierarchical_topk(input, weight, bias, first_child, node_class, k) -> (log-probabilities, classes) [Q, k]: the k most probable classes,
// best first, by a best-first search from the root: exact, since no class is more probable than the nodes above it. Of equal ones those of
// lower leaf; -inf and -1 behind the last of fewer than k. A query that meets a NaN or +inf has NaN at classes 0 .. k - 1. No gradient.
using HierarchicalTopk = std::tuple<at::Tensor, at::Tensor>;
HierarchicalTopk hierarchical_topk(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                                   const at::Tensor& node_class, c10::SymInt k);

/// loss [Q], grad_input [Q, D], grad_edges [Q, sum of group_sizes]: for each layer the siblings on the way, zeros behind them; both for a
/// gradient of 1 for each loss, of size 0 where not wanted. All in opmath dtype.
using HierarchicalState = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Shared by every kernel.
void check_hierarchical(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                        const at::Tensor& parent, const at::Tensor& nodes, at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes);
void check_hierarchical_topk(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                             const at::Tensor& node_class, const c10::SymInt& k);
void check_hierarchical_backward(const at::Tensor& scale, const at::Tensor& grad_edges, const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& first_child, const at::Tensor& parent, const at::Tensor& nodes, at::IntArrayRef layer_sizes,
                                 at::IntArrayRef group_sizes);
c10::SymInt sibling_rows(const c10::SymInt& queries, at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes);

/// The composites in ATen calls: any device, and the oracle of the tests. output_mask: grad_input, grad_edges.
HierarchicalState hierarchical_softmax_forward_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                                         const at::Tensor& first_child, const at::Tensor& parent, const at::Tensor& nodes,
                                                         at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, std::array<bool, 2> output_mask);
/// The row gradient, without that of input; scale [Q]: of each loss. output_mask: input (never), weight, bias.
RowGradients hierarchical_softmax_backward_reference(const at::Tensor& scale, const at::Tensor& grad_edges, const at::Tensor& input, const at::Tensor& weight,
                                                     const at::Tensor& first_child, const at::Tensor& parent, const at::Tensor& nodes,
                                                     at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, std::array<bool, 3> output_mask);
HierarchicalTopk hierarchical_topk_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                             const at::Tensor& first_child, const at::Tensor& node_class, c10::SymInt k);

} // namespace xsoftmax
