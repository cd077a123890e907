#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// candidate_set(ids [*, C], num_classes) -> [*, C]: the different classes of each set, int64, in rising order with -1 in place of repeats and
// of what was -1, which stands for none. ids: int64 in [0, num_classes) or -1.
at::Tensor candidate_set(const at::Tensor& ids, int64_t num_classes);

} // namespace xsoftmax
