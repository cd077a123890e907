#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace xsoftmax {

// candidate_set(ids [*, C], num_classes) -> [*, C]: the different classes of each set, int64, in rising order with -1 in place of repeats and
// of what was -1, which stands for none. ids: int64 in [0, num_classes) or -1.
at::Tensor candidate_set(const at::Tensor& ids, int64_t num_classes);

// different_ids(ids [H], num_classes, owner, argument) -> [H]: a set of classes that never changes, int64 in [0, num_classes), sorted. Errors name
// owner and argument: TypeError, IndexError, or ValueError for a class that stands twice. For constructors: reads values.
at::Tensor different_ids(const at::Tensor& ids, int64_t num_classes, std::string_view owner, std::string_view argument);

} // namespace xsoftmax
