#include "cpu/impl.h"
#include "proposal/draws.h"
#include "proposal/static/log_uniform_sample.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

constexpr int64_t kCountsPerTask = 4096;

at::Tensor log_uniform_sample_cpu(const at::Tensor& seed, int64_t low, int64_t high,
                                  std::optional<int64_t> num_queries, int64_t num_samples) {
  check_log_uniform_sample(seed, low, high, num_queries, num_samples);
  const at::Tensor out = empty_samples(seed, num_queries, num_samples);
  int64_t* ids = out.mutable_data_ptr<int64_t>();
  const DrawSeed from(seed);
  const double start = std::log1p(double(low)), span = std::log1p(double(high)) - start;
  at::parallel_for(0, num_samples == 0 ? 0 : num_queries.value_or(1), query_grain(num_samples),
                   [&](int64_t first, int64_t last) {
                     for (int64_t q = first; q < last; ++q) {
                       for (int64_t j = 0; j < num_samples; ++j) {
                         ids[q * num_samples + j] =
                             log_uniform_draw(from.key(), from.query(q), j, low, high, start, span);
                       }
                     }
                   });
  return out;
}

at::Tensor log_uniform_log_count_cpu(const at::Tensor& ids, int64_t low, int64_t high,
                                     double log_scale) {
  check_log_uniform_log_count(ids, low, high);
  if (use_reference()) {
    return log_uniform_log_count_reference(ids, low, high, log_scale);
  }
  const at::Tensor flat = ids.contiguous(),
                   counts = at::empty(ids.sizes(), ids.options().dtype(at::kFloat));
  const int64_t* const id = flat.const_data_ptr<int64_t>();
  float* const count = counts.mutable_data_ptr<float>();
  at::parallel_for(0, flat.numel(), kCountsPerTask, [&](int64_t first, int64_t last) {
    std::transform(id + first, id + last, count + first,
                   [&](int64_t i) { return log_uniform_count(i, low, high, log_scale); });
  });
  return counts;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("log_uniform_sample", log_uniform_sample_cpu);
  m.impl("log_uniform_log_count", log_uniform_log_count_cpu);
}

} // namespace xsoftmax
