#pragma once

#include "op/cuda_launch.cuh"

#include <ATen/OpMathType.h>

#include <type_traits>

// Reading and writing rows of a table in kernels: a warp or a block per row; each thread handles N
// adjacent elements at a time.

namespace xsoftmax::cuda {

/// Returns whether every row of a [*, width] matrix starts on a 16-byte boundary.
inline bool aligned(const void* base, int64_t row_stride, size_t element) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && row_stride * int64_t(element) % 16 == 0;
}

/// Calls function(std::integral_constant<int, N>) with N elements per load: 16 bytes of T if `wide`
/// (all rows are aligned), else one element.
template <typename T, typename Function>
void dispatch_pack(bool wide, Function&& function) {
  if (wide) {
    function(std::integral_constant<int, 16 / sizeof(T)>{});
  } else {
    function(std::integral_constant<int, 1>{});
  }
}

#ifdef __CUDACC__
/// N elements for one load instruction. Pointers must be aligned to sizeof(T) * N.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

template <int N, typename T>
__device__ inline Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

/// Returns the dot product of two rows, computed by a warp, in every lane.
template <typename T, int N>
__device__ inline at::opmath_type<T> dot_row(const T* x, const T* row, int64_t width) {
  using opmath = at::opmath_type<T>;
  opmath sum = 0;
  for (int64_t d = lane() * N; d < width; d += kWarp * N) {
    const auto a = load_pack<N>(x + d), b = load_pack<N>(row + d);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum += opmath(a.values[i]) * opmath(b.values[i]);
    }
  }
  return warp_sum(sum);
}

template <typename opmath, typename T, int N>
__device__ inline void add_scaled(opmath (&sum)[N], opmath coefficient, const T* row) {
  const auto pack = load_pack<N>(row);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] += coefficient * opmath(pack.values[i]);
  }
}

template <typename T, int N, typename opmath>
__device__ inline void store_pack(T* to, const opmath (&sum)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    pack.values[i] = T(sum[i]);
  }
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}
#endif

} // namespace xsoftmax::cuda
