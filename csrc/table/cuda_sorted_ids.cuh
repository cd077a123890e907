#pragma once

#include "op/cuda_launch.cuh"

#include <ATen/core/Tensor.h>

namespace xsoftmax::cuda {

#ifdef __CUDACC__
/// Integers that are stored as int32 or int64; one of the pointers is nullptr.
struct IntegersView {
  const int32_t* narrow = nullptr;
  const int64_t* wide = nullptr;

  IntegersView() = default;
  explicit IntegersView(const at::Tensor& tensor)
      : narrow(tensor.defined() && tensor.scalar_type() == at::kInt
                   ? tensor.const_data_ptr<int32_t>()
                   : nullptr),
        wide(tensor.defined() && tensor.scalar_type() != at::kInt ? tensor.const_data_ptr<int64_t>()
                                                                  : nullptr) {}
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
/// id outside [0, last] fails a device assertion. At most 2^31 - 1 ids.
struct SortedIds {
  at::Tensor sorted, order; ///< [count]; int32 if ids fit, else int64

  SortedIds(const at::Tensor& first_ids, int64_t last, const at::Tensor& second_ids = at::Tensor());

  int64_t count() const { return sorted.numel(); }
  /// Returns the sorted ids as int64. Costs a launch if they are int32.
  at::Tensor ids() const { return sorted.to(at::kLong); }
#ifdef __CUDACC__
  SortedIdsView view() const { return {IntegersView(sorted), IntegersView(order)}; }
#endif
};

} // namespace xsoftmax::cuda
