#include "samplers/log_uniform_sample.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;

Tensor log_uniform_sample_meta(const Tensor& seed, c10::SymInt low, c10::SymInt high, OptionalSize num_queries, c10::SymInt num_samples) {
  check_log_uniform_sample(seed, low, high, num_queries, num_samples);
  return empty_samples(seed, num_queries, num_samples);
}

// A device without a kernel of its own gets the CPU's draws.
Tensor log_uniform_sample_elsewhere(const Tensor& seed, c10::SymInt low, c10::SymInt high, OptionalSize num_queries, c10::SymInt num_samples) {
  check_log_uniform_sample(seed, low, high, num_queries, num_samples);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::log_uniform_sample", "").typed<decltype(log_uniform_sample_meta)>();
  return op.call(seed.cpu(), low, high, num_queries, num_samples).to(seed.device());
}

} // namespace

void check_log_uniform_sample(const Tensor& seed, const c10::SymInt& low, const c10::SymInt& high, const OptionalSize& num_queries,
                              const c10::SymInt& num_samples) {
  constexpr const char* op = "log_uniform_sample";
  check_sampling(op, seed, num_queries, num_samples);
  TORCH_CHECK_VALUE(low >= 0 && high > low, op, ": expected 0 <= low < high, got low = ", low, " and high = ", high);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) { m.def("log_uniform_sample(Tensor seed, SymInt low, SymInt high, SymInt? num_queries, SymInt num_samples) -> Tensor"); }

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("log_uniform_sample", log_uniform_sample_elsewhere); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("log_uniform_sample", log_uniform_sample_meta); }

} // namespace xsoftmax
