#include "samplers/draws.h"
#include "samplers/sampling_cuda.cuh"
#include "samplers/uniform_sample.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

struct Independent {
  int64_t low;
  uint64_t n;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const { return low + int64_t(uniform_below(seed, query, draw, n)); }
};

// Every draw sets up the permutation of its query anew: three Philox blocks, and no memory.
struct Distinct {
  int64_t low;
  uint64_t n;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const { return low + int64_t(RandomPermutation(seed, query, n)(draw)); }
};

at::Tensor uniform_sample_cuda(const at::Tensor& seed, int64_t low, int64_t high, std::optional<int64_t> num_queries, int64_t num_samples, bool distinct) {
  check_uniform_sample(seed, low, high, num_queries, num_samples, distinct);
  const c10::cuda::CUDAGuard guard(seed.device());
  const at::Tensor ids = empty_samples(seed, num_queries, num_samples);
  const uint64_t n = uint64_t(high - low);
  if (!distinct) {
    cuda::fill_draws(ids, seed, Independent{low, n});
    return ids;
  }
  cuda::fill_draws(ids, seed, Distinct{low, n});
  return num_queries.has_value() ? ids : std::get<0>(ids.sort());
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("uniform_sample", uniform_sample_cuda); }

} // namespace xsoftmax
