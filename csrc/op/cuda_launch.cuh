#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// Utilities shared by all CUDA kernel files. A host entry point performs, in order: argument
// checks, device guard, early return for empty input, dispatch, launch check. It never synchronises
// with the device: values that CPU kernels check on the host (class ids, offsets) are checked by
// CUDA_KERNEL_ASSERT in the kernel that reads them.

namespace xsoftmax::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kThreads = 256; ///< per block, unless a kernel says otherwise

/// Returns the number of blocks for `items` work items, `per_block` in each. Capped at 2^30;
/// kernels use grid-stride loops, so all items are still processed.
inline unsigned grid_size(int64_t items, int64_t per_block) {
  return unsigned(std::clamp<int64_t>((items + per_block - 1) / per_block, 1, int64_t(1) << 30));
}

#ifdef __CUDACC__
__device__ inline int64_t global_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t grid_threads() { return int64_t(gridDim.x) * blockDim.x; }
__device__ inline int lane() { return int(threadIdx.x % kWarp); }

/// Returns the index of the last element of the ascending array start[0 .. count) that is <=
/// `place`, or 0 if there is none.
template <typename T>
__device__ inline int64_t last_at_or_before(const T* start, int64_t count, int64_t place) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (start[middle] <= place ? low : high) = middle;
  }
  return low;
}

/// Returns the sum over the warp in every lane. All lanes must call it. The order of the additions
/// is fixed.
template <typename T>
__device__ inline T warp_sum(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

/// Returns the maximum over the warp in every lane. A NaN may be lost, so check for NaN separately.
template <typename T>
__device__ inline T warp_max(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

/// Returns, in lane l, the sum over lanes 0 to l.
template <typename T>
__device__ inline T warp_inclusive_sum(T value) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, distance);
    value += lane() >= distance ? below : T(0);
  }
  return value;
}

/// Reduces over a block of full warps with reduce_warp(value), and returns the result in every
/// thread. nothing: the neutral element. storage: shared memory for kWarp elements; it can be
/// reused by another reduction without a barrier.
template <typename T, typename ReduceWarp>
__device__ inline T block_reduce(T value, T nothing, T* storage, const ReduceWarp& reduce_warp) {
  value = reduce_warp(value);
  __syncthreads(); // threads may still be reading the last call's values
  if (lane() == 0) {
    storage[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  return reduce_warp(lane() < int(blockDim.x / kWarp) ? storage[lane()] : nothing);
}

/// Returns the sum over the block in every thread. The order of the additions is fixed.
template <typename T>
__device__ inline T block_sum(T value, T* storage) {
  return block_reduce(value, T(0), storage, [](T x) { return warp_sum(x); });
}

/// Returns max(least, maximum over the block) in every thread. A NaN may be lost, as in warp_max.
template <typename T>
__device__ inline T block_max(T value, T least, T* storage) {
  return block_reduce(value, least, storage, [](T x) { return warp_max(x); });
}

/// Returns the sum over threads 0 to threadIdx.x, in a block of full warps. Writes the sum over the
/// block to *total.
template <typename T>
__device__ inline T block_inclusive_sum(T value, T* total, T* storage) {
  const T sum = warp_inclusive_sum(value);
  __syncthreads();
  if (lane() == kWarp - 1) {
    storage[threadIdx.x / kWarp] = sum;
  }
  __syncthreads();
  const T warp_total =
      warp_inclusive_sum(lane() < int(blockDim.x / kWarp) ? storage[lane()] : T(0));
  *total = __shfl_sync(kAllLanes, warp_total, kWarp - 1);
  const int warp = int(threadIdx.x) / kWarp;
  const T before = __shfl_sync(kAllLanes, warp_total, warp > 0 ? warp - 1 : 0);
  return sum + (warp > 0 ? before : T(0));
}
#endif

} // namespace xsoftmax::cuda
