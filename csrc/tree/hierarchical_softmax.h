#pragma once

#include "table/row_gradient.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <tuple>

namespace xsoftmax {

// hierarchical_softmax(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes,
// sparse_grad) -> loss [Q]: returns minus the log-probability of the path from the root of a tree
// to a node, with a softmax over the children of each node on the path (Morin and Bengio, 2005).
// Users call hierarchical_softmax_loss (tree_losses.h).
//
//     edges = F.linear(input, weight, bias)           # edge e ends in node e + 1
//     loss[q] = sum(logsumexp(edges[q, siblings of v - 1]) - edges[q, v - 1]
//                   for v on the path from below the root to nodes[q])
//
// input [Q, D]; weight [E, D] and bias [E] or none; first_child [E + 2] and parent [E + 1] as in
// label_tree.h; nodes [Q] int64 in [0, E], where the root has loss 0; layer_sizes and group_sizes:
// for each layer below the root, its number of nodes and the largest number of children of one
// parent.
//
// loss in float32 or float64. Backward: grad_input [Q, D] and a row-sparse gradient of the edges
// over R = sum(min(Q group, size)) rows: each touched edge once, then the last one repeated with
// zeros. If gradients are needed, the forward pass computes them together with the loss.
at::Tensor hierarchical_softmax(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias,
                                const at::Tensor& first_child, const at::Tensor& parent,
                                const at::Tensor& nodes, at::IntArrayRef layer_sizes,
                                at::IntArrayRef group_sizes, std::optional<bool> sparse_grad);

// hierarchical_topk(input, weight, bias, first_child, node_class, k) -> (log-probabilities,
// classes) [Q, k]: returns the k most probable classes, best first, by best-first search from the
// root. The search is exact, because no class is more probable than the nodes above it. Among equal
// ones the lower leaf comes first. With fewer than k classes, rows are padded with -inf and -1. A
// query that meets a NaN or +inf gets NaN at classes 0 .. k - 1. Not differentiable.
using HierarchicalTopk = std::tuple<at::Tensor, at::Tensor>;
HierarchicalTopk hierarchical_topk(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias,
                                   const at::Tensor& first_child, const at::Tensor& node_class,
                                   c10::SymInt k);

/// loss [Q]; grad_input [Q, D]; grad_edges [Q, sum of group_sizes], which holds for each layer the
/// siblings on the path, padded with zeros. Both gradients are for a loss gradient of 1 and have
/// size 0 if not wanted. All are in the opmath dtype.
using HierarchicalState = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Check the arguments; shared by all kernels.
void check_hierarchical(const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                        const at::Tensor& parent, const at::Tensor& nodes,
                        at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes);
void check_hierarchical_topk(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                             const at::Tensor& node_class, const c10::SymInt& k);
void check_hierarchical_backward(const at::Tensor& scale, const at::Tensor& grad_edges,
                                 const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& first_child, const at::Tensor& parent,
                                 const at::Tensor& nodes, at::IntArrayRef layer_sizes,
                                 at::IntArrayRef group_sizes);
c10::SymInt sibling_rows(const c10::SymInt& queries, at::IntArrayRef layer_sizes,
                         at::IntArrayRef group_sizes);

/// Composites in ATen calls: run on any device, test oracle. output_mask: grad_input, grad_edges.
HierarchicalState hierarchical_softmax_forward_reference(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& first_child, const at::Tensor& parent, const at::Tensor& nodes,
    at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, std::array<bool, 2> output_mask);
/// Returns the row-sparse gradient of the edges, without the gradient of input. scale [Q]: gradient
/// of each loss. output_mask: input (never), weight, bias.
RowGradients hierarchical_softmax_backward_reference(
    const at::Tensor& scale, const at::Tensor& grad_edges, const at::Tensor& input,
    const at::Tensor& weight, const at::Tensor& first_child, const at::Tensor& parent,
    const at::Tensor& nodes, at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
    std::array<bool, 3> output_mask);
HierarchicalTopk hierarchical_topk_reference(const at::Tensor& input, const at::Tensor& weight,
                                             const std::optional<at::Tensor>& bias,
                                             const at::Tensor& first_child,
                                             const at::Tensor& node_class, c10::SymInt k);

} // namespace xsoftmax
