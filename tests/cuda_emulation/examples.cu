// Small kernels for test_tool.py: some are correct, the others have a fault that the emulator must
// find.

#include "table/cuda_rows.cuh"

#include <ATen/ops/full_like.h>

#include <map>
#include <string>

namespace {

using namespace xsoftmax::cuda;

constexpr int kTile = 128;

// -------------------------------------------------------------------------------------------------
// correct kernels

// Every block reverses its tile.
template <typename T>
__global__ void turn_kernel(const T* x, T* out, int64_t n) {
  __shared__ T tile[kTile];
  for (int64_t first = int64_t(blockIdx.x) * kTile; first < n;
       first += int64_t(gridDim.x) * kTile) {
    tile[threadIdx.x] = x[first + threadIdx.x];
    __syncthreads();
    out[first + threadIdx.x] = tile[kTile - 1 - threadIdx.x];
    __syncthreads();
  }
}

__global__ void turn_dynamic_kernel(const float* x, float* out) {
  extern __shared__ alignas(16) unsigned char memory[];
  auto* tile = reinterpret_cast<float*>(memory);
  const int64_t at = int64_t(blockIdx.x) * kTile;
  tile[threadIdx.x] = x[at + threadIdx.x];
  __syncthreads();
  out[at + threadIdx.x] = tile[kTile - 1 - threadIdx.x];
}

// The same with all intrinsics, whose results are known in advance.
__global__ void turn_by_intrinsics_kernel(const float* x, float* out, int* count) {
  __shared__ float tile[kTile / kWarp][kWarp], sum;
  const unsigned t = threadIdx.x, me = t % kWarp;
  const float value = x[int64_t(blockIdx.x) * kTile + t];
  if (t == 0) {
    sum = 0;
  }
  CUDA_KERNEL_ASSERT(__syncthreads_count(t % 4 == 0) == kTile / 4 && __syncthreads_or(t == 5) &&
                     !__syncthreads_and(t != 5));
  CUDA_KERNEL_ASSERT(warp_sum(me) == 496 && __reduce_add_sync(kAllLanes, 1) == 32 &&
                     __reduce_max_sync(kAllLanes, int(me) - 40) == -9);
  CUDA_KERNEL_ASSERT(__ballot_sync(kAllLanes, me < 3) == 7 && __any_sync(kAllLanes, me == 9) &&
                     !__all_sync(kAllLanes, me != 9));
  CUDA_KERNEL_ASSERT(__match_any_sync(kAllLanes, me / 16) == (me < 16 ? 0xFFFFu : 0xFFFF0000u));
  CUDA_KERNEL_ASSERT(__shfl_up_sync(kAllLanes, me, 1, 8) == me - (me % 8 > 0) &&
                     __shfl_down_sync(kAllLanes, me, 1) == me + (me < 31));
  if (me < 16) { // only half of the warp
    CUDA_KERNEL_ASSERT(__shfl_sync(0xFFFFu, double(me), 3) == 3);
  }
  atomicAdd(&sum, 1.0f);
  atomicAdd(count, 1);
  tile[t / kWarp][me] = __shfl_xor_sync(kAllLanes, value, 31);
  __syncthreads();
  CUDA_KERNEL_ASSERT(sum == kTile);
  out[int64_t(blockIdx.x) * kTile + t] = tile[kTile / kWarp - 1 - t / kWarp][me];
}

// Known traffic: every thread copies 16 bytes through local memory.
__global__ void copy_packs_kernel(const float* x, float* out, int64_t n) {
  const int64_t at = 4 * global_thread();
  if (at < n) {
    const auto pack = load_pack<4>(x + at);
    volatile float mine[4];
    for (int i = 0; i < 4; ++i) {
      mine[i] = pack.values[i];
    }
    const float sums[4] = {mine[0], mine[1], mine[2], mine[3]};
    store_pack(out + at, sums);
  }
}

// Reads and writes one of eight elements.
__global__ void one_of_eight_kernel(const float* x, float* out, int64_t n) {
  const int64_t at = 8 * global_thread();
  if (at < n) {
    out[at] = x[at];
  }
}

// Every block reads the first tile, each element twice.
__global__ void same_tile_kernel(const float* x, float* out) {
  const volatile float* again = x;
  out[global_thread()] = again[threadIdx.x] + again[kTile - 1 - threadIdx.x];
}

// -------------------------------------------------------------------------------------------------
// faulty kernels

__global__ void no_barrier_kernel(const float* x, float* out) {
  __shared__ float tile[kTile];
  tile[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = tile[kTile - 1 - threadIdx.x];
}

__global__ void no_barrier_in_loop_kernel(const float* x, float* out, int64_t n) {
  __shared__ float tile[kTile];
  for (int64_t first = 0; first < n; first += kTile) {
    tile[threadIdx.x] = x[first + threadIdx.x];
    __syncthreads();
    out[first + threadIdx.x] = tile[kTile - 1 - threadIdx.x]; // the next iteration overwrites it
  }
}

__global__ void no_syncwarp_kernel(const float* x, float* out) {
  __shared__ float tile[kTile];
  tile[threadIdx.x] = x[threadIdx.x];
  const float other = tile[threadIdx.x ^ 31]; // an element of the same warp
  __syncthreads();
  tile[threadIdx.x] = other;
  __syncthreads();
  out[threadIdx.x] = tile[(kTile / kWarp - 1 - threadIdx.x / kWarp) * kWarp + threadIdx.x % kWarp];
}

__global__ void barrier_of_some_kernel() {
  if (threadIdx.x < 40) {
    __syncthreads();
  }
}

__global__ void two_barriers_kernel() {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void barrier_after_the_end_kernel() {
  if (threadIdx.x == 7) {
    return;
  }
  __syncthreads();
}

__global__ void lane_outside_the_mask_kernel(float* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(0xFFFFu, 1.0f, 16);
  }
}

__global__ void lane_that_does_not_come_kernel(float* out) {
  if (threadIdx.x % kWarp != 3) {
    out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1.0f, 1);
  }
  __syncthreads();
}

__global__ void masks_differ_kernel(int* count) {
  *count = __ballot_sync(threadIdx.x % kWarp < 16 ? kAllLanes : ~1u, 1);
}

__global__ void warp_sum_kernel(float* out) { out[threadIdx.x] = warp_sum(1.0f); }

__global__ void shared_write_too_far_kernel(float* out) {
  __shared__ float tile[kTile];
  float* to = tile; // hides the length of `tile` from the sanitizers
  to[threadIdx.x + 1] = 1;
  out[threadIdx.x] = tile[threadIdx.x];
}

__global__ void shared_read_too_far_kernel(float* out) {
  __shared__ float tile[kTile];
  tile[threadIdx.x] = 1;
  __syncthreads();
  const float* from = tile;
  out[threadIdx.x] = from[threadIdx.x + 1] * 0;
}

__global__ void global_write_too_far_kernel(float* out, int64_t n) {
  out[n - kTile + 1 + threadIdx.x] = 0;
}

__global__ void assert_kernel() { CUDA_KERNEL_ASSERT(threadIdx.x != 3); }

__global__ void no_dynamic_memory_kernel(float* out) {
  extern __shared__ float memory[];
  out[0] = memory[0];
}

__global__ void much_dynamic_memory_kernel(float* out) {
  extern __shared__ alignas(16) float memory[];
  memory[threadIdx.x + 16384 - kTile] = float(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = memory[16383 - threadIdx.x];
}

// Has 32 KB of static shared memory.
template <int N>
__global__ void both_kinds_of_memory_kernel(float* out) {
  __shared__ float tile[N];
  extern __shared__ alignas(16) float memory[];
  tile[threadIdx.x] = float(threadIdx.x);
  memory[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = tile[kTile - 1 - threadIdx.x] + memory[threadIdx.x];
}

__global__ void much_shared_memory_kernel(float* out) {
  __shared__ float tile[16384];
  tile[threadIdx.x] = 1;
  out[threadIdx.x] = tile[threadIdx.x];
}

__global__ void nothing_kernel() {}

using at::Tensor;

/// out [n], n a multiple of kTile. Kernels that reverse tiles do so with each tile of x.
Tensor run(const std::string& name, const Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Tensor out = at::full_like(x, -1);
  const int64_t n = x.numel();
  const unsigned blocks = unsigned(n / kTile);
  if (x.scalar_type() == at::kHalf) {
    turn_kernel<at::Half><<<blocks, kTile, 0, stream>>>(x.const_data_ptr<at::Half>(),
                                                        out.mutable_data_ptr<at::Half>(), n);
    return out;
  }
  const float* in = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  int count = 0;
  const std::map<std::string, std::function<void()>> kernels{
      {"turn", [&] { turn_kernel<float><<<blocks, kTile, 0, stream>>>(in, to, n); }},
      {"turn_dynamic",
       [&] { turn_dynamic_kernel<<<blocks, kTile, kTile * sizeof(float), stream>>>(in, to); }},
      {"turn_by_intrinsics",
       [&] {
         turn_by_intrinsics_kernel<<<blocks, kTile, 0, stream>>>(in, to, &count);
         TORCH_CHECK(count == n, "atomicAdd: ", count);
       }},
      {"copy_packs", [&] { copy_packs_kernel<<<blocks, kTile, 0, stream>>>(in, to, n); }},
      {"one_of_eight", [&] { one_of_eight_kernel<<<blocks, kTile, 0, stream>>>(in, to, n); }},
      {"same_tile", [&] { same_tile_kernel<<<blocks, kTile, 0, stream>>>(in, to); }},
      {"no_barrier", [&] { no_barrier_kernel<<<1, kTile, 0, stream>>>(in, to); }},
      {"no_barrier_in_loop",
       [&] { no_barrier_in_loop_kernel<<<1, kTile, 0, stream>>>(in, to, n); }},
      {"no_syncwarp", [&] { no_syncwarp_kernel<<<1, kTile, 0, stream>>>(in, to); }},
      {"barrier_of_some", [&] { barrier_of_some_kernel<<<1, kTile>>>(); }},
      {"two_barriers", [&] { two_barriers_kernel<<<1, kTile>>>(); }},
      {"barrier_after_the_end", [&] { barrier_after_the_end_kernel<<<1, kTile>>>(); }},
      {"lane_outside_the_mask", [&] { lane_outside_the_mask_kernel<<<1, kTile>>>(to); }},
      {"lane_that_does_not_come", [&] { lane_that_does_not_come_kernel<<<1, kTile>>>(to); }},
      {"masks_differ", [&] { masks_differ_kernel<<<1, kTile>>>(&count); }},
      {"half_a_warp", [&] { warp_sum_kernel<<<1, 48>>>(to); }},
      {"shared_write_too_far", [&] { shared_write_too_far_kernel<<<1, kTile>>>(to); }},
      {"shared_read_too_far", [&] { shared_read_too_far_kernel<<<1, kTile>>>(to); }},
      {"global_write_too_far", [&] { global_write_too_far_kernel<<<1, kTile>>>(to, n); }},
      {"assert", [&] { assert_kernel<<<1, kTile>>>(); }},
      {"no_dynamic_memory", [&] { no_dynamic_memory_kernel<<<1, kTile>>>(to); }},
      {"much_dynamic_memory_refused", [&] { much_dynamic_memory_kernel<<<1, kTile, 65536>>>(to); }},
      {"much_dynamic_memory",
       [&] {
         C10_CUDA_CHECK(cudaMemsetAsync(to, 0, size_t(n) * sizeof(float), stream));
         C10_CUDA_CHECK(cudaFuncSetAttribute(much_dynamic_memory_kernel,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
         much_dynamic_memory_kernel<<<1, kTile, 65536, stream>>>(to);
         TORCH_CHECK(cudaFuncSetAttribute(much_dynamic_memory_kernel,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          1 << 20) != cudaSuccess);
       }},
      {"both_kinds_of_memory", [&] { both_kinds_of_memory_kernel<8192><<<1, kTile, 16384>>>(to); }},
      {"both_kinds_of_much_memory",
       [&] { both_kinds_of_memory_kernel<8192><<<1, kTile, 16388>>>(to); }},
      {"both_kinds_of_more_memory",
       [&] {
         C10_CUDA_CHECK(cudaFuncSetAttribute(both_kinds_of_memory_kernel<8192 + 1>,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
         both_kinds_of_memory_kernel<8192 + 1><<<1, kTile, 65536>>>(to);
       }},
      {"much_shared_memory", [&] { much_shared_memory_kernel<<<1, kTile>>>(to); }},
      {"many_threads", [&] { nothing_kernel<<<1, dim3(64, 32)>>>(); }},
      {"no_blocks", [&] { nothing_kernel<<<0, kTile>>>(); }},
  };
  kernels.at(name)();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

} // namespace

TORCH_LIBRARY(emulator_examples, m) { m.def("run(str name, Tensor x) -> Tensor", run); }
