#pragma once

#include "core/cuda_launch.cuh"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <limits>
#include <tuple>

namespace xsoftmax::cuda {

#ifdef __CUDACC__
template <typename Id>
static __global__ void take_ids_kernel(Id* out, const int64_t* ids, int64_t count, int64_t last) {
  for (int64_t i = global_thread(); i < count; i += grid_threads()) {
    CUDA_KERNEL_ASSERT(ids[i] >= 0 && ids[i] <= last);
    out[i] = Id(ids[i]);
  }
}
#endif

/// Ids sorted, [count] int64, and the place where each stood; equal ones in the order of their places. An id that is not in [0, last] stops the
/// kernel (assert).
struct SortedIds {
  at::Tensor ids, order;

#ifdef __CUDACC__
  SortedIds(const at::Tensor& unsorted, int64_t last) {
    // A radix sort passes over all ids once for each byte of one.
    const bool narrow = last <= std::numeric_limits<int32_t>::max();
    const at::Tensor given = unsorted.contiguous(), taken = at::empty(given.sizes(), given.options().dtype(narrow ? at::kInt : at::kLong));
    if (const int64_t count = given.numel(); count > 0) {
      const auto launch = [&](auto* out) {
        take_ids_kernel<<<grid_size(count, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(out, given.const_data_ptr<int64_t>(), count, last);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      };
      narrow ? launch(taken.mutable_data_ptr<int32_t>()) : launch(taken.mutable_data_ptr<int64_t>());
    }
    std::tie(ids, order) = taken.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    ids = ids.to(at::kLong);
  }
#endif
};

} // namespace xsoftmax::cuda
