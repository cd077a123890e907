#include "samplers/alias_sample.h"
#include "samplers/draws.h"
#include "samplers/sampling_cuda.cuh"
#include "samplers/static_tail.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

struct Alias {
  const AliasBin* bins;
  int64_t n;
  StaticTail tail;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const {
    const int64_t late = tail.count() > 0 ? tail.draw(seed, query, draw) : -1, id = late < 0 ? alias_draw(seed, query, draw, bins, tail.first) : late;
    CUDA_KERNEL_ASSERT(id >= 0 && id < n); // a table that was tampered with
    return id;
  }
};

at::Tensor alias_sample_cuda(const at::Tensor& seed, const at::Tensor& bins, std::optional<int64_t> num_queries, int64_t num_samples, at::TensorList tail) {
  check_alias_sample(seed, bins, num_queries, num_samples);
  const c10::cuda::CUDAGuard guard(seed.device());
  const at::Tensor ids = empty_samples(seed, num_queries, num_samples);
  const at::Tensor table = bins.contiguous();
  cuda::fill_draws(ids, seed,
                   Alias{reinterpret_cast<const AliasBin*>(table.const_data_ptr<int64_t>()), table.size(0), static_tail("alias_sample", tail, table.size(0))});
  return ids;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("alias_sample", alias_sample_cuda); }

} // namespace xsoftmax
