#pragma once
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
namespace at::cuda {
using c10::cuda::getCurrentCUDAStream;
/// A small device, so that grids limited to its size use their stride loop.
struct DeviceProperties {
  int multiProcessorCount = 4;
  int warpSize = 32;
  int maxThreadsPerMultiProcessor = 2048;
  int major = 9, minor = 0;
};
inline const DeviceProperties* getCurrentDeviceProperties() {
  static const DeviceProperties properties;
  return &properties;
}
} // namespace at::cuda
