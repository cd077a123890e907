#pragma once

#include "op/cuda_launch.cuh"

#include <ATen/core/Tensor.h>
#include <ATen/cuda/cub.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <limits>

namespace xsoftmax::cuda {

#ifdef __CUDACC__
template <typename Id>
static __global__ void take_ids_kernel(Id* out, Id* places, const int64_t* first,
                                       int64_t first_count, const int64_t* second, int64_t count,
                                       int64_t last) {
  for (int64_t i = global_thread(); i < count; i += grid_threads()) {
    const int64_t id = i < first_count ? first[i] : second[i - first_count];
    CUDA_KERNEL_ASSERT(id >= 0 && id <= last);
    out[i] = Id(id);
    places[i] = Id(i);
  }
}

/// Integers that are stored as int32 or int64; one of the pointers is nullptr.
struct IntegersView {
  const int32_t* narrow = nullptr;
  const int64_t* wide = nullptr;

  IntegersView() = default;
  explicit IntegersView(const at::Tensor& tensor)
      : narrow(tensor.defined() && tensor.scalar_type() == at::kInt
                   ? tensor.const_data_ptr<int32_t>()
                   : nullptr),
        wide(tensor.defined() && narrow == nullptr ? tensor.const_data_ptr<int64_t>() : nullptr) {}
  __device__ int64_t operator[](int64_t place) const {
    return narrow == nullptr ? wide[place] : int64_t(narrow[place]);
  }
  __device__ bool empty() const { return narrow == nullptr && wide == nullptr; }
};

/// Device view of SortedIds.
struct SortedIdsView {
  IntegersView ids, order;

  __device__ int64_t operator[](int64_t place) const { return ids[place]; }
};
#endif

/// Sorts the concatenated ids of two tensors, together with their positions. The sort is stable. An
/// id outside [0, last] fails a device assertion.
struct SortedIds {
  at::Tensor sorted, order; ///< [count]; int32 if ids and positions fit, else int64

#ifdef __CUDACC__
  SortedIds(const at::Tensor& first_ids, int64_t last,
            const at::Tensor& second_ids = at::Tensor()) {
    const at::Tensor first = first_ids.contiguous(),
                     second = second_ids.defined() ? second_ids.contiguous() : first.new_empty({0});
    const int64_t count = first.numel() + second.numel();
    // A radix sort makes one pass over all keys and values per byte of a key.
    constexpr int64_t kMaxNarrow = std::numeric_limits<int32_t>::max();
    last <= kMaxNarrow&& count <= kMaxNarrow ? sort<int32_t>(first, second, last)
                                             : sort<int64_t>(first, second, last);
  }

  int64_t count() const { return sorted.numel(); }
  /// Returns the sorted ids as int64. Costs a launch if they are int32.
  at::Tensor ids() const { return sorted.to(at::kLong); }
  SortedIdsView view() const { return {IntegersView(sorted), IntegersView(order)}; }

 private:
  template <typename Id>
  void sort(const at::Tensor& first, const at::Tensor& second, int64_t last) {
    const int64_t count = first.numel() + second.numel();
    // Four arrays in one allocation: unsorted ids, unsorted positions, sorted ids, sorted
    // positions.
    const at::Tensor memory =
        at::empty({4, count}, first.options().dtype(c10::CppTypeToScalarType<Id>::value));
    sorted = memory.select(0, 2);
    order = memory.select(0, 3);
    if (count == 0) {
      return;
    }
    Id* const copied = memory.mutable_data_ptr<Id>();
    take_ids_kernel<<<grid_size(count, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        copied, copied + count, first.const_data_ptr<int64_t>(), first.numel(),
        second.const_data_ptr<int64_t>(), count, last);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    at::cuda::cub::radix_sort_pairs(
        copied, copied + 2 * count, copied + count, copied + 3 * count, count, /*descending=*/false,
        /*begin_bit=*/0,
        /*end_bit=*/std::max<int64_t>(1, std::bit_width(uint64_t(last))));
  }
#endif
};

} // namespace xsoftmax::cuda
