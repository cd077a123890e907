#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace xsoftmax::check {

/// Raises ValueError if `queries` [*, D] (named `arg` in the message) holds a non-finite value and
/// torch::autograd::AnomalyMode checks for NaN (in Python:
/// torch.autograd.set_detect_anomaly(True)). Otherwise does nothing, at the cost of one comparison.
///
/// If `target` [*] or [*, T] is given, queries whose targets are all `ignore_index` are not
/// checked. The check reads values and therefore synchronises with the device. Traced and meta
/// tensors always pass.
void finite_queries(const char* op, const char* arg, const at::Tensor& queries,
                    const OptionalTensor& target = std::nullopt, int64_t ignore_index = 0);

} // namespace xsoftmax::check
