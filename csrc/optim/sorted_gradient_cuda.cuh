#pragma once

#include "cpu/dtypes.h"
#include "table/cuda_rows.cuh"
#include "table/cuda_sorted_ids.cuh"
#include "table/row_terms.h"
#include "table/sorted_ids.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

// Row-sparse gradients for the CUDA kernels of the row optimizers: sorted by row, so that the first
// of equal rows sums all of them.

namespace xsoftmax::cuda {

using namespace on_device;

/// A tensor whose row r begins at data + r * stride.
template <typename T>
struct DeviceRows {
  T* data = nullptr;
  int64_t stride = 0;

#ifdef __CUDACC__
  __device__ T* operator[](int64_t row) const { return data + row * stride; }
#endif
  /// Returns whether N elements at a multiple of N in a row can be loaded at once.
  bool packs(int64_t n) const {
    return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * n) == 0 && stride % n == 0;
  }
};

template <typename T>
DeviceRows<T> device_rows(const at::Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0)};
}

/// A row-sparse gradient, sorted by row. Its i-th row is values[order[i]] (values[i] if `order` is
/// empty), times coefficients[i] if there are coefficients.
template <typename T>
struct SortedGradient {
  const T* values;
  const int64_t* rows;
  IntegersView order;
  const at::opmath_type<T>* coefficients;
  at::opmath_type<T>* chunks; ///< [count / 32, width]: results of chunk_sums_kernel
  int64_t count, width;
  int64_t sources; ///< number of rows of values

#ifdef __CUDACC__
  __device__ int64_t place(int64_t i) const {
    const int64_t at = order.empty() ? i : order[i];
    CUDA_KERNEL_ASSERT(coefficients == nullptr || (at >= 0 && at < sources));
    return at;
  }
  __device__ at::opmath_type<T> coefficient(int64_t i) const {
    return coefficients == nullptr ? at::opmath_type<T>(1) : coefficients[i];
  }
#endif
};

#ifdef __CUDACC__
template <typename T>
__device__ inline bool begins(const SortedGradient<T>& g, int64_t i) {
  CUDA_KERNEL_ASSERT(i == 0 || g.rows[i - 1] <= g.rows[i]);
  return i == 0 || g.rows[i] != g.rows[i - 1];
}

/// Returns whether all 32 entries of a chunk belong to a row that began in an earlier chunk. Such
/// chunks are summed by chunk_sums_kernel, so that no single warp sums a very frequent row.
template <typename T>
__device__ inline bool whole_chunk(const SortedGradient<T>& g, int64_t chunk) {
  const int64_t begin = chunk * kWarp, end = begin + kWarp;
  return chunk > 0 && end <= g.count && g.rows[begin - 1] == g.rows[end - 1];
}

/// Adds coefficient * row. A coefficient of 0 adds nothing, even if the row holds NaN.
template <int K, int N, typename opmath, typename T>
__device__ inline void add_row(opmath (&sum)[K][N], opmath coefficient, const T* row, int64_t width,
                               int64_t d, int64_t stride) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (d + k * stride < width && coefficient != opmath(0)) {
      add_scaled(sum[k], coefficient, row + d + k * stride);
    }
  }
}

/// Sums the gradient of the row that begins at `first`, for K packs of N columns, `stride` apart,
/// from d on. Called by whole warps; sums in a fixed order.
template <int K, int N, typename T>
__device__ inline void sum_row(at::opmath_type<T> (&sum)[K][N], const SortedGradient<T>& g,
                               int64_t first, int64_t d, int64_t stride) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum[k][n] = 0;
    }
  }
  const int64_t row = g.rows[first];
  if (first + 1 == g.count || g.rows[first + 1] != row) {
    add_row(sum, g.coefficient(first), g.values + g.place(first) * g.width, g.width, d, stride);
    return;
  }
  for (int64_t begin = first; begin < g.count;) {
    int64_t chunk = begin / kWarp;
    if (begin % kWarp == 0 && begin > first) {
      const int64_t mine = chunk + lane();
      const unsigned whole = __ballot_sync(
          kAllLanes, mine < g.count / kWarp && g.rows[mine * kWarp + kWarp - 1] == row);
      const int chunks = __popc(whole); // the lowest lanes, because rows are sorted
#pragma unroll 2
      for (int c = 0; c < chunks; ++c) {
        add_row(sum, at::opmath_type<T>(1), g.chunks + (chunk + c) * g.width, g.width, d, stride);
      }
      chunk += chunks;
      begin = chunk * kWarp;
      if (chunks == kWarp) {
        continue;
      }
    }
    const int64_t mine = begin + lane(), end = (chunk + 1) * kWarp;
    const bool member = mine < end && mine < g.count && g.rows[mine] == row;
    const int members = __popc(__ballot_sync(kAllLanes, member)); // the lowest lanes
    const int64_t place = member ? g.place(mine) : 0;
    const at::opmath_type<T> coefficient = member ? g.coefficient(mine) : at::opmath_type<T>(0);
#pragma unroll 2
    for (int m = 0; m < members; ++m) {
      const at::opmath_type<T> member_coefficient = __shfl_sync(kAllLanes, coefficient, m);
      add_row(sum, member_coefficient, g.values + __shfl_sync(kAllLanes, place, m) * g.width,
              g.width, d, stride);
    }
    if (begin + members < end) {
      return;
    }
    begin = end;
  }
}

/// The same for rows of width 1, by one thread.
template <typename T>
__device__ inline at::opmath_type<T> sum_numbers(const SortedGradient<T>& g, int64_t first) {
  const int64_t row = g.rows[first];
  at::opmath_type<T> sum = 0;
  for (int64_t i = first; i < g.count && g.rows[i] == row;) {
    if (i % kWarp == 0 && whole_chunk(g, i / kWarp)) {
      sum += g.chunks[i / kWarp];
      i += kWarp;
    } else {
      const auto coefficient = g.coefficient(i);
      sum += coefficient == at::opmath_type<T>(0)
          ? coefficient
          : coefficient * at::opmath_type<T>(g.values[g.place(i)]);
      ++i;
    }
  }
  return sum;
}

/// Sums the chunks for which whole_chunk() is true. One warp per chunk and 32 N columns, selected
/// by blockIdx.y.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 2) chunk_sums_kernel(SortedGradient<T> g) {
  for (int64_t chunk = global_thread() / kWarp; chunk < g.count / kWarp;
       chunk += grid_threads() / kWarp) {
    if (!whole_chunk(g, chunk)) {
      continue;
    }
    const int64_t place = g.place(chunk * kWarp + lane()),
                  d = (int64_t(blockIdx.y) * kWarp + lane()) * N;
    const at::opmath_type<T> coefficient = g.coefficient(chunk * kWarp + lane());
    at::opmath_type<T> sum[1][N] = {};
#pragma unroll 4
    for (int m = 0; m < kWarp; ++m) {
      const at::opmath_type<T> member_coefficient = __shfl_sync(kAllLanes, coefficient, m);
      add_row(sum, member_coefficient, g.values + __shfl_sync(kAllLanes, place, m) * g.width,
              g.width, d, 0);
    }
    if (d < g.width) {
      store_pack(g.chunks + chunk * g.width + d, sum[0]);
    }
  }
}
#endif

/// A row-sparse gradient: values [R, D] or [R] for rows [R]; or terms (table/row_terms.h) with
/// sorted rows.
struct GradientOfRows {
  at::Tensor rows, values;
  at::Tensor sources = {}, coefficients = {}; ///< of terms, whose input is `values`

  GradientOfRows(const at::Tensor& rows, const at::Tensor& values) : rows(rows), values(values) {}
  explicit GradientOfRows(const RowTerms& terms)
      : rows(terms.rows), values(terms.input), sources(terms.sources),
        coefficients(terms.coefficients) {}

  /// Returns the negated gradient, to descend under "maximize".
  GradientOfRows negated() const {
    GradientOfRows result = *this;
    (coefficients.defined() ? result.coefficients : result.values) =
        (coefficients.defined() ? coefficients : values).neg();
    return result;
  }
};

/// Returns whether kernels can read the terms directly.
inline bool supports_terms(const RowTerms& terms, int64_t num_rows) {
  return are_sorted_ids(terms.rows, num_rows) && terms.sources.is_contiguous() &&
      terms.coefficients.is_contiguous();
}

/// The sorted gradient, with the tensors that keep its memory alive.
template <typename T>
struct GradientOnDevice {
  at::Tensor values, rows, order, coefficients, chunks;
  SortedGradient<T> view;

  GradientOnDevice(const GradientOfRows& gradient, int64_t num_rows)
      : values(gradient.values.contiguous()), coefficients(gradient.coefficients) {
    const at::Tensor& ids = gradient.rows;
    if (gradient.sources.defined()) {
      rows = ids;
      order = gradient.sources;
    } else if (are_sorted_ids(ids, num_rows)) {
      rows = ids;
    } else {
      const SortedIds sorted(ids, num_rows - 1);
      rows = sorted.ids();
      order = sorted.order;
    }
    const int64_t count = rows.numel(), width = values.dim() == 2 ? values.size(1) : 1;
    chunks = at::empty({count / kWarp, width},
                       values.options().dtype(opmath_dtype(values.scalar_type())));
    view = {values.const_data_ptr<T>(),
            rows.const_data_ptr<int64_t>(),
            IntegersView(order),
            coefficients.defined() ? coefficients.const_data_ptr<at::opmath_type<T>>() : nullptr,
            chunks.mutable_data_ptr<at::opmath_type<T>>(),
            count,
            width,
            values.size(0)};
  }
  bool wide() const {
    constexpr int64_t kPack = 16 / sizeof(T);
    return DeviceRows<const T>{view.values, view.width}.packs(kPack) &&
        DeviceRows<const at::opmath_type<T>>{view.chunks, view.width}.packs(kPack);
  }
  template <int N>
  void sum_chunks() const {
    if (view.count / kWarp > 1) {
      const dim3 grid(grid_size(view.count / kWarp, kThreads / kWarp),
                      unsigned((view.width + kWarp * N - 1) / (kWarp * N)));
      chunk_sums_kernel<T, N><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(view);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
};

} // namespace xsoftmax::cuda
