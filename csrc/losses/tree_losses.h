#pragma once

#include "trees/label_tree.h"

#include <xsoftmax/candidates.h>
#include <xsoftmax/loss_options.h>
#include <xsoftmax/tree_losses.h>

#include <string_view>

namespace xsoftmax {

// Losses over a tree of classes, from the hidden state to the reduced loss. Of all of them: input [*, D]; target [*] int64 in [0, N) or
// ignore_index, whose queries have no loss and no gradient, whatever they hold; weight [E, D] and bias [E] or none, a row for each edge, edge e
// ends in node e + 1; tree and layer_sizes of label_tree and label_tree_layers; class_weight [N] of any floating dtype or none. The loss is a
// scalar, or [*] for reduction "none", in float32 or float64, reduced as torch.nn.CrossEntropyLoss does (losses/reduction.h).

// hierarchical_softmax_loss(input, weight, bias, target, tree, layer_sizes, group_sizes, class_weight, options) -> loss: the hierarchical softmax
// (Morin and Bengio, 2005) at the leaf of each target: hierarchical_softmax (hierarchical_softmax.h), whose gradients it has, reduced.
//
//     F.nll_loss(hierarchical_log_prob(F.linear(input, weight, bias)), target, class_weight, ...)
at::Tensor hierarchical_softmax_loss(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target,
                                     const TreeTables& tree, at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, const OptionalTensor& class_weight,
                                     const HierarchicalSoftmaxOptions& options);

// beam_tree_loss(input, weight, bias, target, tree, layer_sizes, ids, log_count, target_log_count, distinct, class_weight, options) -> loss:
// candidate_loss (xsoftmax/ops.h) where the score of a class is the sum over the edges on its path (Han et al., 2018, Algorithm 2).
//
//     edges = F.linear(input, weight, bias)                                                       # E(c): the edges on the path to class c
//     scores[q] = stack([edges[q, E(c)].sum() for c in (target[q], *ids[q])])
//     loss = candidate_loss(scores, target, ids, log_count, target_log_count, distinct) * class_weight[target]
//
// ids, log_count, target_log_count, distinct: the sets of a proposal, private before shared ones, of both the distinct ones first. An edge is
// scored once a query; edges on all paths of a query, and those of candidates that take no part, are left out. Backward as that of tree_scores.
at::Tensor beam_tree_loss(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target, const TreeTables& tree,
                          at::IntArrayRef layer_sizes, const Proposal& sets, const OptionalTensor& class_weight, const SampledSoftmaxOptions& options);

// tree_cross_entropy(input, weight, bias, target, tree, layer_sizes, class_weight, options) -> loss: the exact loss of the same scores, by way of
// the class table, [N, D], in float32 for 16-bit edges: paths are summed in that. options: those of
// beam_tree_loss, of which it takes the reduction.
//
//     F.cross_entropy(tree_class_scores(F.linear(input, weight, bias)), target, class_weight, ...)
at::Tensor tree_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target, const TreeTables& tree,
                              at::IntArrayRef layer_sizes, const OptionalTensor& class_weight, const ReductionOptions& options);

// tree_queries(input, target, weight, bias, tree, ignore_index, class_weight) -> (queries [Q, D], counted [Q]): what a step shows a search and samplers,
// without gradient: zeros and -1 for a query that is ignored. All that is wrong with a batch is said here, before anything changes.
std::tuple<at::Tensor, at::Tensor> tree_queries(const at::Tensor& input, const at::Tensor& target, const at::Tensor& weight, const OptionalTensor& bias,
                                                const TreeTables& tree, int64_t ignore_index, const OptionalTensor& class_weight = std::nullopt);

/// ValueError for options that beam_tree_loss does not take.
void check_beam_tree_options(const SampledSoftmaxOptions& options);

// beam_tree_candidates(seed, queries, weight, bias, tree, layer_sizes, options) -> int64 [Q, num_candidates], -1 where there are fewer: the best
// classes that a beam finds (beam_search.h), or, routed, classes drawn from the best subset (tree_routed_candidates, edge_tables.h), which alone
// reads the seed. No gradient.
at::Tensor beam_tree_candidates(const OptionalTensor& seed, const at::Tensor& queries, const at::Tensor& weight, const OptionalTensor& bias,
                                const TreeTables& tree, at::IntArrayRef layer_sizes, const BeamOptions& options);

} // namespace xsoftmax
