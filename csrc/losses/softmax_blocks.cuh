#pragma once

#include "core/cuda_rows.cuh"
#include "core/optional.h"
#include "core/simd.h"
#include "scores/gather_dot_cuda.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <limits>

// What the exact losses share on a device: the classes in blocks, whose logits are products of ATen and never exist all at once, and the softmax of a
// query folded block by block.

namespace xsoftmax::cuda {

/// Classes at once: as many as make logits that the L2 cache holds until the next kernel has read them.
inline int64_t class_block(int64_t queries, int64_t classes, size_t element) {
  constexpr int64_t kBytes = 32 << 20, kLeast = 1024, kMost = 16384, kStep = 64;
  const int64_t fitting = kBytes / (std::max<int64_t>(1, queries) * int64_t(element)) / kStep * kStep;
  return std::max<int64_t>(1, std::min(classes, std::clamp(fitting, kLeast, kMost)));
}

/// The logits of classes begin ... begin + size - 1, without bias, into `out` [Q, size].
inline void block_products(const at::Tensor& out, const at::Tensor& query, const at::Tensor& weight, int64_t begin, int64_t size) {
  product_out_cuda(out, query, weight.narrow(0, begin, size).t());
}

/// What has been seen of each query [Q].
template <typename A>
struct SoftmaxState {
  A* max;          ///< largest logit
  A* sum;          ///< of e^(logit - max)
  A* target_logit; ///< nullptr: not wanted
  double* even;    ///< sum of class_weight * logit; nullptr: not wanted

  /// Returns the state of the queries from `first` on.
  SoftmaxState from(int64_t first) const {
    return {max + first, sum + first, target_logit == nullptr ? nullptr : target_logit + first, even == nullptr ? nullptr : even + first};
  }
};

/// A block of classes.
template <typename A>
struct LogitBlock {
  const A* logits; ///< [Q, size], rows `stride` apart
  int64_t stride, queries, begin, size;
  const A* bias;         ///< [N], nullptr: zeros
  const A* class_weight; ///< [N], nullptr: ones
  const int64_t* target; ///< [Q], nullptr: none
};

#ifdef __CUDACC__
/// e^(x - max) of logits that lie so far from a largest of -inf are 0.
template <typename A>
__device__ inline A finite_shift(A max) {
  return max == -A(__builtin_inf()) ? A(0) : max;
}

/// The partial softmax of a row of logits, as fold_row returns it to every thread of the block.
template <typename A>
struct RowFold {
  A max, sum; ///< the largest, and the sum of e^(logit - max)
  double even; ///< sum of class_weight * logit, where it is wanted
};

/// Folds the logits of a query in a block of classes. A NaN or +inf leaves a sum of NaN. keys [Q, size]: of float logits, integers in their order, the lower
/// class first among equals; nullptr: not wanted.
template <int N, typename A>
__device__ inline RowFold<A> fold_row(const LogitBlock<A>& block, int64_t q, bool want_even, int64_t* keys) {
  using on_device::exponential;
  constexpr A kLeast = -A(__builtin_inf());
  __shared__ A storage[kWarp];
  __shared__ double wide_storage[kWarp];
  const A* row = block.logits + q * block.stride;
  A max = kLeast, sum = 0;
  double even = 0;
  for (int64_t j = int64_t(threadIdx.x) * N; j < block.size; j += int64_t(blockDim.x) * N) {
    A x[N], top = max;
    const auto pack = load_pack<N>(row + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = pack.values[i] + (block.bias == nullptr ? A(0) : block.bias[block.begin + j + i]);
      top = x[i] > top ? x[i] : top;
    }
    const A shift = finite_shift(top);
    if (top > max) {
      sum *= exponential(max - shift);
      max = top;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum += exponential(x[i] - shift);
      if (want_even) {
        even += double(x[i]) * (block.class_weight == nullptr ? 1.0 : double(block.class_weight[block.begin + j + i]));
      }
      if constexpr (std::is_same_v<A, float>) {
        if (keys != nullptr) { // + 0: both zeros are one
          keys[q * block.size + j + i] = int64_t(on_device::ordered(x[i] + 0.0f)) * (int64_t(1) << 32) + (0xFFFFFFFFll - (block.begin + j + i));
        }
      }
    }
  }
  const A top = block_max(max, kLeast, storage);
  sum = block_sum(sum * exponential(max - finite_shift(top)), storage);
  return {top, sum, want_even ? block_sum(even, wide_storage) : 0.0};
}

/// The logit of the target of a query, where the block of classes has it; else `other`.
template <typename A>
__device__ inline A target_logit(const LogitBlock<A>& block, int64_t q, A other) {
  const int64_t j = block.target[q] - block.begin;
  return j < 0 || j >= block.size ? other : block.logits[q * block.stride + j] + (block.bias == nullptr ? A(0) : block.bias[block.begin + j]);
}

// A block of threads a query: folds the logits of a block of classes into its state; `first`: there is none yet.
template <typename A, int N>
__global__ void fold_logits_kernel(SoftmaxState<A> state, LogitBlock<A> block, int64_t* keys, bool first) {
  using on_device::exponential;
  for (int64_t q = blockIdx.x; q < block.queries; q += gridDim.x) {
    const RowFold<A> row = fold_row<N>(block, q, state.even != nullptr, keys);
    if (threadIdx.x == 0) {
      const A before = first ? -A(__builtin_inf()) : state.max[q], largest = row.max > before ? row.max : before, shift = finite_shift(largest);
      state.sum[q] = (first ? A(0) : state.sum[q] * exponential(before - shift)) + row.sum * exponential(row.max - shift);
      state.max[q] = largest;
      if (state.even != nullptr) {
        state.even[q] = (first ? 0.0 : state.even[q]) + row.even;
      }
      if (state.target_logit != nullptr) {
        state.target_logit[q] = target_logit(block, q, state.target_logit[q]);
      }
    }
  }
}

template <typename A>
void fold_logits(const SoftmaxState<A>& state, const LogitBlock<A>& block, int64_t* keys, bool first) {
  if (block.queries == 0) {
    return;
  }
  const bool wide = aligned(block.logits, block.stride, sizeof(A)) && aligned(nullptr, block.size, sizeof(A));
  dispatch_pack<A>(wide, [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    fold_logits_kernel<A, N><<<grid_size(block.queries, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(state, block, keys, first);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}
#endif

} // namespace xsoftmax::cuda
