#include "proposal/draws.h"
#include "proposal/static/uniform_sample.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

void draw_independent(int64_t* ids, uint64_t seed, uint64_t query, int64_t low, uint64_t n,
                      int64_t num_samples) {
  for (int64_t j = 0; j < num_samples; ++j) {
    ids[j] = low + int64_t(uniform_below(seed, query, j, n));
  }
}

void draw_distinct(int64_t* ids, uint64_t seed, uint64_t query, int64_t low, uint64_t n,
                   int64_t num_samples) {
  const RandomPermutation permutation(seed, query, n);
  for (int64_t j = 0; j < num_samples; ++j) {
    ids[j] = low + int64_t(permutation(j));
  }
}

at::Tensor uniform_sample_cpu(const at::Tensor& seed, int64_t low, int64_t high,
                              std::optional<int64_t> num_queries, int64_t num_samples,
                              bool distinct) {
  check_uniform_sample(seed, low, high, num_queries, num_samples, distinct);
  const at::Tensor out = empty_samples(seed, num_queries, num_samples);
  int64_t* ids = out.mutable_data_ptr<int64_t>();
  const DrawSeed from(seed);
  const auto draw = distinct ? draw_distinct : draw_independent;
  at::parallel_for(0, num_samples == 0 ? 0 : num_queries.value_or(1), query_grain(num_samples),
                   [&](int64_t first, int64_t last) {
                     for (int64_t q = first; q < last; ++q) {
                       draw(ids + q * num_samples, from.key(), from.query(q), low, high - low,
                            num_samples);
                     }
                   });
  if (distinct && !num_queries.has_value()) {
    std::sort(ids, ids + num_samples);
  }
  return out;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("uniform_sample", uniform_sample_cpu); }

} // namespace xsoftmax
