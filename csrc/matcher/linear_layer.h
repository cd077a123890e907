#pragma once

#include "core/optional.h"
#include "matcher/linear_beam.h"

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

// A layer of a hierarchical linear model: a row of weights for each child of each parent, sparse, siblings together (PECOS paper, section
// 3; the layout after Etter et al., "Accelerating inference for sparse extreme multi-label ranking trees", WWW 2022).
//
//   first_child int64 [P + 1]  parent p has the children first_child[p] .. first_child[p + 1] - 1
//   chunk       int64 [P + 1]  where the features of a parent begin in `feature`
//   feature     int32 [R]      those for which any of its children has a weight, rising
//   more        uint8 [R]      how many weights the feature has beyond one
//   child       uint8 [E]      which child of the parent; it and `more` are int32 where a parent has more than 256 children
//   value       float32 [E]    its weight; a layer that has been trained may keep it as float16
//
// Examples are sparse rows, three tensors: offsets int64 [n + 1], columns int32 [nnz], rising in a row and below `features`, values float32
// [nnz]. Column `features` stands for the bias.

namespace xsoftmax {

constexpr size_t kLinearLayerParts = 6;
/// The six tensors, contiguous, checked to be a layer below `parents` nodes.
LinearLayerView linear_layer_view(const char* op, int64_t parents, int64_t features, const std::vector<at::Tensor>& parts);

constexpr int64_t kMostNarrowChildren = 256; ///< of a parent, where a byte names a child

// linear_layer_train(offsets, columns, values, features, first_child, parent_offsets [P + 1], parent_rows, label_offsets [C + 1], label_rows,
// label_costs, loss, bias, positive_cost, negative_cost, tolerance, sweeps, threshold, max_weights, seed, initial, progress) -> (chunk, feature,
// more, child, value, stats float64 [3]): the classifiers of each child over the rows of its parent, as sibling_solver.h has them.
//
// parent_rows, label_rows int32: the rows of each parent, and those where a child is right, both rising; a row of a child that is not among
// its parent's is passed over. label_costs float32, as many as label_rows: what multiplies positive_cost there; or none. bias: the value of
// a column that every row has; 0: none. Weights nearer to 0 than `threshold` are dropped, then all but the max_weights largest of a label
// (0: none is). initial: the six parts of a layer for the same children, where to begin (sibling_solver.h); empty: none. progress
// int64 [3]: what is done, and of how much, in rows times labels, is written there while the op runs; if somebody sets the third number, it
// stops early with an error. stats: sweeps, labels that did not converge, weights before any was dropped.
using LinearLayer = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
LinearLayer linear_layer_train(const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values, int64_t features,
                               const at::Tensor& first_child, const at::Tensor& parent_offsets, const at::Tensor& parent_rows,
                               const at::Tensor& label_offsets, const at::Tensor& label_rows, const OptionalTensor& label_costs, int64_t loss,
                               double bias, double positive_cost, double negative_cost, double tolerance, int64_t sweeps, double threshold,
                               int64_t max_weights, int64_t seed, const std::vector<at::Tensor>& initial,
                               const OptionalTensor& progress);

} // namespace xsoftmax
