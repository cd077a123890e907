#pragma once

#include <ATen/core/Tensor.h>

// Allocation of CPU tensors. On other devices these functions apply no optimization.

namespace xsoftmax {

/// Returns at::empty(sizes, options) from a cache, for tensors that each step allocates in the same
/// size: gradients, scores, gathered rows. Freed blocks between 256 KB and 64 MB are kept for the
/// next step, the most recent ones up to 64 MB in all, because mapping fresh pages costs more than
/// writing them.
at::Tensor recycled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

/// Asks the operating system to back a large, not yet written tensor with huge pages, which avoids
/// most TLB misses when reading scattered rows of a table of gigabytes. Does nothing for tensors of
/// 32 MB or less, or if huge pages are not supported.
void advise_huge_pages(const at::Tensor& tensor);

/// Return at::empty and at::zeros with huge pages, for a class table or a tensor of similar size,
/// such as optimizer state.
at::Tensor table_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor table_zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

/// Return a strided view that begins at element `first` of `tensor`, like at::as_strided, and the
/// transpose of a matrix. Both bypass autograd and the dispatcher, which a kernel does not need for
/// views of its own memory.
at::Tensor strided_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                        int64_t first = 0);
at::Tensor transposed(const at::Tensor& matrix);

} // namespace xsoftmax
