#include "matcher/linear_layer_input.h"

#include "op/checks.h"
#include "op/options.h"
#include "matcher/linear_layer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace xsoftmax {

using at::Tensor;

namespace {

constexpr const char* kOp = kLinearLayerTrain;

LinearLoss loss_of(const std::string& name) {
  const bool hinge = name == "hinge", logistic = name == "logistic";
  TORCH_CHECK_VALUE(hinge || logistic || name == "squared_hinge", kOp,
                    ": expected loss as squared_hinge, hinge or logistic, got ", name);
  return hinge ? LinearLoss::Hinge : logistic ? LinearLoss::Logistic : LinearLoss::SquaredHinge;
}

} // namespace

LinearTraining linear_training(std::string_view text, int64_t parents) {
  const auto options = parse_options<LinearLayerOptions>(kOp, text);
  const auto number = [](const char* name, double value, const char* range, auto&& fits) {
    TORCH_CHECK_VALUE(std::isfinite(float(value)) && fits(float(value)), kOp, ": expected ", name,
                      " as a finite number", range, ", got ", value);
    return float(value);
  };
  const auto any = [](float) { return true; };
  const auto positive = [](float value) { return value > 0; };
  const auto not_negative = [](float value) { return value >= 0; };
  TORCH_CHECK_VALUE(options.sweeps >= 1, kOp, ": expected sweeps of at least 1, got ",
                    options.sweeps);
  TORCH_CHECK_VALUE(options.max_weights.value_or(1) >= 1, kOp,
                    ": expected max_weights of at least 1 or none, got ", *options.max_weights);
  const int64_t first_parent = options.first_parent,
                last_parent = options.last_parent.value_or(parents);
  TORCH_CHECK_VALUE(0 <= first_parent && first_parent <= last_parent && last_parent <= parents, kOp,
                    ": expected 0 <= first_parent <= last_parent <= ", parents,
                    ", the parents, got ", first_parent, " and ", last_parent);
  return {.loss = loss_of(options.loss),
          .bias = number("bias", options.bias, "", any),
          .positive_cost = number("positive_cost", options.positive_cost, " above 0", positive),
          .negative_cost = number("negative_cost", options.negative_cost, " above 0", positive),
          .tolerance = number("tolerance", options.tolerance, " above 0", positive),
          .sweeps = options.sweeps,
          .threshold = number("threshold", options.threshold, " of at least 0", not_negative),
          .max_weights = options.max_weights.value_or(0),
          .seed = uint64_t(options.seed),
          .first_parent = first_parent,
          .last_parent = last_parent};
}

void check_lengths(const SparseRowsView& examples, float bias) {
  constexpr float kMaxSquare = 1e18F;
  for (int64_t i = 0; i < examples.count; ++i) {
    float square = bias * bias;
    for (int64_t t = examples.offset[i]; t < examples.offset[i + 1]; ++t) {
      square += examples.value[t] * examples.value[t];
    }
    TORCH_CHECK_VALUE(square <= kMaxSquare, kOp,
                      ": expected rows whose squares and that of bias add up to ", kMaxSquare,
                      " at most, got ", square, " in row ", i);
  }
}

std::vector<Tensor> contiguous_parts(const char* arg, at::TensorList tensors, size_t size,
                                     const char* names) {
  TORCH_CHECK_VALUE(tensors.size() == size, kOp, ": expected ", arg, " as ", size, " tensors, ",
                    names, ", got ", tensors.size());
  std::vector<Tensor> parts;
  for (const Tensor& tensor : tensors) {
    parts.push_back(tensor.contiguous());
  }
  return parts;
}

LinearLayerInput::LinearLayerInput(at::TensorList rows, int64_t features, const Tensor& first_child,
                                   at::TensorList parents, at::TensorList labels,
                                   const OptionalTensor& label_costs)
    : rows_(contiguous_parts("rows", rows, 3, "offsets, columns and values")),
      parents_(contiguous_parts("parents", parents, 2, "parent_offsets and parent_rows")),
      labels_(contiguous_parts("labels", labels, 2, "label_offsets and label_rows")),
      first_child_(first_child.contiguous()) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(features >= 0 && features < kLimit, kOp, ": expected features in [0, ", kLimit,
                    "), got ", features);
  examples_ = check::sparse_rows(kOp, rows_[0], rows_[1], rows_[2], features, /*rising=*/true);
  TORCH_CHECK_VALUE(examples_.count < kLimit, kOp, ": expected fewer than ", kLimit,
                    " examples, got ", examples_.count);
  check::dim(kOp, "first_child", first_child_, 1);
  check::int64(kOp, "first_child", first_child_);
  check::lists(kOp, "parent_offsets", parents_[0], "parent_rows", parents_[1], examples_.count,
               /*rising=*/true);
  check::size(kOp, "parent_offsets", parents_[0], 0, first_child_.size(0),
              "one for each parent, and one");
  check::lists(kOp, "label_offsets", labels_[0], "label_rows", labels_[1], examples_.count,
               /*rising=*/true);
  check::offsets(kOp, "first_child", first_child_, labels_[0].size(0) - 1);
  if (is_defined(label_costs)) {
    costs_ = label_costs->contiguous();
    check::finite_values(kOp, "label_costs", costs_, labels_[1].size(0));
    for (const float cost : span_of<float>(costs_)) {
      TORCH_CHECK_VALUE(cost >= 0, kOp,
                        ": expected label_costs that are finite and not below 0, got ", cost);
    }
  }
}

int64_t LinearLayerInput::max_children() const {
  int64_t largest = 0;
  for (int64_t p = 0; p < parents().count; ++p) {
    largest = std::max(largest, first_child()[p + 1] - first_child()[p]);
  }
  return largest;
}

} // namespace xsoftmax
