#pragma once

#include "trees/label_tree.h"

#include <xsoftmax/hierarchical_matcher.h>

#include <tuple>

namespace xsoftmax {

// A hierarchical matcher (Yu et al., 2022, section 4). In all of its operators: input [*, D]; target
// [*, T] int64, the right labels of each query, -1 where there are fewer than T, T below their number
// L; weight [E, D] and bias [E] or none, a row for each edge, edge e ends in node e + 1; tree and
// layer_sizes, group_sizes of label_tree and label_tree_layers; layer, the layer at work, from 1;
// options: HierarchicalMatcherOptions.

// matcher_loss(input, weight, bias, target, tree, layer_sizes, group_sizes, layer, options) -> loss:
// over the shortlist S of each query, the children of the `beam` best nodes of the layer above and of
// the nodes above its right labels (matcher/shortlist.h). With y_c = 1 where a right label is c or
// below c, else -1, and s_c = w_c . input + b_c:
//
//     sum_{c in S} max(0, 1 - y_c s_c)^2         "squared_hinge"
//     sum_{c in S} log(1 + e^{-y_c s_c})         "logistic"
//
// A scalar, or [*] for reduction "none", in float32 or float64. Only rows of S have a gradient.
at::Tensor matcher_loss(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target, const TreeTables& tree,
                        at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, int64_t layer, const HierarchicalMatcherOptions& options);

// matcher_topk(input, weight, bias, tree, k, beam, exclude, options) -> (scores, labels), [*, k], best
// first: the k best labels that a beam finds which is at least as wide as k and what is excluded. A
// score is the product, along the path, of e^{-max(0, 1 - s)^3} for "squared_hinge", of 1 / (1 + e^-s)
// for "logistic"; the search adds logs, and no label's score is below 2^-126. 0 and -1 behind the last
// of fewer than k. beam: at least k; none: the larger of k and that of the options. exclude [*, E] as
// in exclude_topk, or none. Has no gradient.
std::tuple<at::Tensor, at::Tensor> matcher_topk(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const TreeTables& tree,
                                                c10::SymInt k, std::optional<c10::SymInt> beam, const OptionalTensor& exclude,
                                                const HierarchicalMatcherOptions& options);

// matcher_next_layer_(table, parent, layer_sizes, layer): rows of the layer below `layer`, which has
// one, become those of their parents. table [E] or [E, D], of any floating dtype.
void matcher_next_layer_(const at::Tensor& table, const at::Tensor& parent, at::IntArrayRef layer_sizes, int64_t layer);

// matcher_init_layer_(tables, input, target, tree, layer_sizes, layer, options): rows of the layer at
// work become sums of their examples. tables: weight, or weight and bias. With the examples h_i, their
// mean m (0 without bias), and the n_c examples i that have a right label at or below c:
//
//     w_c = scale * sum_{i of c} (h_i - m) / sqrt(n_c)          b_c = offset - w_c . m
//
// scale and offset (0 without bias) have the least loss on 4,096 of the examples at most. w_c = 0 for
// a node without examples. ValueError for no example, and for input, sums or scores that are not
// finite; an error changes nothing. Waits for a device.
void matcher_init_layer_(at::TensorList tables, const at::Tensor& input, const at::Tensor& target, const TreeTables& tree, at::IntArrayRef layer_sizes,
                         int64_t layer, const HierarchicalMatcherOptions& options);

namespace matcher {

/// The nodes [begin, end) of a layer.
struct Layer {
  int64_t begin = 1, end = 1;

  /// ValueError where there is no such layer.
  Layer(const char* op, at::IntArrayRef layer_sizes, int64_t layer);
  int64_t size() const { return end - begin; }
};

/// The rows of parameters, and the tree that they belong to.
struct Edges {
  at::Tensor weight;
  OptionalTensor bias;
  const TreeTables& tree;
  at::IntArrayRef layer_sizes;
};

void check_options(const char* op, const HierarchicalMatcherOptions& options);
/// Checks all that a step takes, before anything is computed. Returns the queries, [Q, D].
at::Tensor check_step(const char* op, const at::Tensor& input, const at::Tensor& target, const Edges& edges);
/// Returns the nodes of the layer above that the beam reaches: [Q, beam], -1 where there are fewer.
at::Tensor reached_nodes(const at::Tensor& queries, const Edges& edges, int64_t begin, const HierarchicalMatcherOptions& options);
/// Returns the nodes of a layer above the right labels [Q, T], -1 where there is none.
at::Tensor right_nodes(const char* op, const at::Tensor& target, const Edges& edges, int64_t layer);
/// Returns the loss of each node on the shortlists. right: 1 or 0.
at::Tensor node_losses(const at::Tensor& scores, const at::Tensor& right, const std::string& loss);

} // namespace matcher
} // namespace xsoftmax
