#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// Returns the ids of a set, int64 [M] on a CUDA device, in ascending order.
///
///     ids.sort().values
///
/// A set of up to 4,096 ids takes one launch, in which each block reads the set once. A radix sort
/// of so few ids would keep a single block busy for longer than the draws take.
at::Tensor sorted_set_cuda(const at::Tensor& ids);

} // namespace xsoftmax
