#include "proposal/static/uniform_sample.h"
#include "op/find_op.h"
#include "op/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;

Tensor uniform_sample_meta(const Tensor& seed, c10::SymInt low, c10::SymInt high,
                           OptionalSize num_queries, c10::SymInt num_samples, bool distinct) {
  check_uniform_sample(seed, low, high, num_queries, num_samples, distinct);
  return empty_samples(seed, num_queries, num_samples);
}

// Devices without a kernel use the CPU's draws.
Tensor uniform_sample_elsewhere(const Tensor& seed, c10::SymInt low, c10::SymInt high,
                                OptionalSize num_queries, c10::SymInt num_samples, bool distinct) {
  check_uniform_sample(seed, low, high, num_queries, num_samples, distinct);
  static const auto op = find_op<decltype(uniform_sample_meta)>("xsoftmax::uniform_sample");
  return op.call(seed.cpu(), low, high, num_queries, num_samples, distinct).to(seed.device());
}

} // namespace

void check_uniform_sample(const Tensor& seed, const c10::SymInt& low, const c10::SymInt& high,
                          const OptionalSize& num_queries, const c10::SymInt& num_samples,
                          bool distinct) {
  constexpr const char* op = "uniform_sample";
  check_sampling(op, seed, num_queries, num_samples);
  TORCH_CHECK_VALUE(low >= 0 && high > low, op, ": expected 0 <= low < high, got low = ", low,
                    " and high = ", high);
  TORCH_CHECK_VALUE(!distinct || num_samples <= high - low, op,
                    ": expected num_samples of at most ", high - low,
                    " (the classes, of which each is drawn once), got ", num_samples);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "uniform_sample(Tensor seed, SymInt low, SymInt high, SymInt? num_queries, SymInt "
      "num_samples, bool distinct) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("uniform_sample", uniform_sample_elsewhere);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("uniform_sample", uniform_sample_meta); }

} // namespace xsoftmax
