#pragma once

#include "op/cuda_launch.cuh"
#include "estimator/estimator_arithmetic.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <limits>

// Lanes (candidate_row.h) on a CUDA device: one warp per row, or one block per long row.

namespace xsoftmax::cuda {

/// Bytes of dynamic shared memory that a block may request. The static shared memory of a kernel
/// comes on top.
constexpr int64_t kSharedBytes = 47 * 1024;

/// Returns the limit for kernels that raise it with cudaFuncSetAttribute, such that two blocks fit
/// on a multiprocessor.
inline int64_t max_shared_bytes() {
  int device = 0, bytes = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  return std::max<int64_t>(kSharedBytes, bytes / 2 - 2048);
}

#ifdef __CUDACC__
/// The threads of a warp work on one row.
struct WarpLanes {
  static constexpr int kWarps = 1;
  static constexpr int64_t kStep = kWarp;

  __device__ int64_t index() const { return lane(); }
  __device__ int64_t first(int64_t begin) const { return begin + ((lane() - begin) & (kStep - 1)); }
  __device__ bool is_leader() const { return lane() == 0; }
  __device__ void sync() const { __syncwarp(); }
  template <typename T> __device__ T once(T value) const { return is_leader() ? value : T(0); }
  template <typename T> __device__ T sum(T value) const { return warp_sum(value); }
  template <typename T> __device__ T largest(T value) const { return warp_max(value); }
  __device__ bool any(bool value) const { return __any_sync(kAllLanes, value) != 0; }
  template <typename Predicate>
  __device__ int64_t find(int64_t begin, int64_t end, const Predicate& predicate) const {
    for (int64_t base = begin; base < end; base += kStep) {
      const unsigned lanes =
          __ballot_sync(kAllLanes, base + lane() < end && predicate(base + lane()));
      if (lanes != 0) {
        return base + __ffs(int(lanes)) - 1;
      }
    }
    return end;
  }
};

/// The kThreads threads of a block work on one row.
struct BlockLanes {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int64_t kStep = kThreads;

  double* storage; ///< shared memory, kWarp elements

  __device__ int64_t index() const { return threadIdx.x; }
  __device__ int64_t first(int64_t begin) const {
    return begin + ((int64_t(threadIdx.x) - begin) & (kStep - 1));
  }
  __device__ bool is_leader() const { return threadIdx.x == 0; }
  __device__ void sync() const { __syncthreads(); }
  template <typename T> __device__ T once(T value) const { return is_leader() ? value : T(0); }
  template <typename T> __device__ T sum(T value) const {
    return block_sum(value, reinterpret_cast<T*>(storage));
  }
  template <typename T>
  __device__ T largest(T value) const {
    return block_max(value, std::numeric_limits<T>::lowest(), reinterpret_cast<T*>(storage));
  }
  __device__ bool any(bool value) const { return __syncthreads_or(value) != 0; }
  template <typename Predicate>
  __device__ int64_t find(int64_t begin, int64_t end, const Predicate& predicate) const {
    int64_t mine = begin + index();
    while (mine < end && !predicate(mine)) {
      mine += kStep;
    }
    return -largest(mine < end ? -mine : -end);
  }
};

/// Calls on_device::run_query. Not inlined, because otherwise every kernel would contain the code
/// of all estimators. `rows` is a __grid_constant__ of the kernel and is not copied.
template <RowLoss kLoss, typename Lanes, typename T>
__device__ __noinline__ void run_query_of(Lanes lanes, const LossRows<T>& rows, int64_t query,
                                          T* buffer) {
  on_device::run_query<kLoss>(lanes, rows, query, buffer);
}

template <typename Lanes, typename T>
__device__ inline void run_query(Lanes lanes, RowLoss loss, const LossRows<T>& rows, int64_t query,
                                 T* buffer) {
  switch (loss) {
    case RowLoss::Softmax: return run_query_of<RowLoss::Softmax>(lanes, rows, query, buffer);
    case RowLoss::Logistic: return run_query_of<RowLoss::Logistic>(lanes, rows, query, buffer);
    case RowLoss::OneVsEach: return run_query_of<RowLoss::OneVsEach>(lanes, rows, query, buffer);
    case RowLoss::BlackOut: return run_query_of<RowLoss::BlackOut>(lanes, rows, query, buffer);
    case RowLoss::Importance: return run_query_of<RowLoss::Importance>(lanes, rows, query, buffer);
    case RowLoss::Cane: return run_query_of<RowLoss::Cane>(lanes, rows, query, buffer);
    case RowLoss::CaneLogOfMean:
      return run_query_of<RowLoss::CaneLogOfMean>(lanes, rows, query, buffer);
  }
}
#endif

/// Assigns rows to blocks and decides where buffers are: in shared memory, or in global memory for
/// rows that do not fit.
struct RowPlan {
  bool block;         ///< one block per row instead of one warp
  bool keeps_rows_in_shared;         ///< whether kept_bytes fit into shared memory
  int64_t shared;     ///< bytes of shared memory per row
  unsigned per_block; ///< rows that a block works on at once
  unsigned grid;      ///< number of blocks
  at::Tensor scratch; ///< [grid, bytes]; undefined if the buffers are in shared memory

  /// row_bytes: size of the buffer of a row. kept_bytes: size of an optional second buffer, which
  /// is in shared memory or does not exist. Both are multiples of 16.
  RowPlan(int64_t queries, int64_t columns, int64_t row_bytes, int64_t kept_bytes,
          const at::Tensor& like) {
    constexpr int64_t kWarpColumns = 1024, kWarpRows = 4, kBlocksOfLongRows = 264;
    const bool in_shared = row_bytes <= kSharedBytes;
    keeps_rows_in_shared = kept_bytes > 0 && row_bytes + kept_bytes <= max_shared_bytes();
    block = columns > kWarpColumns ||
        2 * (row_bytes + (keeps_rows_in_shared ? kept_bytes : 0)) > kSharedBytes;
    shared = std::max<int64_t>(
        16, (in_shared ? row_bytes : 0) + (keeps_rows_in_shared ? kept_bytes : 0));
    per_block = block ? 1u : unsigned(std::min(kWarpRows, kSharedBytes / shared));
    grid = grid_size(in_shared ? queries : std::min(queries, kBlocksOfLongRows), per_block);
    if (!in_shared) {
      scratch = at::empty({int64_t(grid), row_bytes}, like.options().dtype(at::kByte));
    }
  }

  unsigned threads() const { return block ? unsigned(kThreads) : per_block * unsigned(kWarp); }
  size_t shared_bytes() const { return size_t(shared) * per_block; }
  template <typename T>
  T* scratch_pointer() const {
    return scratch.defined() ? reinterpret_cast<T*>(scratch.mutable_data_ptr<uint8_t>()) : nullptr;
  }
};

} // namespace xsoftmax::cuda
