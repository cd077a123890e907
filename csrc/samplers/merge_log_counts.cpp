#include "samplers/merge_log_counts.h"

#include "core/checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logaddexp.h>
#include <torch/library.h>

namespace xsoftmax {

using at::Tensor;

Tensor merge_log_counts(at::TensorList log_counts) {
  constexpr const char* op = "merge_log_counts";
  TORCH_CHECK_VALUE(!log_counts.empty(), op, ": expected at least one tensor of log counts, got none");
  for (const Tensor& log_count : log_counts) {
    check::floating(op, "log_counts", log_count);
  }
  if (log_counts.size() == 1) {
    return log_counts[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }
  // float64: where an element stands decides whether vector or scalar code takes it, which differ in the last bit.
  Tensor sum = log_counts[0].to(at::kDouble);
  for (size_t i = 1; i < log_counts.size(); ++i) {
    sum = at::logaddexp(sum, log_counts[i].to(at::kDouble));
  }
  return sum.to(at::kFloat);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) { m.def("merge_log_counts(Tensor[] log_counts) -> Tensor", merge_log_counts); }

} // namespace xsoftmax
