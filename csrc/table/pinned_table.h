#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// Returns zeros of shape `sizes`, with dtype and device of `like`, in page-locked memory of the
/// host, which kernels of the device address directly: a table larger than the device's memory. On
/// a CPU these are zeros in huge pages.
///
/// Errors: negative sizes, or 2^63 bytes or more; a CUDA tensor without a CUDA build; the host's
/// memory cannot be locked.
at::Tensor pinned_table(const at::Tensor& like, at::IntArrayRef sizes);

/// Checks the sizes, and returns the bytes of the table.
size_t check_pinned_table(const at::Tensor& like, at::IntArrayRef sizes);

} // namespace xsoftmax
