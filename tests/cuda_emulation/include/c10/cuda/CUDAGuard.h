#pragma once
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
namespace c10::cuda {
/// Emulated kernels get CPU tensors.
struct CUDAGuard {
  explicit CUDAGuard(c10::Device device) {
    TORCH_INTERNAL_ASSERT(device.is_cpu(), "expected CPU tensors, got one on ", device);
  }
};
} // namespace c10::cuda
