#include "loss/two_tower_checks.h"

#include "op/checks.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "estimator/estimators.h"
#include "loss/reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <limits>

namespace xsoftmax {

using at::Tensor;

TwoTowerOptions two_tower_options(const char* op, std::string_view text) {
  const auto options = parse_options<TwoTowerOptions>(op, text);
  const Estimator& estimator = find_estimator(op, options.estimator);
  TORCH_CHECK_VALUE(estimator.has_kernels() && !estimator.traits.has_noise, op,
                    ": expected an estimator of the library without noise, got '",
                    options.estimator, "'");
  reduction_code(op, options.reduction);
  TORCH_CHECK_VALUE(options.similarity == "dot" || options.similarity == "cosine", op,
                    ": expected similarity to be one of 'dot', 'cosine', got '", options.similarity,
                    "'");
  TORCH_CHECK_VALUE(
      options.temperature > 0 && options.temperature < std::numeric_limits<double>::infinity(), op,
      ": expected temperature above 0, got ", options.temperature);
  const auto at_least = [&](const char* name, int64_t value, int64_t least) {
    TORCH_CHECK_VALUE(value >= least, op, ": expected ", name, " of at least ", least, ", got ",
                      value);
  };
  at_least("num_items", options.num_items.value_or(1), 1);
  at_least("memory", options.memory, 0);
  at_least("memory_warmup", options.memory_warmup, 0);
  at_least("dim", options.dim.value_or(1), 1);
  TORCH_CHECK_VALUE(options.memory == 0 || options.dim.has_value(), op,
                    ": expected dim, the width of the vectors, for memory=", options.memory,
                    ", got none");
  return options;
}

Tensor normalize_vectors(const Tensor& vectors, const TwoTowerOptions& options) {
  return options.similarity == "dot" ? vectors
                                     : vectors /
          at::linalg_vector_norm(vectors, 2, {-1}, true).clamp_min(1e-12).expand_as(vectors);
}

bool has_parts(const char* op, const char* name, at::TensorList tensors, size_t parts) {
  TORCH_CHECK_VALUE(tensors.empty() || tensors.size() == parts, op, ": expected ", name, " as ",
                    parts, " tensors or none, got ", tensors.size());
  return !tensors.empty();
}

StreamingState state_of(at::TensorList counts) {
  return {counts[0], counts[1], counts[2], counts[3]};
}

bool check_memory_tensors(const char* op, at::TensorList memory) {
  if (!has_parts(op, "memory", memory, 3)) {
    return false;
  }
  check::dim(op, "memory", memory[0], 2);
  check::floating(op, "memory", memory[0]);
  check::dim(op, "memory_id", memory[1], 1);
  check::int64(op, "memory_id", memory[1]);
  check::size(op, "memory_id", memory[1], 0, memory[0].sym_size(0), "the places of memory");
  check::dim(op, "memory_state", memory[2], 1);
  check::int64(op, "memory_state", memory[2]);
  check::size(op, "memory_state", memory[2], 0, 2, "the items and calls so far");
  check::same_device(op, "memory_id", memory[1], "memory", memory[0]);
  check::same_device(op, "memory_state", memory[2], "memory", memory[0]);
  return true;
}

bool check_memory(const char* op, at::TensorList memory, const Tensor& items) {
  if (!check_memory_tensors(op, memory)) {
    return false;
  }
  for (const Tensor& part : memory) {
    check::same_device(op, "memory", part, "items", items);
  }
  const bool has_places = memory[0].sym_size(0) > 0;
  TORCH_CHECK_VALUE(!has_places || memory[0].sym_size(1) == items.sym_size(1), op,
                    ": expected vectors of the width of memory, ", memory[0].sym_size(1), ", got ",
                    items.sym_size(1));
  return has_places;
}

void check_temperature(const char* op, const Tensor& temperature, const Tensor& query) {
  check::dim(op, "temperature", temperature, 0);
  check::floating(op, "temperature", temperature);
  if (!temperature.is_cpu()) { // a CPU scalar is valid with vectors on any device
    check::same_device(op, "temperature", temperature, "query", query);
  }
}

} // namespace xsoftmax
