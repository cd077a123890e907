#pragma once

#include "matcher/linear_beam.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// A layer of a hierarchical linear model: one sparse row of weights for each child of each parent,
// with siblings stored together (Yu et al., 2022, section 3; layout after Etter et al.,
// "Accelerating inference for sparse extreme multi-label ranking trees", WWW 2022).
//
//   first_child int64 [P + 1]  parent p has the children first_child[p] .. first_child[p + 1] - 1
//   chunk       int64 [P + 1]  the offset of each parent's features in `feature`
//   feature     int32 [R]      the features for which any of its children has a weight, increasing
//   more        uint8 [R]      the number of weights of the feature, minus one
//   child       uint8 [E]      the child of the parent to which a weight belongs
//   value       float32 [E]    the weight; a trained layer may store it as float16
//
// `more` and `child` are int32 if a parent has more than 256 children.
//
// Examples are sparse rows in three tensors: offsets int64 [n + 1], columns int32 [nnz], increasing
// within a row and below `features`, values float32 [nnz]. Column `features` represents the bias.

namespace xsoftmax {

constexpr size_t kLinearLayerParts = 6;
/// Checks that the six tensors are contiguous and form a layer below `parents` nodes, and returns a
/// view of them.
LinearLayerView linear_layer_view(const char* op, int64_t parents, int64_t features,
                                  const std::vector<at::Tensor>& parts);

constexpr int64_t kMaxByteChildren = 256; ///< children per parent if a byte numbers them

/// The options of a layer in linear_layers_train. Numbers are used in float32 and must be finite in
/// float32.
struct LinearLayerOptions {
  std::string loss = "squared_hinge"; ///< "squared_hinge", "hinge" or "logistic" (sibling_solver.h)
  double bias = 1; ///< the value of a constant column added to every row; 0 adds none
  double positive_cost = 1; ///< C_i of the rows with the label, above 0
  double negative_cost = 1; ///< C_i of the other rows of the parent, above 0
  double tolerance = 0.1; ///< for the projected gradients of a sweep, above 0
  int64_t sweeps = 100; ///< maximum number of passes over the rows
  double threshold = 0.1; ///< weights below it in magnitude are dropped
  std::optional<int64_t> max_weights; ///< largest weights to keep per child; none: all
  bool half = false; ///< store weights as float16; a weight outside its normal range is an error
  int64_t seed = 0; ///< for the orders in which rows are visited
  int64_t first_parent = 0; ///< the first trained parent; a process may train part of a layer
  std::optional<int64_t> last_parent; ///< the end of the trained parents (exclusive); none: all

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
    v("half", half);
    v("seed", seed);
    v("first_parent", first_parent);
    v("last_parent", last_parent);
  }
};

/// linear_layers_train(rows, features, first_child, parents, labels, label_costs, initial, options)
///     -> 6 tensors for each layer, and tasks
///
/// Trains the classifiers of several layers, those of each child on the rows of its parent
/// (sibling_solver.h). All layers share one queue of tasks (layer_pool.h), so that threads have
/// work while the few, long tasks of the first layers run. CPU only.
///
///   rows         offsets, columns and values of n examples, as above
///
/// For each of the layers, one after the other in each list:
///
///   first_child  int64 [P + 1], as in a layer; C children in all
///   parents      parent_offsets int64 [P + 1], parent_rows int32: the rows of each parent,
///                increasing
///   labels       label_offsets int64 [C + 1], label_rows int32: the positive rows of each child,
///                increasing; rows that are not among its parent's are ignored
///   label_costs  float32, one per label row, at least 0: factors of positive_cost; []: 1
///   initial      the six parts of a layer with this first_child, used as a warm start
///                (sibling_solver.h); []: start at 0
///   options      LinearLayerOptions as text
///
/// The result has chunk, feature, more, child and value of each layer, and stats float64 [3]: the
/// number of sweeps, of labels that did not converge, and of weights before any was dropped. The
/// last tensor, float64 [T, 4], has one row per task, in starting order: layer, parent, first group
/// of siblings and seconds.
///
/// Trains the parents first_parent .. last_parent - 1 of a layer only: `chunk` has one entry more
/// than there are such parents and begins at 0. The other results equal those of the whole layer
/// bit for bit, so concatenated parts form the layer. The same holds for any number of threads, and
/// for layers that are trained one by one.
///
/// Reports progress as long work (op/long_work.h), in units of rows times labels.
///
/// Raises ValueError for sizes, offsets, lists that do not increase, numbers that are not finite,
/// options, and rows whose squares plus that of the bias sum to more than 1e18; IndexError for
/// columns and rows out of range; TypeError for dtypes and devices.
std::vector<at::Tensor> linear_layers_train(at::TensorList rows, int64_t features,
                                            at::TensorList first_child, at::TensorList parents,
                                            at::TensorList labels, at::TensorList label_costs,
                                            at::TensorList initial,
                                            const std::vector<std::string>& options);

} // namespace xsoftmax
