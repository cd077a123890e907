#pragma once

#include "core/cpu_dispatch.h"
#include "core/simd.h"

#include <cstdint>

namespace xsoftmax {

/// The loops behind private and ragged candidate scores and their backward: rows of a table, picked by index, against one dense
/// row. Rows are `width` long; `stride` is the distance between rows of the table, in elements. Sums are in opmath<T>.
template <typename T>
struct RowKernels {
  /// out[j] = sum_d x[d] * table[index[j] * stride + d], j < n. index has `readable` >= n entries: the rows of those behind n are
  /// on their way to the cache for the next call.
  void (*dot_rows)(opmath<T>* out, const T* x, const T* table, int64_t stride, const int64_t* index, int64_t n, int64_t readable, int64_t width);
  /// sum[d] += sum_j coefficient[j] * table[index[j] * stride + d]; rows whose coefficient is 0 are not read
  void (*add_rows)(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index, const opmath<T>* coefficient, int64_t n, int64_t width);
  /// The same with =
  void (*sum_rows)(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index, const opmath<T>* coefficient, int64_t n, int64_t width);
  /// out[row[j] * width + d] = coefficient[j] * table[index[j] * width + d], j < n, past the caches: for more rows than they hold, which
  /// would otherwise be read before they are written. Null for a T whose sums are wider.
  void (*stream_rows)(T* out, const int64_t* row, const T* table, const int64_t* index, const opmath<T>* coefficient, int64_t n, int64_t width);
  /// out[d] = x[d], rounded to T
  void (*round_row)(T* out, const opmath<T>* x, int64_t width);
  /// out[d] = x[d], widened
  void (*widen_row)(opmath<T>* out, const T* x, int64_t width);
  /// out[j * width + d] = table[index[j] * stride + d], widened, j < n
  void (*widen_rows)(opmath<T>* out, const T* table, int64_t stride, const int64_t* index, int64_t n, int64_t width);
  /// The same, of a table of wide numbers, rounded to T
  void (*round_rows)(T* out, const opmath<T>* table, int64_t stride, const int64_t* index, int64_t n, int64_t width);
  /// The same as they are
  void (*copy_rows)(T* out, const T* table, int64_t stride, const int64_t* index, int64_t n, int64_t width);
};

struct RowKernelTable {
  RowKernels<float> f32;
  RowKernels<double> f64;
  RowKernels<Bf16> bf16;
  RowKernels<F16> f16;

  const RowKernels<float>& of(const float*) const { return f32; }
  const RowKernels<double>& of(const double*) const { return f64; }
  const RowKernels<Bf16>& of(const Bf16*) const { return bf16; }
  const RowKernels<F16>& of(const F16*) const { return f16; }
};

XS_DECLARE_ISA_TABLE(RowKernelTable, row_kernels)

} // namespace xsoftmax
