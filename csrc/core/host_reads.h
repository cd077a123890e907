#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax::check {

/// False: CPU tensors take the path of a device's, whose values the host does not look at; can_read (core/shape_checks.h) is then false for all. For
/// tests/cuda_emulation, which counts launches.
void let_host_read(bool reads);
bool host_reads();

/// Whether a tensor lies on a device, or counts as one that does.
inline bool on_device(const at::Tensor& tensor) { return !tensor.is_cpu() || !host_reads(); }

} // namespace xsoftmax::check
