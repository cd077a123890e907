#include "op/cuda_launch.cuh"
#include "table/pinned_table.h"
#include "table/updates/deferred_flushes.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>

namespace xsoftmax {

// Frees page-locked memory once no kernel of the device uses it. Errors are ignored: nothing can be
// done about them here, and the next launch must not report them.
static void free_pinned(void* host, c10::DeviceIndex device) {
  int current = 0;
  (void)cudaGetDevice(&current);
  (void)cudaSetDevice(device);
  (void)cudaDeviceSynchronize(); // kernels of any stream may still use the table
  (void)cudaFreeHost(host);
  (void)cudaSetDevice(current);
  (void)cudaGetLastError();
}

// Kernels read and write the rows over the bus. An embedding reads each row once, so a copy to the
// device ahead of the step would move as much, and could become stale before it is used.
static at::Tensor pinned_table_cuda(const at::Tensor& like, at::IntArrayRef sizes) {
  const size_t bytes = check_pinned_table(like, sizes);
  const c10::cuda::CUDAGuard guard(like.device());
  run_deferred_flushes(); // may free memory
  if (bytes == 0) {
    return at::zeros(sizes, like.options());
  }
  void *host = nullptr, *mapped = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&host, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) {
    (void)cudaGetLastError(); // or the next launch would report it
    TORCH_CHECK(false, "pinned_table: the host cannot lock ", bytes,
                " bytes of memory: ", cudaGetErrorString(error));
  }
  const auto release = [host, device = like.device()](void*) {
    const auto free = [host, device] { free_pinned(host, device.index()); };
    is_capturing(device) ? defer_work(device, free) : free(); // either call would end the capture
  };
  if (cudaHostGetDevicePointer(&mapped, host, 0) != cudaSuccess) {
    (void)cudaGetLastError();
    release(host);
    TORCH_CHECK(false, "pinned_table: ", like.device(), " cannot address memory of the host");
  }
  std::memset(host, 0, bytes);
  return at::from_blob(mapped, sizes, release, like.options(), like.device());
}

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("pinned_table", pinned_table_cuda); }

} // namespace xsoftmax
