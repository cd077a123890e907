#pragma once

#include "table/cuda_rows.cuh"

#include <ATen/core/Tensor.h>

#include <optional>

// The table of edges as CUDA kernels read it, and helpers shared by the tree kernels. The kernels
// assert every entry of a tree's tables that they read, because the tables may come from an
// untrusted state dict.

namespace xsoftmax::cuda {

template <typename T>
struct EdgeTable {
  const T* weight;
  const T* bias; ///< nullptr: no bias
  int64_t stride, features;

  /// `weight` has unit column stride; `bias` is contiguous or undefined.
  EdgeTable(const at::Tensor& weight, const at::Tensor& bias)
      : weight(weight.const_data_ptr<T>()),
        bias(bias.defined() ? bias.const_data_ptr<T>() : nullptr), stride(weight.stride(0)),
        features(weight.size(1)) {}

  /// Whether rows of the table, and of a contiguous matrix `x` of the same width, can be read 16
  /// bytes at a time.
  bool wide(const T* x) const {
    return aligned(x, features, sizeof(T)) && aligned(weight, stride, sizeof(T));
  }
};

#ifdef __CUDACC__
constexpr int kRowsAtOnce = 4;                ///< rows that a warp loads at the same time
constexpr int kRowLanes = kWarp / kRowsAtOnce; ///< lanes that hold a row's sum

/// Returns, in lane l, <x, row> + bias of the edge edges[l / kRowLanes], or 0 for edge -1, whose
/// row is not read. `edges` must be the same in all lanes, and all lanes must call it. The order of
/// the additions is fixed.
template <typename T, int N>
__device__ inline at::opmath_type<T> score_edges(const EdgeTable<T>& table, const T* x,
                                                 const int64_t (&edges)[kRowsAtOnce]) {
  using opmath = at::opmath_type<T>;
  static_assert(kRowsAtOnce == 4);
  opmath sum[kRowsAtOnce] = {};
  for (int64_t d = lane() * N; d < table.features; d += kWarp * N) {
    Pack<T, N> row[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      row[r] =
          edges[r] < 0 ? Pack<T, N>{} : load_pack<N>(table.weight + edges[r] * table.stride + d);
    }
    const auto a = load_pack<N>(x + d);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
      for (int i = 0; i < N && edges[r] >= 0; ++i) {
        sum[r] += opmath(a.values[i]) * opmath(row[r].values[i]);
      }
    }
  }
  // Each exchange halves the number of rows a lane sums: 6 shuffles instead of 20.
  const bool upper = (lane() & 16) != 0, odd = (lane() & 8) != 0;
  const opmath first =
      (upper ? sum[2] : sum[0]) + __shfl_xor_sync(kAllLanes, upper ? sum[0] : sum[2], 16);
  const opmath second =
      (upper ? sum[3] : sum[1]) + __shfl_xor_sync(kAllLanes, upper ? sum[1] : sum[3], 16);
  opmath score = (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 8);
#pragma unroll
  for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
    score += __shfl_xor_sync(kAllLanes, score, distance);
  }
  const int r = lane() / kRowLanes;
  const int64_t mine = r < 2 ? (r == 0 ? edges[0] : edges[1]) : (r == 2 ? edges[2] : edges[3]);
  return mine >= 0 && table.bias != nullptr ? score + opmath(table.bias[mine]) : score;
}

/// Returns the parent of `node`, which is not the root.
__device__ inline int64_t node_above(const int64_t* parent, int64_t node) {
  const int64_t above = parent[node];
  CUDA_KERNEL_ASSERT(above >= 0 && above < node);
  return above;
}

struct ChildRange { int64_t begin, end; };

__device__ inline ChildRange children_of(const int64_t* first_child, int64_t node, int64_t nodes) {
  const ChildRange range{first_child[node], first_child[node + 1]};
  CUDA_KERNEL_ASSERT(range.begin > node && range.begin <= range.end && range.end <= nodes);
  return range;
}
#endif

} // namespace xsoftmax::cuda
