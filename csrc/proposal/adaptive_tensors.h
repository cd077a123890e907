#pragma once

#include "op/optional.h"
#include "op/shape_checks.h"
#include "proposal/adaptive.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

// Tables, seeds, targets and results of adaptive samplers (adaptive.h), as families use them.

namespace xsoftmax {

/// The class table as an index reads it: weight and bias, detached, after pending updates of row
/// optimizers are applied (table/updates/pending_updates.h). Without `whole`, those of the weight
/// stay pending, because the caller does not read all rows.
struct ClassTable {
  ClassTable(const at::Tensor& weight, const OptionalTensor& bias, bool whole = true);
  at::Tensor weight;
  OptionalTensor bias;
};

/// Calls refresh(seed) with an int64 [] from `generator`, or from the device's default generator.
/// If it throws, the generator is restored.
at::Tensor with_seed(const at::Device& device, const std::optional<at::Generator>& generator,
                     const std::function<at::Tensor(const at::Tensor&)>& refresh);

/// Returns an index from its other tables and `step`.
std::vector<at::Tensor> with_step(at::TensorList tables, const at::Tensor& step);
/// Returns an index without recent classes, from its other tables and `step`.
std::vector<at::Tensor> new_index(at::TensorList tables, const at::Tensor& step);

/// Returns `ids` [S] or [Q, P] as [Q, P].
at::Tensor ids_of_queries(const at::Tensor& queries, const at::Tensor& ids);

/// Target classes [Q, width], contiguous, whose counts a draw reports; -1 for no class. width is 0
/// without a target.
struct Targets {
  Targets(const char* op, const OptionalTensor& target, const at::Tensor& queries,
          int64_t num_classes);
  const int64_t* of(int64_t query) const { return ids.const_data_ptr<int64_t>() + query * width; }
  at::Tensor ids;
  int64_t width;
};
/// Returns an uninitialised target_log_count.
at::Tensor empty_target_count(const at::Tensor& seed, const OptionalTensor& target);
/// Returns uninitialised ids int64 [Q, M], log_count float32 [Q, M] and target_log_count.
PrivateDraws empty_private_draws(const at::Tensor& seed, const at::Tensor& queries,
                                 const OptionalTensor& target, int64_t num_samples);

/// Returns the rows of the queries that count; all of them without a target.
at::Tensor counted_queries(const at::Tensor& queries, const OptionalTensor& target);

/// Copies tensors to the CPU, for devices without their own kernels.
std::vector<at::Tensor> to_cpu(at::TensorList tensors);
inline OptionalTensor to_cpu(const OptionalTensor& tensor) {
  return is_defined(tensor) ? OptionalTensor(tensor->cpu()) : tensor;
}

/// Detach tensors: reading and writing an index records no gradient.
std::vector<at::Tensor> detached(at::TensorList tensors);
inline at::Tensor detached(const at::Tensor& tensor) {
  return check::has_gradient(tensor) ? tensor.detach() : tensor;
}
inline OptionalTensor detached(const OptionalTensor& tensor) {
  return is_defined(tensor) ? OptionalTensor(detached(*tensor)) : tensor;
}

/// Returns float32 rows of `width` columns: unchanged, or with the bias (1 without a bias) as an
/// extra column.
at::Tensor with_bias_column(const at::Tensor& rows, const OptionalTensor& bias, int64_t width);

} // namespace xsoftmax
