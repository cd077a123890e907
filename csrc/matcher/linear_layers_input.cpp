#include "matcher/linear_layers_input.h"

#include "op/checks.h"
#include "op/options.h"
#include "matcher/linear_layer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>

namespace xsoftmax {

using at::Tensor;

namespace {

constexpr const char* kLinearLayersInput = kLinearLayersTrain;

LinearLoss loss_of(const std::string& name) {
  const bool hinge = name == "hinge", logistic = name == "logistic";
  TORCH_CHECK_VALUE(hinge || logistic || name == "squared_hinge", kLinearLayersInput,
                    ": expected loss as squared_hinge, hinge or logistic, got ", name);
  return hinge ? LinearLoss::Hinge : logistic ? LinearLoss::Logistic : LinearLoss::SquaredHinge;
}

/// Parses and checks the options for a layer below `parents` nodes.
LinearTraining linear_training(const std::string& text, int64_t parents) {
  const auto options = parse_options<LinearLayerOptions>(kLinearLayersInput, text);
  const auto number = [](const char* name, double value, const char* range, auto&& fits) {
    TORCH_CHECK_VALUE(std::isfinite(float(value)) && fits(float(value)), kLinearLayersInput,
                      ": expected ", name, " as a finite number", range, ", got ", value);
    return float(value);
  };
  const auto any = [](float) { return true; };
  const auto positive = [](float value) { return value > 0; };
  const auto not_negative = [](float value) { return value >= 0; };
  TORCH_CHECK_VALUE(options.sweeps >= 1, kLinearLayersInput,
                    ": expected sweeps of at least 1, got ", options.sweeps);
  TORCH_CHECK_VALUE(options.max_weights.value_or(1) >= 1, kLinearLayersInput,
                    ": expected max_weights of at least 1 or none, got ", *options.max_weights);
  const int64_t first_parent = options.first_parent,
                last_parent = options.last_parent.value_or(parents);
  TORCH_CHECK_VALUE(0 <= first_parent && first_parent <= last_parent && last_parent <= parents,
                    kLinearLayersInput, ": expected 0 <= first_parent <= last_parent <= ", parents,
                    ", the parents, got ", first_parent, " and ", last_parent);
  return {.loss = loss_of(options.loss),
          .bias = number("bias", options.bias, "", any),
          .positive_cost = number("positive_cost", options.positive_cost, " above 0", positive),
          .negative_cost = number("negative_cost", options.negative_cost, " above 0", positive),
          .tolerance = number("tolerance", options.tolerance, " above 0", positive),
          .sweeps = options.sweeps,
          .threshold = number("threshold", options.threshold, " of at least 0", not_negative),
          .max_weights = options.max_weights.value_or(0),
          .half = options.half,
          .seed = uint64_t(options.seed),
          .first_parent = first_parent,
          .last_parent = last_parent};
}

/// Raises if a row is too long: steps divide by the squared norm of a row, and margins are products
/// of such numbers.
void check_lengths(const SparseRowsView& examples, float bias) {
  constexpr float kMaxSquare = 1e18F;
  for (int64_t i = 0; i < examples.count; ++i) {
    float square = bias * bias;
    for (int64_t t = examples.offset[i]; t < examples.offset[i + 1]; ++t) {
      square += examples.value[t] * examples.value[t];
    }
    TORCH_CHECK_VALUE(square <= kMaxSquare, kLinearLayersInput,
                      ": expected rows whose squares and that of bias add up to ", kMaxSquare,
                      " at most, got ", square, " in row ", i);
  }
}

void check_count(const char* arg, at::TensorList tensors, size_t count, const char* names) {
  TORCH_CHECK_VALUE(tensors.size() == count, kLinearLayersInput, ": expected ", arg, " as ", count,
                    " tensors, ", names, ", got ", tensors.size());
}

} // namespace

InitialLayer::InitialLayer(const LinearLayerView& layer) : view(layer), entry{0} {
  for (size_t p = 0; p + 1 < view.chunk.size(); ++p) {
    int64_t end = entry.back();
    for (int64_t row = view.chunk[p]; row < view.chunk[p + 1]; ++row) {
      end += view.weights(row);
    }
    entry.push_back(end);
  }
}

int64_t LayerTask::max_children() const {
  int64_t largest = 0;
  for (int64_t p = 0; p < parents.count; ++p) {
    largest = std::max(largest, children(p));
  }
  return largest;
}

LinearLayersInput::LinearLayersInput(at::TensorList rows, int64_t features,
                                     at::TensorList first_child, at::TensorList parents,
                                     at::TensorList labels, at::TensorList label_costs,
                                     at::TensorList initial,
                                     const std::vector<std::string>& options) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  const size_t layers = first_child.size();
  check_count("rows", rows, 3, "offsets, columns and values");
  check_count("parents", parents, 2 * layers, "parent_offsets and parent_rows of each layer");
  check_count("labels", labels, 2 * layers, "label_offsets and label_rows of each layer");
  if (!label_costs.empty()) {
    check_count("label_costs", label_costs, layers, "one for each layer");
  }
  if (!initial.empty()) {
    check_count("initial", initial, kLinearLayerParts * layers, "the parts of each layer");
  }
  TORCH_CHECK_VALUE(options.size() == layers, kLinearLayersInput, ": expected options for each of ",
                    layers, " layers, got ", options.size());
  TORCH_CHECK_VALUE(features >= 0 && features < kLimit, kLinearLayersInput,
                    ": expected features in [0, ", kLimit, "), got ", features);
  const Tensor offsets = keep(rows[0]), columns = keep(rows[1]), values = keep(rows[2]);
  examples_ =
      check::sparse_rows(kLinearLayersInput, offsets, columns, values, features, /*rising=*/true);
  TORCH_CHECK_VALUE(examples_.count < kLimit, kLinearLayersInput, ": expected fewer than ", kLimit,
                    " examples, got ", examples_.count);
  float largest_bias = 0;
  for (size_t d = 0; d < layers; ++d) {
    const Tensor first = keep(first_child[d]), parent_offsets = keep(parents[2 * d]),
                 label_offsets = keep(labels[2 * d]), label_rows = keep(labels[2 * d + 1]);
    LayerTask layer{};
    check::numbers(kLinearLayersInput, "first_child", first, at::kLong);
    layer.parents =
        check_lists("parent_offsets", parent_offsets, "parent_rows", keep(parents[2 * d + 1]));
    check::size(kLinearLayersInput, "parent_offsets", parent_offsets, 0, first.size(0),
                "one for each parent, and one");
    layer.labels = check_lists("label_offsets", label_offsets, "label_rows", label_rows);
    check::offsets(kLinearLayersInput, "first_child", first, layer.labels.count);
    layer.first_child = first.const_data_ptr<int64_t>();
    layer.training = linear_training(options[d], layer.parents.count);
    layer.costs = label_costs.empty()
        ? nullptr
        : check_costs(label_costs[d], label_rows.size(0), layer.training.positive_cost);
    if (!initial.empty()) {
      const at::TensorList parts = initial.slice(d * kLinearLayerParts, kLinearLayerParts);
      std::vector<Tensor> kept;
      std::transform(parts.begin(), parts.end(), std::back_inserter(kept),
                     [&](const Tensor& part) { return keep(part); });
      layer.initial = check_initial(kept, features, first);
    }
    largest_bias = std::max(largest_bias, std::abs(layer.training.bias));
    layers_.push_back(layer);
  }
  check_lengths(examples_, largest_bias);
}

RowLists LinearLayersInput::check_lists(const char* offsets_name, const Tensor& offsets,
                                        const char* rows_name, const Tensor& rows) {
  check::lists(kLinearLayersInput, offsets_name, offsets, rows_name, rows, examples_.count,
               /*rising=*/true);
  return {offsets.size(0) - 1, offsets.const_data_ptr<int64_t>(), rows.const_data_ptr<int32_t>()};
}

const float* LinearLayersInput::check_costs(const Tensor& label_costs, int64_t count,
                                            float positive_cost) {
  const Tensor costs = keep(label_costs);
  check::finite_values(kLinearLayersInput, "label_costs", costs, count);
  for (const float cost : span_of<float>(costs)) {
    TORCH_CHECK_VALUE(cost >= 0, kLinearLayersInput,
                      ": expected label_costs that are finite and not below 0, got ", cost);
    TORCH_CHECK_VALUE(std::isfinite(cost * positive_cost), kLinearLayersInput,
                      ": expected positive_cost times label_costs as finite numbers, got ",
                      positive_cost, " times ", cost);
  }
  return costs.const_data_ptr<float>();
}

const InitialLayer* LinearLayersInput::check_initial(const std::vector<Tensor>& parts,
                                                     int64_t features, const Tensor& first_child) {
  TORCH_CHECK_VALUE(
      parts[0].equal(first_child), kLinearLayersInput,
      ": expected initial as the parts of a layer with this first_child, got another one");
  return &initial_.emplace_back(
      linear_layer_view(kLinearLayersInput, first_child.size(0) - 1, features, parts));
}

Tensor LinearLayersInput::keep(const Tensor& tensor) {
  return tensors_.emplace_back(tensor.contiguous());
}

} // namespace xsoftmax
