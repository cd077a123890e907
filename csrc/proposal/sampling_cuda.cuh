#pragma once

#include "op/cuda_launch.cuh"
#include "proposal/sampling.h"

// The kernel of samplers that draw with replacement. It reads the seed on the device.

namespace xsoftmax::cuda {

#ifdef __CUDACC__
/// Sets ids[q, j] = draw(seed, q, j); one thread per draw.
template <typename Draw>
__global__ void draw_kernel(int64_t* ids, DrawSeed seed, int64_t total, int64_t num_samples,
                            Draw draw) {
  for (int64_t i = global_thread(); i < total; i += grid_threads()) {
    ids[i] = draw(seed.key(), seed.query(i / num_samples), uint64_t(i % num_samples));
  }
}

/// Fills ids [M] or [Q, M]. `draw` is a plain struct with a __device__ operator()(seed, query,
/// draw) that returns an id.
template <typename Draw>
void fill_draws(const at::Tensor& ids, const at::Tensor& seed, const Draw& draw) {
  if (ids.numel() == 0) {
    return;
  }
  draw_kernel<<<grid_size(ids.numel(), kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      ids.mutable_data_ptr<int64_t>(), DrawSeed(seed), ids.numel(), ids.size(-1), draw);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
#endif

} // namespace xsoftmax::cuda
