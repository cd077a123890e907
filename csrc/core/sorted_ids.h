#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// The rows of the gradients that the library makes never fall. An optimizer on a device cannot see that without a wait, and sorting them once more takes three
// launches: so who makes them notes it, and who reads them asks. Kernels that rely on it assert it, since ids may have been written to in the meantime.

/// Notes that ids [R] never fall and lie in [0, limit).
void note_sorted_ids(const at::Tensor& ids, int64_t limit);

/// Whether that was noted of these ids, or of a tensor whose memory they are.
bool are_sorted_ids(const at::Tensor& ids, int64_t limit);

} // namespace xsoftmax
