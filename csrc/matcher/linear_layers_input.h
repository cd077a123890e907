#pragma once

#include "table/sparse_rows.h"
#include "matcher/linear_beam.h"
#include "matcher/sibling_solver.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>

#include <deque>
#include <string>
#include <vector>

// The arguments of linear_layers_train (linear_layer.h), validated before training starts.

namespace xsoftmax {

constexpr const char* kLinearLayersTrain = "linear_layers_train"; ///< the operator's name in errors

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
  bool half; // weights are kept as float16
  uint64_t seed;
  int64_t first_parent, last_parent; // the parents that are trained
};

/// The layer of a warm start.
struct InitialLayer {
  LinearLayerView view;
  std::vector<int64_t> entry; ///< the offset of each parent's weights

  explicit InitialLayer(const LinearLayerView& layer);

  int64_t child(int64_t e) const {
    return view.wide ? int64_t(static_cast<const int32_t*>(view.child)[e])
                     : int64_t(static_cast<const uint8_t*>(view.child)[e]);
  }
  float value(int64_t e) const {
    return view.half ? float(static_cast<const c10::Half*>(view.value)[e])
                     : static_cast<const float*>(view.value)[e];
  }
};

/// Inputs for training one layer.
struct LayerTask {
  LinearTraining training;
  const int64_t* first_child; ///< [parents.count + 1]
  RowLists parents, labels;
  const float* costs; ///< of each label row, or null
  const InitialLayer* initial; ///< or null

  int64_t children(int64_t parent) const { return first_child[parent + 1] - first_child[parent]; }
  /// Returns the maximum number of children per parent.
  int64_t max_children() const;
};

/// The validated tensors of a call, and views of them.
class LinearLayersInput {
 public:
  LinearLayersInput(at::TensorList rows, int64_t features, at::TensorList first_child,
                    at::TensorList parents, at::TensorList labels, at::TensorList label_costs,
                    at::TensorList initial, const std::vector<std::string>& options);

  const SparseRowsView& examples() const { return examples_; }
  const std::vector<LayerTask>& layers() const { return layers_; }

 private:
  RowLists check_lists(const char* offsets_name, const at::Tensor& offsets, const char* rows_name,
                       const at::Tensor& rows);
  const float* check_costs(const at::Tensor& costs, int64_t count, float positive_cost);
  const InitialLayer* check_initial(const std::vector<at::Tensor>& parts, int64_t features,
                                    const at::Tensor& first_child);
  at::Tensor keep(const at::Tensor& tensor);

  std::vector<at::Tensor> tensors_; // own the memory of the views
  std::deque<InitialLayer> initial_;
  SparseRowsView examples_;
  std::vector<LayerTask> layers_;
};

} // namespace xsoftmax
