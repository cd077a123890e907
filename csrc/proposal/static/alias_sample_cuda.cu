#include "proposal/static/alias_sample.h"
#include "proposal/static/static_draws.cuh"

#include <torch/library.h>

namespace xsoftmax {
namespace {

at::Tensor alias_sample_cuda(const at::Tensor& seed, const at::Tensor& bins,
                             std::optional<int64_t> num_queries, int64_t num_samples,
                             at::TensorList tail) {
  check_alias_sample(seed, bins, num_queries, num_samples);
  const c10::cuda::CUDAGuard guard(seed.device());
  const at::Tensor ids = empty_samples(seed, num_queries, num_samples);
  const at::Tensor table = bins.contiguous();
  cuda::fill_draws(ids, seed,
                   cuda::AliasDraw(table, static_tail("alias_sample", tail, table.size(0))));
  return ids;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("alias_sample", alias_sample_cuda); }

} // namespace xsoftmax
