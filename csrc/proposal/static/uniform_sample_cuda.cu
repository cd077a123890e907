#include "proposal/sorted_set_cuda.h"
#include "proposal/static/static_draws.cuh"
#include "proposal/static/uniform_sample.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

at::Tensor uniform_sample_cuda(const at::Tensor& seed, int64_t low, int64_t high,
                               std::optional<int64_t> num_queries, int64_t num_samples,
                               bool distinct) {
  check_uniform_sample(seed, low, high, num_queries, num_samples, distinct);
  const c10::cuda::CUDAGuard guard(seed.device());
  const at::Tensor ids = empty_samples(seed, num_queries, num_samples);
  const uint64_t n = uint64_t(high - low);
  if (!distinct) {
    cuda::fill_draws(ids, seed, cuda::UniformDraw{low, n});
    return ids;
  }
  cuda::fill_draws(ids, seed, cuda::DistinctUniformDraw{low, n});
  return num_queries.has_value() ? ids : sorted_set_cuda(ids);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("uniform_sample", uniform_sample_cuda); }

} // namespace xsoftmax
