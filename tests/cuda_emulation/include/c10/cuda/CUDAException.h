#pragma once
// Launches are checked before they return.
#define C10_CUDA_KERNEL_LAUNCH_CHECK() (void)0
#define C10_CUDA_CHECK(expression) \
  TORCH_CHECK((expression) == cudaSuccess, "CUDA error: " #expression)
