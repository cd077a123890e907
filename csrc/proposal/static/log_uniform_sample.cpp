#include "proposal/static/log_uniform_sample.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;

Tensor log_uniform_sample_meta(const Tensor& seed, c10::SymInt low, c10::SymInt high,
                               OptionalSize num_queries, c10::SymInt num_samples) {
  check_log_uniform_sample(seed, low, high, num_queries, num_samples);
  return empty_samples(seed, num_queries, num_samples);
}

// Devices without a kernel use the CPU's draws.
Tensor log_uniform_sample_elsewhere(const Tensor& seed, c10::SymInt low, c10::SymInt high,
                                    OptionalSize num_queries, c10::SymInt num_samples) {
  check_log_uniform_sample(seed, low, high, num_queries, num_samples);
  static const auto op = find_op<decltype(log_uniform_sample_meta)>("xsoftmax::log_uniform_sample");
  return op.call(seed.cpu(), low, high, num_queries, num_samples).to(seed.device());
}

Tensor log_uniform_log_count_meta(const Tensor& ids, int64_t low, int64_t high, double) {
  check_log_uniform_log_count(ids, low, high);
  return at::empty_symint(ids.sym_sizes(), ids.options().dtype(at::kFloat));
}

} // namespace

Tensor log_uniform_log_count_reference(const Tensor& ids, int64_t low, int64_t high,
                                       double log_scale) {
  check_log_uniform_log_count(ids, low, high);
  const Tensor log_count =
      ids.to(at::kDouble).clamp_min_(0.0).add_(1).reciprocal_().log1p_().log_().add_(log_scale);
  return log_count.to(at::kFloat)
      .masked_fill(ids.lt(low).logical_or_(ids.ge(high)), -std::numeric_limits<double>::infinity());
}

Tensor log_uniform_log_count(const Tensor& ids, int64_t low, int64_t high, double log_scale) {
  static const auto op =
      find_op<decltype(log_uniform_log_count_reference)>("xsoftmax::log_uniform_log_count");
  return op.call(ids, low, high, log_scale);
}

void check_log_uniform_log_count(const Tensor& ids, int64_t low, int64_t high) {
  constexpr const char* op = "log_uniform_log_count";
  check::int64(op, "ids", ids);
  TORCH_CHECK_VALUE(low >= 0 && high > low, op, ": expected 0 <= low < high, got low = ", low,
                    " and high = ", high);
}

void check_log_uniform_sample(const Tensor& seed, const c10::SymInt& low, const c10::SymInt& high,
                              const OptionalSize& num_queries, const c10::SymInt& num_samples) {
  constexpr const char* op = "log_uniform_sample";
  check_sampling(op, seed, num_queries, num_samples);
  TORCH_CHECK_VALUE(low >= 0 && high > low, op, ": expected 0 <= low < high, got low = ", low,
                    " and high = ", high);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "log_uniform_sample(Tensor seed, SymInt low, SymInt high, SymInt? num_queries, SymInt "
      "num_samples) -> Tensor");
  m.def("log_uniform_log_count(Tensor ids, int low, int high, float log_scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("log_uniform_sample", log_uniform_sample_elsewhere);
  m.impl("log_uniform_log_count", log_uniform_log_count_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("log_uniform_sample", log_uniform_sample_meta);
  m.impl("log_uniform_log_count", log_uniform_log_count_meta);
}

} // namespace xsoftmax
