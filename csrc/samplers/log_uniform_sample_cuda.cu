#include "samplers/draws.h"
#include "samplers/log_uniform_sample.h"
#include "samplers/sampling_cuda.cuh"

#include <torch/library.h>

namespace xsoftmax {
namespace {

struct LogUniform {
  int64_t low, high;
  double start, span;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const { return log_uniform_draw(seed, query, draw, low, high, start, span); }
};

at::Tensor log_uniform_sample_cuda(const at::Tensor& seed, int64_t low, int64_t high, std::optional<int64_t> num_queries, int64_t num_samples) {
  check_log_uniform_sample(seed, low, high, num_queries, num_samples);
  const c10::cuda::CUDAGuard guard(seed.device());
  const at::Tensor ids = empty_samples(seed, num_queries, num_samples);
  // Logarithms on the host, as the CPU kernel takes them: the draws then have the same bits.
  const double start = std::log1p(double(low)), span = std::log1p(double(high)) - start;
  cuda::fill_draws(ids, seed, LogUniform{low, high, start, span});
  return ids;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("log_uniform_sample", log_uniform_sample_cuda); }

} // namespace xsoftmax
