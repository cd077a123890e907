#pragma once

#include "core/optional.h"
#include "matcher/linear_beam.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// A layer of a hierarchical linear model: a row of weights for each child of each parent, sparse, siblings together (Yu et al., 2022, section
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

/// The options of linear_layer_train. Numbers are used in float32 and must be finite there.
struct LinearLayerOptions {
  std::string loss = "squared_hinge"; ///< "squared_hinge", "hinge" or "logistic": sibling_solver.h
  double bias = 1;                    ///< the value of a column that every row has; 0: no such column
  double positive_cost = 1;           ///< C_i of the rows where the child is right, above 0
  double negative_cost = 1;           ///< C_i of the other rows of its parent, above 0
  double tolerance = 0.1;             ///< of the projected gradients of a sweep, above 0
  int64_t sweeps = 100;               ///< over the rows, at most
  double threshold = 0.1;             ///< weights nearer to 0 are dropped
  std::optional<int64_t> max_weights; ///< then all but so many of a child, the largest, are dropped; none: no other weight is
  int64_t seed = 0;                   ///< of the orders in which rows are visited
  int64_t first_parent = 0;           ///< the first that is trained: a process may train a part of a layer
  std::optional<int64_t> last_parent; ///< the one behind the last; none: all

  template <typename Visitor>
  void visit(Visitor& v) {
    v("loss", loss);
    v("bias", bias);
    v("positive_cost", positive_cost);
    v("negative_cost", negative_cost);
    v("tolerance", tolerance);
    v("sweeps", sweeps);
    v("threshold", threshold);
    v("max_weights", max_weights);
    v("seed", seed);
    v("first_parent", first_parent);
    v("last_parent", last_parent);
  }
};

/// linear_layer_train(rows, features, first_child, parents, labels, label_costs, initial, options) -> (chunk, feature, more,
/// child, value, stats float64 [3]): the classifiers of each child over the rows of its parent, as sibling_solver.h has them. CPU.
///
///   rows         offsets, columns and values of n examples, as above
///   first_child  int64 [P + 1], as in a layer; C children in all
///   parents      parent_offsets int64 [P + 1], parent_rows int32: the rows of each parent, rising
///   labels       label_offsets int64 [C + 1], label_rows int32: the rows where each child is right, rising; one that is not among its
///                parent's is passed over
///   label_costs  float32, as many as label_rows, at least 0: multiplies positive_cost there; None: 1
///   initial      the six parts of a layer with this first_child, where to begin (sibling_solver.h); []: at 0
///   options      LinearLayerOptions as text
///   stats        sweeps, labels that did not converge, weights before any was dropped
///
/// Of the parents first_parent .. last_parent - 1 alone: `chunk` has so many and one, and begins at 0. The other results are what the whole
/// layer has there, bit for bit, so that parts put one after the other are the layer.
///
/// Long work (core/long_work.h), measured in rows times labels.
///
/// Errors: ValueError for sizes, offsets, lists that do not rise, numbers that are not finite, options, and rows whose squares with that of
/// bias add up to more than 1e18; IndexError for columns and rows out of range; TypeError for dtypes and devices.
using LinearLayer = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
LinearLayer linear_layer_train(at::TensorList rows, int64_t features, const at::Tensor& first_child, at::TensorList parents, at::TensorList labels,
                               const OptionalTensor& label_costs, at::TensorList initial, std::string_view options);

} // namespace xsoftmax
