#pragma once

#include "core/cuda_launch.cuh"

#include <ATen/core/Tensor.h>
#include <ATen/cuda/cub.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <limits>

namespace xsoftmax::cuda {

#ifdef __CUDACC__
template <typename Id>
static __global__ void take_ids_kernel(Id* out, Id* places, const int64_t* first, int64_t first_count, const int64_t* second, int64_t count, int64_t last) {
  for (int64_t i = global_thread(); i < count; i += grid_threads()) {
    const int64_t id = i < first_count ? first[i] : second[i - first_count];
    CUDA_KERNEL_ASSERT(id >= 0 && id <= last);
    out[i] = Id(id);
    places[i] = Id(i);
  }
}

/// Rows of a table as int32 or int64 numbers; one of the pointers is nullptr.
struct IntegersView {
  const int32_t* narrow = nullptr;
  const int64_t* wide = nullptr;

  IntegersView() = default;
  explicit IntegersView(const at::Tensor& tensor)
      : narrow(tensor.defined() && tensor.scalar_type() == at::kInt ? tensor.const_data_ptr<int32_t>() : nullptr),
        wide(tensor.defined() && narrow == nullptr ? tensor.const_data_ptr<int64_t>() : nullptr) {}
  __device__ int64_t operator[](int64_t place) const { return narrow == nullptr ? wide[place] : int64_t(narrow[place]); }
  __device__ bool empty() const { return narrow == nullptr && wide == nullptr; }
};

/// SortedIds as a kernel reads them.
struct SortedIdsView {
  IntegersView ids, order;

  __device__ int64_t operator[](int64_t place) const { return ids[place]; }
};
#endif

/// Ids sorted, those of two tensors one behind the other, and the place where each stood; equal ones in the order of their places. An id that is not in
/// [0, last] stops the kernel (assert).
struct SortedIds {
  at::Tensor sorted, order; ///< [count], int32 where ids and places fit, else int64

#ifdef __CUDACC__
  SortedIds(const at::Tensor& given_first, int64_t last, const at::Tensor& given_second = at::Tensor()) {
    const at::Tensor first = given_first.contiguous(), second = given_second.defined() ? given_second.contiguous() : first.new_empty({0});
    const int64_t count = first.numel() + second.numel();
    // A radix sort passes over all keys and places once for each byte of a key.
    constexpr int64_t kMostNarrow = std::numeric_limits<int32_t>::max();
    last <= kMostNarrow&& count <= kMostNarrow ? sort<int32_t>(first, second, last) : sort<int64_t>(first, second, last);
  }

  int64_t count() const { return sorted.numel(); }
  /// Returns the ids as int64, in a launch of its own where they are narrow.
  at::Tensor ids() const { return sorted.to(at::kLong); }
  SortedIdsView view() const { return {IntegersView(sorted), IntegersView(order)}; }

 private:
  template <typename Id>
  void sort(const at::Tensor& first, const at::Tensor& second, int64_t last) {
    const int64_t count = first.numel() + second.numel();
    // taken, places, sorted, order: four arrays of one allocation.
    const at::Tensor memory = at::empty({4, count}, first.options().dtype(c10::CppTypeToScalarType<Id>::value));
    sorted = memory.select(0, 2);
    order = memory.select(0, 3);
    if (count == 0) {
      return;
    }
    Id* const taken = memory.mutable_data_ptr<Id>();
    take_ids_kernel<<<grid_size(count, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        taken, taken + count, first.const_data_ptr<int64_t>(), first.numel(), second.const_data_ptr<int64_t>(), count, last);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    at::cuda::cub::radix_sort_pairs(taken, taken + 2 * count, taken + count, taken + 3 * count, count, /*descending=*/false, /*begin_bit=*/0,
                                    /*end_bit=*/std::max<int64_t>(1, std::bit_width(uint64_t(last))));
  }
#endif
};

} // namespace xsoftmax::cuda
