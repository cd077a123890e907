#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace xsoftmax {

/// Sparse rows on the CPU: the numbers of row i stand from offset[i] to offset[i + 1] - 1.
struct SparseRowsView {
  int64_t count, features;
  const int64_t* offset;
  const int32_t* column; ///< below `features`
  const float* value;
};

template <typename T>
std::span<const T> span_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), size_t(tensor.numel())};
}

namespace check {

/// One dimension, on the CPU.
void numbers(const char* op, const char* arg, const at::Tensor& tensor, at::ScalarType dtype);
/// Lists of int32 in [0, limit), those of list i from offsets[i] on; `rising`: each list rises. Contiguous tensors.
void lists(const char* op, const char* offsets_arg, const at::Tensor& offsets, const char* arg, const at::Tensor& numbers, int64_t limit, bool rising);
/// float32 [size], finite. Contiguous.
void finite_values(const char* op, const char* arg, const at::Tensor& values, int64_t size);
/// offsets, columns and values, contiguous.
SparseRowsView sparse_rows(const char* op, const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values, int64_t features, bool rising);

} // namespace check
} // namespace xsoftmax
