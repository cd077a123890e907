#pragma once

#include "core/optional.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace xsoftmax::check {

/// While torch::autograd::AnomalyMode looks for NaN (in Python: torch.autograd.set_detect_anomaly(True)), raises ValueError where `arg` [*, D] holds a
/// number that is not finite. Queries that do not count may hold anything: with a `target` [*] or [*, T], those whose targets are all `ignore_index`.
/// Otherwise it does nothing, and costs a comparison. It reads values, and so waits for a device; traced and meta tensors pass.
void finite_queries(const char* op, const char* arg, const at::Tensor& queries, const OptionalTensor& target = std::nullopt, int64_t ignore_index = 0);

} // namespace xsoftmax::check
