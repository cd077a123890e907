#pragma once

#include "core/cuda_launch.cuh"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <limits>
#include <tuple>

namespace xsoftmax::cuda {

#ifdef __CUDACC__
template <typename Id>
static __global__ void take_ids_kernel(Id* out, const int64_t* first, int64_t first_count, const int64_t* second, int64_t count, int64_t last) {
  for (int64_t i = global_thread(); i < count; i += grid_threads()) {
    const int64_t id = i < first_count ? first[i] : second[i - first_count];
    CUDA_KERNEL_ASSERT(id >= 0 && id <= last);
    out[i] = Id(id);
  }
}

/// SortedIds as a kernel reads them; narrow or wide is nullptr.
struct SortedIdsView {
  const int32_t* narrow;
  const int64_t* wide;
  const int64_t* order;

  __device__ int64_t operator[](int64_t place) const { return narrow == nullptr ? wide[place] : int64_t(narrow[place]); }
};
#endif

/// Ids sorted, those of two tensors one behind the other, and the place where each stood; equal ones in the order of their places. An id that is not in
/// [0, last] stops the kernel (assert).
struct SortedIds {
  at::Tensor sorted, order; ///< [count], sorted as int32 where `last` fits

#ifdef __CUDACC__
  SortedIds(const at::Tensor& given_first, int64_t last, const at::Tensor& given_second = at::Tensor()) {
    // A radix sort passes over all ids once for each byte of one.
    const bool is_narrow = last <= std::numeric_limits<int32_t>::max();
    const at::Tensor first = given_first.contiguous(), second = given_second.defined() ? given_second.contiguous() : first.new_empty({0});
    const int64_t count = first.numel() + second.numel();
    const at::Tensor taken = at::empty({count}, first.options().dtype(is_narrow ? at::kInt : at::kLong));
    if (count > 0) {
      const auto launch = [&](auto* out) {
        take_ids_kernel<<<grid_size(count, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(out, first.const_data_ptr<int64_t>(), first.numel(),
                                                                                                        second.const_data_ptr<int64_t>(), count, last);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      };
      is_narrow ? launch(taken.mutable_data_ptr<int32_t>()) : launch(taken.mutable_data_ptr<int64_t>());
    }
    std::tie(sorted, order) = taken.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  }

  int64_t count() const { return sorted.numel(); }
  /// As int64, in a launch of its own where they are narrow.
  at::Tensor ids() const { return sorted.to(at::kLong); }
  SortedIdsView view() const {
    const bool is_narrow = sorted.scalar_type() == at::kInt;
    return {is_narrow ? sorted.const_data_ptr<int32_t>() : nullptr, is_narrow ? nullptr : sorted.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>()};
  }
#endif
};

} // namespace xsoftmax::cuda
