#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax::check {

/// Sets whether the host may read the values of CPU tensors. If false, CPU tensors take the code
/// path of device tensors, and can_read() (op/shape_checks.h) returns false for every tensor. Used
/// by tests/cuda_emulation, which counts launches.
void let_host_read(bool reads);
bool host_can_read();

/// Whether a tensor is on a device, or is treated so because the host may not read CPU tensors.
inline bool on_device(const at::Tensor& tensor) { return !tensor.is_cpu() || !host_can_read(); }

} // namespace xsoftmax::check
