#pragma once

#include "tree/label_tree.h"

#include <xsoftmax/ops.h>
#include <xsoftmax/options.h>
#include <xsoftmax/trees.h>

#include <string_view>

namespace xsoftmax {

// Losses over a tree of classes, from the hidden state to the reduced loss. Arguments of all of
// them: input [*, D]; target [*] int64 in [0, N) or ignore_index (such queries have no loss and no
// gradient, even if their input is not finite); weight [E, D] and bias [E] or none, one row per
// edge, edge e ends in node e + 1; tree from label_tree and layer_sizes from label_tree_layers;
// class_weight [N] of any floating dtype or none. The loss is a scalar, or [*] for reduction
// "none", in float32 or float64, reduced as in torch.nn.CrossEntropyLoss (loss/reduction.h).

// hierarchical_softmax_loss(input, weight, bias, target, tree, layer_sizes, group_sizes,
// class_weight, options) -> loss: returns the reduced hierarchical softmax loss (Morin and Bengio,
// 2005) at the leaf of each target. Gradients as in hierarchical_softmax (hierarchical_softmax.h).
//
//     F.nll_loss(hierarchical_log_prob(F.linear(input, weight, bias)), target, class_weight, ...)
at::Tensor hierarchical_softmax_loss(const at::Tensor& input, const at::Tensor& weight,
                                     const OptionalTensor& bias, const at::Tensor& target,
                                     const TreeTables& tree, at::IntArrayRef layer_sizes,
                                     at::IntArrayRef group_sizes,
                                     const OptionalTensor& class_weight,
                                     const HierarchicalSoftmaxOptions& options);

// beam_tree_loss(input, weight, bias, target, tree, layer_sizes, ids, log_count, target_log_count,
// distinct, class_weight, options) -> loss: returns candidate_loss (xsoftmax/ops.h) where the score
// of a class is the sum over the edges on its path (Han et al., 2018, Algorithm 2).
//
//     edges = F.linear(input, weight, bias)           # E(c): the edges on the path to class c
//     scores[q] = stack([edges[q, E(c)].sum() for c in (target[q], *ids[q])])
//     loss = candidate_loss(scores, target, ids, log_count, target_log_count, distinct)
//            * class_weight[target]
//
// ids, log_count, target_log_count, distinct: the sets of a proposal, private sets before shared
// ones, and within each group those drawn without replacement first. An edge is scored once per
// query. Edges on all paths of a query are skipped, and so are edges of candidates that take no
// part. Backward as in tree_scores.
at::Tensor beam_tree_loss(const at::Tensor& input, const at::Tensor& weight,
                          const OptionalTensor& bias, const at::Tensor& target,
                          const TreeTables& tree, at::IntArrayRef layer_sizes, const Proposal& sets,
                          const OptionalTensor& class_weight, const SampledSoftmaxOptions& options);

// tree_cross_entropy(input, weight, bias, target, tree, layer_sizes, class_weight, options) ->
// loss: returns the exact loss for the same scores, by way of the class table [N, D], which is
// float32 for 16-bit edges because paths are summed in float32. options: those of beam_tree_loss;
// only the reduction is used.
//
//     F.cross_entropy(tree_class_scores(F.linear(input, weight, bias)), target, class_weight, ...)
at::Tensor tree_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                              const OptionalTensor& bias, const at::Tensor& target,
                              const TreeTables& tree, at::IntArrayRef layer_sizes,
                              const OptionalTensor& class_weight, const ReductionOptions& options);

// tree_queries(input, target, weight, bias, tree, ignore_index, class_weight) -> (queries [Q, D],
// counted [Q]): returns the queries and targets that the search and samplers of a step receive,
// without gradient; ignored queries are zeros, their target is -1. Every error in a batch is raised
// here, before anything changes.
std::tuple<at::Tensor, at::Tensor> tree_queries(const at::Tensor& input, const at::Tensor& target,
                                                const at::Tensor& weight,
                                                const OptionalTensor& bias, const TreeTables& tree,
                                                int64_t ignore_index,
                                                const OptionalTensor& class_weight = std::nullopt);

/// Throws ValueError for options that beam_tree_loss does not support.
void check_beam_tree_options(const SampledSoftmaxOptions& options);

// beam_tree_candidates(seed, queries, weight, bias, tree, layer_sizes, options) -> int64 [Q,
// num_candidates], padded with -1: returns the best classes found by beam search (beam_search.h)
// or, if routed, classes drawn from the best subset (tree_routed_candidates, edge_tables.h). Only
// the latter reads the seed. Not differentiable.
at::Tensor beam_tree_candidates(const OptionalTensor& seed, const at::Tensor& queries,
                                const at::Tensor& weight, const OptionalTensor& bias,
                                const TreeTables& tree, at::IntArrayRef layer_sizes,
                                const BeamOptions& options);

} // namespace xsoftmax
