#pragma once

#include "cpu/cpu_dispatch.h"
#include "cpu/simd.h"

#include <cstdint>

namespace xsoftmax {

/// Inner loops of private and ragged candidate scores and their backward: rows of a table, picked
/// by index, against one dense row. Rows have `width` elements; `stride` is the distance between
/// rows of the table in elements. Sums are in opmath<T>.
template <typename T>
struct RowKernels {
  /// out[j] = sum_d x[d] * table[index[j] * stride + d], j < n. index has `readable` >= n entries;
  /// the rows of entries from n on are prefetched for the next call.
  void (*dot_rows)(opmath<T>* out, const T* x, const T* table, int64_t stride, const int64_t* index,
                   int64_t n, int64_t readable, int64_t width);
  /// sum[d] += sum_j coefficient[j] * table[index[j] * stride + d]. Rows with coefficient 0 are not
  /// read.
  void (*add_rows)(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index,
                   const opmath<T>* coefficient, int64_t n, int64_t width);
  /// Like add_rows, with = instead of +=.
  void (*sum_rows)(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index,
                   const opmath<T>* coefficient, int64_t n, int64_t width);
  /// out[row[j] * width + d] = coefficient[j] * table[index[j] * width + d], j < n, with
  /// non-temporal stores. For outputs larger than the caches, which ordinary stores would read
  /// first. Null if opmath<T> is not T.
  void (*stream_rows)(T* out, const int64_t* row, const T* table, const int64_t* index,
                      const opmath<T>* coefficient, int64_t n, int64_t width);
  /// out[d] = x[d], rounded to T
  void (*round_row)(T* out, const opmath<T>* x, int64_t width);
  /// out[d] = x[d], widened
  void (*widen_row)(opmath<T>* out, const T* x, int64_t width);
  /// out[j * width + d] = table[index[j] * stride + d], widened, j < n
  void (*widen_rows)(opmath<T>* out, const T* table, int64_t stride, const int64_t* index,
                     int64_t n, int64_t width);
  /// The same from a table in opmath<T>, rounded to T
  void (*round_rows)(T* out, const opmath<T>* table, int64_t stride, const int64_t* index,
                     int64_t n, int64_t width);
  /// The same without conversion
  void (*copy_rows)(T* out, const T* table, int64_t stride, const int64_t* index, int64_t n,
                    int64_t width);
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
