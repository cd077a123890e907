#include "cpu/impl.h"
#include "proposal/static/log_uniform_sample.h"
#include "proposal/static/static_draws.cuh"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

at::Tensor log_uniform_sample_cuda(const at::Tensor& seed, int64_t low, int64_t high,
                                   std::optional<int64_t> num_queries, int64_t num_samples) {
  check_log_uniform_sample(seed, low, high, num_queries, num_samples);
  const c10::cuda::CUDAGuard guard(seed.device());
  const at::Tensor ids = empty_samples(seed, num_queries, num_samples);
  cuda::fill_draws(ids, seed, cuda::LogUniformDraw(low, high));
  return ids;
}

__global__ void log_uniform_count_kernel(float* counts, const int64_t* ids, int64_t total,
                                         cuda::LogUniformCount count) {
  for (int64_t i = cuda::global_thread(); i < total; i += cuda::grid_threads()) {
    counts[i] = count(ids[i]);
  }
}

at::Tensor log_uniform_log_count_cuda(const at::Tensor& ids, int64_t low, int64_t high,
                                      double log_scale) {
  check_log_uniform_log_count(ids, low, high);
  if (use_reference()) {
    return log_uniform_log_count_reference(ids, low, high, log_scale);
  }
  const c10::cuda::CUDAGuard guard(ids.device());
  const at::Tensor flat = ids.contiguous(),
                   counts = at::empty(ids.sizes(), ids.options().dtype(at::kFloat));
  if (flat.numel() > 0) {
    log_uniform_count_kernel<<<cuda::grid_size(flat.numel(), cuda::kThreads), cuda::kThreads, 0,
                               c10::cuda::getCurrentCUDAStream()>>>(
        counts.mutable_data_ptr<float>(), flat.const_data_ptr<int64_t>(), flat.numel(),
        cuda::LogUniformCount{low, high, log_scale});
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return counts;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("log_uniform_sample", log_uniform_sample_cuda);
  m.impl("log_uniform_log_count", log_uniform_log_count_cuda);
}

} // namespace xsoftmax
