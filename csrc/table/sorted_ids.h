#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// A registry of sorted id tensors. The library's gradients have sorted rows, but an optimizer on a
// device cannot check that without a synchronisation, and sorting again takes up to eleven
// launches. So the producer notes that the ids are sorted, and the consumer asks. Kernels that rely
// on it assert it, because the ids may have been overwritten in the meantime.

/// Records that ids [R] are sorted (non-decreasing) and in [0, limit).
void note_sorted_ids(const at::Tensor& ids, int64_t limit);

/// Returns whether this was recorded for ids, or for a tensor with the same memory.
bool are_sorted_ids(const at::Tensor& ids, int64_t limit);

} // namespace xsoftmax
