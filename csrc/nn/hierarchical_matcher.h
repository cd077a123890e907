#pragma once

#include "matcher/shortlist.h"
#include "tree/label_tree.h"

#include <xsoftmax/matcher.h>

#include <tuple>

namespace xsoftmax {

// A hierarchical matcher (Yu et al., 2022, section 4). Arguments of all its operators: input [*,
// D]; target [*, T] int64, the true labels of each query, padded with -1, T below the number of
// labels L; weight [E, D] and bias [E] or none, one row per edge, edge e ends in node e + 1; tree
// from label_tree; layer_sizes and group_sizes from label_tree_layers; layer: the layer being
// trained, from 1; options: HierarchicalMatcherOptions.

// matcher_loss(input, weight, bias, target, tree, layer_sizes, group_sizes, layer, options) ->
// loss: returns the loss over the shortlist S of each query: the children of the `beam` best nodes
// of the layer above ("man"), of the parents of its true nodes ("tfn"), or of both
// (matcher/shortlist.h). With y_c = 1 if a true label is c or below c, else -1, and s_c = w_c .
// input + b_c:
//
//     sum_{c in S} max(0, 1 - y_c s_c)^2         "squared_hinge"
//     sum_{c in S} log(1 + e^{-y_c s_c})         "logistic"
//
// The loss is a scalar, or [*] for reduction "none", in float32 or float64. Only rows in S have a
// gradient.
at::Tensor matcher_loss(const at::Tensor& input, const at::Tensor& weight,
                        const OptionalTensor& bias, const at::Tensor& target,
                        const TreeTables& tree, at::IntArrayRef layer_sizes,
                        at::IntArrayRef group_sizes, int64_t layer,
                        const HierarchicalMatcherOptions& options);

// matcher_topk(input, weight, bias, tree, k, beam, exclude, options) -> (scores, labels), [*, k]:
// returns the k best labels that a beam search finds, best first. The beam is wide enough for k
// labels and the excluded ones. A score is the product, along the path, of e^{-max(0, 1 - s)^3} for
// "squared_hinge" or 1 / (1 + e^-s) for "logistic". The search adds logs; the score of a label
// found is at least 2^-126. Rows with fewer than k labels are padded with score 0 and label -1.
// beam: at least k; if none, the larger of k and the options' beam. exclude: [*, E] as in
// exclude_topk, or none. Not differentiable.
std::tuple<at::Tensor, at::Tensor> matcher_topk(const at::Tensor& input, const at::Tensor& weight,
                                                const OptionalTensor& bias, const TreeTables& tree,
                                                c10::SymInt k, std::optional<c10::SymInt> beam,
                                                const OptionalTensor& exclude,
                                                const HierarchicalMatcherOptions& options);

// matcher_next_layer_(table, parent, layer_sizes, layer): copies the rows of `layer` to their
// children in the next layer, which must exist. table: [E] or [E, D], of any floating dtype.
void matcher_next_layer_(const at::Tensor& table, const at::Tensor& parent,
                         at::IntArrayRef layer_sizes, int64_t layer);

// matcher_init_layer_(tables, input, target, tree, layer_sizes, layer, options): sets the rows of
// `layer` to sums of their examples. tables: weight, or weight and bias. With the examples h_i,
// their mean m (0 without bias), and the n_c examples i that have a true label at or below c:
//
//     w_c = scale * sum_{i of c} (h_i - m) / sqrt(n_c)          b_c = offset - w_c . m
//
// scale and offset (0 without bias) minimise the loss on at most 4,096 of the examples. w_c = 0 for
// a node without examples. Throws ValueError if there are no examples, or if input, sums or scores
// are not finite; an error changes nothing. Synchronises with the device.
void matcher_init_layer_(at::TensorList tables, const at::Tensor& input, const at::Tensor& target,
                         const TreeTables& tree, at::IntArrayRef layer_sizes, int64_t layer,
                         const HierarchicalMatcherOptions& options);

namespace matcher {

/// The nodes [begin, end) of a layer.
struct Layer {
  int64_t begin = 1, end = 1;

  /// Throws ValueError if there is no such layer.
  Layer(const char* op, at::IntArrayRef layer_sizes, int64_t layer);
  int64_t size() const { return end - begin; }
};

/// The rows of the parameters, and their tree.
struct Edges {
  at::Tensor weight;
  OptionalTensor bias;
  const TreeTables& tree;
  at::IntArrayRef layer_sizes;
};

void check_options(const char* op, const HierarchicalMatcherOptions& options);
/// Checks the arguments of a step before anything is computed. Returns the queries, [Q, D].
at::Tensor check_step(const char* op, const at::Tensor& input, const at::Tensor& target,
                      const Edges& edges);
/// Returns the shortlists of a step (matcher/shortlist.h), by the option `negatives`. targets: the
/// true nodes [Q, T] of the layer; targets whose parent is not scored are ignored.
Shortlist step_shortlist(const at::Tensor& queries, const at::Tensor& targets, const Edges& edges,
                         const Layer& layer, const HierarchicalMatcherOptions& options,
                         std::optional<int64_t> most = std::nullopt);
/// Returns the nodes of a layer above the true labels [Q, T]; -1 where there is none.
at::Tensor true_nodes(const char* op, const at::Tensor& target, const Edges& edges, int64_t layer);
/// Returns the loss of each node on the shortlists. right: 1 for true nodes, else 0.
at::Tensor node_losses(const at::Tensor& scores, const at::Tensor& right, const std::string& loss);

} // namespace matcher
} // namespace xsoftmax
