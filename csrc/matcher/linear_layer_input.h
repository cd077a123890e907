#pragma once

#include "op/optional.h"
#include "table/sparse_rows.h"
#include "matcher/sibling_solver.h"

#include <ATen/core/Tensor.h>

#include <span>
#include <string_view>
#include <vector>

// The arguments of linear_layer_train (linear_layer.h), validated before training starts.

namespace xsoftmax {

constexpr const char* kLinearLayerTrain = "linear_layer_train"; ///< the operator's name in errors

/// Lists of row numbers.
struct RowLists {
  int64_t count;
  const int64_t* offset;
  const int32_t* row;

  int64_t size(int64_t i) const { return offset[i + 1] - offset[i]; }
};

/// Validated LinearLayerOptions in the precision of the solver.
struct LinearTraining {
  LinearLoss loss;
  float bias, positive_cost, negative_cost, tolerance;
  int64_t sweeps;
  float threshold;
  int64_t max_weights; // 0: no limit
  uint64_t seed;
  int64_t first_parent, last_parent; // the parents that are trained
};
/// Parses and checks the options for a layer below `parents` nodes.
LinearTraining linear_training(std::string_view options, int64_t parents);

/// Raises if a row is too long: steps divide by the squared norm of a row, and margins are products
/// of such numbers.
void check_lengths(const SparseRowsView& examples, float bias);

/// Returns the tensors made contiguous. Raises unless there are `size`; `names` describes them in
/// the error.
std::vector<at::Tensor> contiguous_parts(const char* arg, at::TensorList tensors, size_t size,
                                         const char* names);

/// The validated tensors of a call, and views of them.
class LinearLayerInput {
 public:
  LinearLayerInput(at::TensorList rows, int64_t features, const at::Tensor& first_child,
                   at::TensorList parents, at::TensorList labels,
                   const OptionalTensor& label_costs);

  const SparseRowsView& examples() const { return examples_; }
  RowLists parents() const { return lists(parents_); }
  RowLists labels() const { return lists(labels_); }
  std::span<const int64_t> first_child() const { return span_of<int64_t>(first_child_); }
  const at::Tensor& first_child_tensor() const { return first_child_; }
  /// Returns the label costs, or null if all are 1.
  const float* costs() const { return costs_.defined() ? costs_.const_data_ptr<float>() : nullptr; }
  /// Returns the largest number of children of a parent.
  int64_t max_children() const;

 private:
  static RowLists lists(const std::vector<at::Tensor>& parts) {
    return {parts[0].size(0) - 1, parts[0].const_data_ptr<int64_t>(),
            parts[1].const_data_ptr<int32_t>()};
  }

  std::vector<at::Tensor> rows_, parents_, labels_;
  at::Tensor first_child_, costs_;
  SparseRowsView examples_;
};

} // namespace xsoftmax
