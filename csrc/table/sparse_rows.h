#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace xsoftmax {

/// Sparse rows on the CPU (CSR): row i has the entries offset[i] .. offset[i + 1] - 1.
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

/// Checks for a 1-D strided tensor of `dtype` on the CPU. Otherwise raises ValueError or TypeError.
void numbers(const char* op, const char* arg, const at::Tensor& tensor, at::ScalarType dtype);
/// Checks lists of int32 in [0, limit): list i has the numbers offsets[i] .. offsets[i + 1] - 1.
/// `rising`: each list must be strictly increasing. Tensors must be contiguous.
void lists(const char* op, const char* offsets_arg, const at::Tensor& offsets, const char* arg,
           const at::Tensor& numbers, int64_t limit, bool rising);
/// Checks for float32 [size] with finite values. Must be contiguous.
void finite_values(const char* op, const char* arg, const at::Tensor& values, int64_t size);
/// Checks the tensors of sparse rows, which must be contiguous, and returns a view of them.
SparseRowsView sparse_rows(const char* op, const at::Tensor& offsets, const at::Tensor& columns,
                           const at::Tensor& values, int64_t features, bool rising);

} // namespace check
} // namespace xsoftmax
