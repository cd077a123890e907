#pragma once

#include "core/cuda_rows.cuh"
#include "core/simd.h"
#include "scores/gather_dot_cuda.h"

#include <ATen/core/Tensor.h>

#include <limits>
#include <type_traits>

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
  A* max; ///< largest logit
  A* sum; ///< of e^(logit - max)
};

/// Turns scores into logits, as transform_logits (losses/logit_transform.h) does.
template <typename A>
struct LogitForm {
  A scale = 1, cap = 0; ///< cap: 0 for none

#ifdef __CUDACC__
  __device__ A logit(A score) const { return cap == A(0) ? score * scale : cap * tanh(score * (scale / cap)); }
  __device__ A derivative(A logit) const { return cap == A(0) ? scale : (1 - (logit / cap) * (logit / cap)) * scale; }
#endif
};

/// A block of classes.
template <typename A>
struct LogitBlock {
  const A* products; ///< [Q, size], rows `stride` apart: of the queries and the classes
  int64_t stride, queries, begin, size;
  const A* bias;         ///< [N], nullptr: zeros
  const A* class_weight; ///< [N], nullptr: ones
  const int64_t* target; ///< [Q], nullptr: none
  LogitForm<A> form = {};

  /// Whether kernels may read and write N columns at a time: rows begin on 16 bytes and have room behind their last column.
  bool wide() const {
    constexpr int64_t kPack = 16 / sizeof(A);
    return aligned(products, stride, sizeof(A)) && stride >= (size + kPack - 1) / kPack * kPack;
  }
#ifdef __CUDACC__
  __device__ A logit(A product, int64_t column) const { return form.logit(product + (bias == nullptr ? A(0) : bias[begin + column])); }
  __device__ A weight_of(int64_t column) const { return class_weight == nullptr ? A(1) : class_weight[begin + column]; }
  /// The logit of the target of a query, which is one of the classes.
  __device__ A target_logit(int64_t q) const {
    const int64_t column = target[q] - begin;
    return logit(products[q * stride + column], column);
  }
#endif
};

#ifdef __CUDACC__
/// e^(x - max) of logits that lie so far from a largest of -inf are 0.
template <typename A>
__device__ inline A finite_shift(A max) {
  return max == -A(__builtin_inf()) ? A(0) : max;
}

/// e^x for x <= 0, to a few units in the last place of 1: on a device one instruction of its own, where the polynomial of core/simd.h takes eighteen.
__device__ inline float exponential_below(float x) { return exp2f(x * 1.44269504088896341f); }
__device__ inline double exponential_below(double x) { return exp(x); }

/// The partial softmax of a row of logits, as fold_row returns it to every thread of the block.
template <typename A>
struct RowFold {
  A max, sum;  ///< the largest, and the sum of e^(logit - max)
  double even; ///< sum of class_weight * logit, where it is wanted
};

/// Folds the logits of a query in a block of classes. A NaN or +inf leaves a sum of NaN. keys [Q, size]: of float logits, integers in their order, the lower
/// class first among equals; nullptr: not wanted.
template <int N, typename A>
__device__ inline RowFold<A> fold_row(const LogitBlock<A>& block, int64_t q, bool want_even, int64_t* keys) {
  constexpr A kLeast = -A(__builtin_inf());
  __shared__ A storage[kWarp];
  __shared__ double wide_storage[kWarp];
  const A* row = block.products + q * block.stride;
  A max = kLeast, sum = 0;
  double even = 0;
  for (int64_t j = int64_t(threadIdx.x) * N; j < block.size; j += int64_t(blockDim.x) * N) {
    A x[N], top = max;
    const auto pack = load_pack<N>(row + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = j + i < block.size ? block.logit(pack.values[i], j + i) : kLeast;
      top = x[i] > top ? x[i] : top;
    }
    const A shift = finite_shift(top);
    if (top > max) {
      sum *= exponential_below(max - shift);
      max = top;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum += exponential_below(x[i] - shift);
      if (want_even && j + i < block.size) {
        even += double(x[i]) * double(block.weight_of(j + i));
      }
      if constexpr (std::is_same_v<A, float>) {
        if (keys != nullptr && j + i < block.size) { // + 0: both zeros are one
          keys[q * block.size + j + i] = int64_t(on_device::ordered(x[i] + 0.0f)) * (int64_t(1) << 32) + (0xFFFFFFFFll - (block.begin + j + i));
        }
      }
    }
  }
  const A top = block_max(max, kLeast, storage);
  sum = block_sum(sum * exponential_below(max - finite_shift(top)), storage);
  return {top, sum, want_even ? block_sum(even, wide_storage) : 0.0};
}

// A block of threads a query: folds the logits of a block of classes into its state; `first`: there is none yet.
template <typename A, int N>
__global__ void fold_logits_kernel(SoftmaxState<A> state, LogitBlock<A> block, int64_t* keys, bool first) {
  for (int64_t q = blockIdx.x; q < block.queries; q += gridDim.x) {
    const RowFold<A> row = fold_row<N>(block, q, false, keys);
    if (threadIdx.x == 0) {
      const A before = first ? -A(__builtin_inf()) : state.max[q], largest = row.max > before ? row.max : before, shift = finite_shift(largest);
      state.sum[q] = (first ? A(0) : state.sum[q] * exponential_below(before - shift)) + row.sum * exponential_below(row.max - shift);
      state.max[q] = largest;
    }
  }
}

template <typename A>
void fold_logits(const SoftmaxState<A>& state, const LogitBlock<A>& block, int64_t* keys, bool first) {
  if (block.queries == 0) {
    return;
  }
  dispatch_pack<A>(block.wide(), [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    fold_logits_kernel<A, N><<<grid_size(block.queries, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(state, block, keys, first);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}
#endif

} // namespace xsoftmax::cuda
