#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// Returns the ids of a set, int64 [M] on a CUDA device, in rising order.
///
///     ids.sort().values
///
/// A set of up to 4,096 ids is one launch that reads it once per block: a radix sort of so few keeps
/// a single block busy for longer than the draws take.
at::Tensor sorted_set_cuda(const at::Tensor& ids);

} // namespace xsoftmax
