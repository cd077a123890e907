#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// What every CUDA kernel file uses. The order of an entry: checks, device guard, empty return, dispatch, launch check. No entry waits
// for the device: what CPU kernels check by value (class ids, offsets) is a CUDA_KERNEL_ASSERT in the kernel that reads the value.

namespace xsoftmax::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kThreads = 256; ///< a block, unless a kernel says otherwise

/// Blocks for `items` work items, `per_block` in each. Kernels stride over the grid, so the cap bounds nothing but the launch.
inline unsigned grid_size(int64_t items, int64_t per_block) {
  return unsigned(std::clamp<int64_t>((items + per_block - 1) / per_block, 1, int64_t(1) << 30));
}

#ifdef __CUDACC__
__device__ inline int64_t global_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t grid_threads() { return int64_t(gridDim.x) * blockDim.x; }
__device__ inline int lane() { return int(threadIdx.x % kWarp); }

/// The sum over the warp, in every lane. All lanes must call it; the order of the additions is fixed.
template <typename T>
__device__ inline T warp_sum(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}
#endif

} // namespace xsoftmax::cuda
