#include "op/cuda_launch.cuh"
#include "table/updates/deferred_flushes.h"

namespace xsoftmax {

static bool stream_captures(c10::Device device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status) ==
      cudaSuccess &&
      status != cudaStreamCaptureStatusNone;
}

static const RegisterCaptureQuery capture_query(stream_captures);

} // namespace xsoftmax
