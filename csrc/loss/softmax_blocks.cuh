#pragma once

#include "table/cuda_rows.cuh"
#include "cpu/simd.h"
#include "table/gather_dot_cuda.h"

#include <ATen/core/Tensor.h>

#include <limits>
#include <type_traits>

// Shared CUDA code of the exact losses. They process the classes in blocks: ATen computes the
// products of a block, so that [Q, N] is never in memory, and kernels fold the softmax of a query
// block by block.

namespace xsoftmax::cuda {

/// Returns the number of classes per block. Their logits fit into the L2 cache until the next
/// kernel reads them.
inline int64_t class_block(int64_t queries, int64_t classes, size_t element) {
  constexpr int64_t kBytes = 32 << 20, kMin = 1024, kMax = 16384, kStep = 64;
  const int64_t fitting =
      kBytes / (std::max<int64_t>(1, queries) * int64_t(element)) / kStep * kStep;
  return std::max<int64_t>(1, std::min(classes, std::clamp(fitting, kMin, kMax)));
}

/// Writes the logits of classes [begin, begin + size), without bias, to `out` [Q, size].
inline void block_products(const at::Tensor& out, const at::Tensor& query, const at::Tensor& weight,
                           int64_t begin, int64_t size) {
  product_out_cuda(out, query, weight.narrow(0, begin, size).t());
}

/// The running softmax of each query [Q].
template <typename A>
struct SoftmaxState {
  A* max; ///< largest logit
  A* sum; ///< sum of e^(logit - max)
};

/// Turns scores into logits, as transform_logits (estimator/logit_transform.h) does.
template <typename A>
struct LogitMap {
  A scale = 1, cap = 0; ///< cap: 0 for no cap

#ifdef __CUDACC__
  __device__ A logit(A score) const {
    return cap == A(0) ? score * scale : cap * tanh(score * (scale / cap));
  }
  __device__ A derivative(A logit) const {
    return cap == A(0) ? scale : (1 - (logit / cap) * (logit / cap)) * scale;
  }
#endif
};

/// The products and parameters of a block of classes.
template <typename A>
struct LogitBlock {
  const A* products; ///< [Q, size] with row stride `stride`: products of queries and classes
  int64_t stride, queries, begin, size;
  const A* bias;         ///< [N]; nullptr: zeros
  const A* class_weight; ///< [N]; nullptr: ones
  const int64_t* target; ///< [Q]; nullptr if not needed
  LogitMap<A> form = {};

  /// Whether kernels may read and write 16 bytes at a time: rows are aligned and padded to 16
  /// bytes.
  bool wide() const {
    constexpr int64_t kPack = 16 / sizeof(A);
    return aligned(products, stride, sizeof(A)) && stride >= (size + kPack - 1) / kPack * kPack;
  }
#ifdef __CUDACC__
  __device__ A logit(A product, int64_t column) const {
    return form.logit(product + (bias == nullptr ? A(0) : bias[begin + column]));
  }
  __device__ A weight_of(int64_t column) const {
    return class_weight == nullptr ? A(1) : class_weight[begin + column];
  }
  /// Returns the logit of the target of a query. The target must be in this block.
  __device__ A target_logit(int64_t q) const {
    const int64_t column = target[q] - begin;
    return logit(products[q * stride + column], column);
  }
#endif
};

#ifdef __CUDACC__
/// Returns max, or 0 for -inf: then e^(x - shift) of logits of -inf is 0, not NaN.
template <typename A>
__device__ inline A finite_shift(A max) {
  return max == -A(__builtin_inf()) ? A(0) : max;
}

/// Returns e^x for x <= 0, with an absolute error of a few float ulp of 1. On a GPU exp2f is one
/// hardware instruction, whereas the polynomial of cpu/simd.h takes eighteen.
__device__ inline float exponential_below(float x) { return exp2f(x * 1.44269504088896341f); }
__device__ inline double exponential_below(double x) { return exp(x); }

/// The partial softmax of a row of logits. fold_row returns it to every thread of the block.
template <typename A>
struct RowFold {
  A max, sum;  ///< the largest logit, and the sum of e^(logit - max)
  double weighted_sum; ///< sum of class_weight * logit, or 0 if not needed
};

/// Folds the logits of a query in a block of classes. A NaN or +inf makes the sum NaN. keys [Q,
/// size] receives, for float logits, int64 keys that sort by logit and put the lower class first
/// among equals; nullptr if not needed.
template <int N, typename A>
__device__ inline RowFold<A> fold_row(const LogitBlock<A>& block, int64_t q, bool want_weighted_sum,
                                      int64_t* keys) {
  constexpr A kMin = -A(__builtin_inf());
  __shared__ A storage[kWarp];
  __shared__ double wide_storage[kWarp];
  const A* row = block.products + q * block.stride;
  A max = kMin, sum = 0;
  double weighted_sum = 0;
  for (int64_t j = int64_t(threadIdx.x) * N; j < block.size; j += int64_t(blockDim.x) * N) {
    A x[N], top = max;
    const auto pack = load_pack<N>(row + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = j + i < block.size ? block.logit(pack.values[i], j + i) : kMin;
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
      if (want_weighted_sum && j + i < block.size) {
        weighted_sum += double(x[i]) * double(block.weight_of(j + i));
      }
      if constexpr (std::is_same_v<A, float>) {
        if (keys != nullptr && j + i < block.size) { // + 0 maps -0 to +0
          keys[q * block.size + j + i] =
              int64_t(on_device::ordered(x[i] + 0.0f)) * (int64_t(1) << 32) +
              (0xFFFFFFFFll - (block.begin + j + i));
        }
      }
    }
  }
  const A top = block_max(max, kMin, storage);
  sum = block_sum(sum * exponential_below(max - finite_shift(top)), storage);
  return {top, sum, want_weighted_sum ? block_sum(weighted_sum, wide_storage) : 0.0};
}

// Folds the logits of a block of classes into the state of each query, with one thread block per
// query. `first`: the state is not initialised yet.
template <typename A, int N>
__global__ void fold_logits_kernel(SoftmaxState<A> state, LogitBlock<A> block, int64_t* keys,
                                   bool first) {
  for (int64_t q = blockIdx.x; q < block.queries; q += gridDim.x) {
    const RowFold<A> row = fold_row<N>(block, q, false, keys);
    if (threadIdx.x == 0) {
      const A before = first ? -A(__builtin_inf()) : state.max[q],
              largest = row.max > before ? row.max : before, shift = finite_shift(largest);
      state.sum[q] = (first ? A(0) : state.sum[q] * exponential_below(before - shift)) +
          row.sum * exponential_below(row.max - shift);
      state.max[q] = largest;
    }
  }
}

template <typename A>
void fold_logits(const SoftmaxState<A>& state, const LogitBlock<A>& block, int64_t* keys,
                 bool first) {
  if (block.queries == 0) {
    return;
  }
  dispatch_pack<A>(block.wide(), [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    fold_logits_kernel<A, N>
        <<<grid_size(block.queries, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            state, block, keys, first);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}
#endif

} // namespace xsoftmax::cuda
