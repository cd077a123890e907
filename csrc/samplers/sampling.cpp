#include "samplers/sampling.h"

#include "core/checks.h"

#include <ATen/ops/empty.h>

namespace xsoftmax {

void check_sampling(const char* op, const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries,
                    const c10::SymInt& num_samples) {
  check::dim(op, "seed", seed, 0);
  check::int64(op, "seed", seed);
  TORCH_CHECK_VALUE(!num_queries.has_value() || *num_queries >= 0, op, ": expected num_queries of at least 0, got ", *num_queries);
  TORCH_CHECK_VALUE(num_samples >= 0, op, ": expected num_samples of at least 0, got ", num_samples);
}

at::Tensor empty_samples(const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples) {
  return num_queries.has_value() ? at::empty_symint({*num_queries, num_samples}, seed.options())
                                 : at::empty_symint({num_samples}, seed.options());
}

} // namespace xsoftmax
