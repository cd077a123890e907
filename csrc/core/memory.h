#pragma once

#include <ATen/core/Tensor.h>

// Memory of CPU tensors. Elsewhere these are what their names say and no more.

namespace xsoftmax {

/// at::empty for what each step makes anew in the same size: gradients, scores, gathered rows. Of blocks between 256 KB and 64 MB, those
/// freed last, 64 MB at most in all, are kept for the next step: fresh pages cost more than writing them.
at::Tensor recycled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

/// Asks the operating system for huge pages behind a large tensor that is not yet written. Rows of a table of gigabytes are then found
/// without a walk through page tables that no cache holds. For smaller tensors, and where there is no such thing, it does nothing.
void advise_huge_pages(const at::Tensor& tensor);

/// at::empty and at::zeros of a class table, or of what stands beside one.
at::Tensor table_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor table_zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

/// at::as_strided, counted from the first element of `tensor`, and the transpose of a matrix, as they are below autograd:
/// a kernel that makes a view of its own memory need not ask the dispatcher for it.
at::Tensor strided_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t first = 0);
at::Tensor transposed(const at::Tensor& matrix);

} // namespace xsoftmax
