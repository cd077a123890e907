#pragma once

#include "op/cuda_launch.cuh"
#include "table/gather_dot_cuda.h"

namespace xsoftmax::cuda {

#ifdef __CUDACC__
/// Device view of CudaPairs.
struct Pairs {
  const int64_t* ids;
  const int64_t* offsets; ///< nullptr: `width` pairs per query
  int64_t width;
  int64_t queries;
  int64_t total;
  int64_t num_classes;

  explicit Pairs(const CudaPairs& pairs)
      : ids(pairs.ids.const_data_ptr<int64_t>()),
        offsets(pairs.offsets.defined() ? pairs.offsets.const_data_ptr<int64_t>() : nullptr),
        width(offsets ? 0 : pairs.ids.size(1)), queries(pairs.queries), total(pairs.total()),
        num_classes(pairs.num_classes) {}

  __device__ int64_t begin(int64_t query) const { return offsets ? offsets[query] : query * width; }
  __device__ int64_t end(int64_t query) const {
    return offsets ? offsets[query + 1] : (query + 1) * width;
  }

  __device__ int64_t id(int64_t position) const {
    const int64_t found = ids[position];
    CUDA_KERNEL_ASSERT(found >= 0 && found < num_classes);
    return found;
  }

  /// Returns the query of a position: the last query that begins at or before it. (Queries without
  /// pairs begin at the same position as the next query.)
  __device__ int64_t query_of(int64_t position) const {
    if (offsets == nullptr) {
      return position / width;
    }
    CUDA_KERNEL_ASSERT(offsets[0] == 0 && offsets[queries] == total);
    return last_at_or_before(offsets, queries, position);
  }

  /// Returns the index of the score of a pair in a tensor addressed by `stride`
  /// (gather_dot_cuda.h).
  __device__ int64_t address(int64_t query, int64_t position, int64_t stride) const {
    return stride < 0 ? position : query * stride + (position - begin(query));
  }
};
#endif

} // namespace xsoftmax::cuda
