#pragma once

#include "core/cuda_launch.cuh"
#include "samplers/midx_cell_tables.h"
#include "samplers/midx_sample.h"

#include <cmath>

// What the CUDA kernels of MIDX share: the index as they read it, queries beside it, and searches in running sums.

namespace xsoftmax::cuda {

/// Contiguous tables of an index, which come from a state dict: kernels assert what they find there.
struct MidxDeviceIndex {
  MidxCellTables tables;
  const int32_t* cell;     ///< nullptr where classes are numbered by their slots
  const float* log_weight; ///< nullptr where all weights are 1
  int64_t num_classes;     ///< N

#ifdef __CUDACC__
  __device__ int64_t class_at(int64_t slot) const {
    CUDA_KERNEL_ASSERT(slot >= 0 && slot < tables.classes);
    const int64_t id = tables.order == nullptr ? slot : tables.order[slot];
    CUDA_KERNEL_ASSERT(id >= 0 && id < num_classes);
    return id;
  }
  /// -1: never drawn, or no class.
  __device__ int64_t cell_of(int64_t id) const {
    CUDA_KERNEL_ASSERT(id >= -1 && id < num_classes);
    const int64_t c = id < 0 ? -1 : cell == nullptr ? tables.cell_of_slot(id) : int64_t(cell[id]);
    CUDA_KERNEL_ASSERT(c >= -1 && c < tables.cells);
    return c;
  }
  __device__ double log_weight_of(int64_t id) const { return log_weight == nullptr ? 0.0 : double(log_weight[id]); }
  /// The classes of a cell that something is drawn from.
  __device__ void check_cell(int64_t c) const {
    CUDA_KERNEL_ASSERT(c >= 0 && c < tables.cells && tables.start[c] >= 0 && tables.start[c] < tables.start[c + 1] && tables.start[c + 1] <= tables.classes);
  }
#endif
};

/// Keeps the tensors behind a MidxDeviceIndex.
struct MidxDeviceTables {
  explicit MidxDeviceTables(const MidxIndex& index)
      : order(index.order.contiguous()), start(index.start.contiguous()), mass(index.mass.contiguous()), cell(index.cell.contiguous()) {
    const bool weighted = given(index.log_weight);
    if (weighted) {
      log_weight = index.log_weight->contiguous();
      prefix = index.prefix->contiguous();
      heaviest = index.heaviest->contiguous();
    }
    const int64_t k = index.codewords1.size(0), classes = index.num_classes.expect_int();
    const bool by_slot = order.size(0) == 0; // of which there is one at least
    view = {{k, k * k, by_slot ? classes : order.size(0), by_slot ? nullptr : order.const_data_ptr<int64_t>(), start.const_data_ptr<int64_t>(),
             mass.const_data_ptr<double>(), weighted ? prefix.const_data_ptr<double>() : nullptr, weighted ? heaviest.const_data_ptr<double>() : nullptr},
            by_slot ? nullptr : cell.const_data_ptr<int32_t>(),
            weighted ? log_weight.const_data_ptr<float>() : nullptr,
            classes};
  }

  at::Tensor order, start, mass, cell, log_weight, prefix, heaviest;
  MidxDeviceIndex view;
};

/// Draws of which no class stands twice (midx_sets_cuda.cu), a set for each query of MidxQueries, or one from the shares [K, K] of all cells:
/// ids [sets, M] of queries first_query, ... Returns float64 [2, sets]: c, NaN for a query that is no number, and the c from which on classes are
/// certain, 0 where none is. `ids` undefined: those alone.
at::Tensor midx_private_sets_cuda(const at::Tensor& ids, const at::Tensor& seed, int64_t first_query, const MidxDeviceTables& tables,
                                  const MidxQueries& queries, int64_t samples);
at::Tensor midx_shared_set_cuda(const at::Tensor& ids, const at::Tensor& seed, const MidxDeviceTables& tables, const at::Tensor& shares, int64_t samples);

/// The exact form (midx_exact_cuda.cu).
PrivateDraws midx_exact_sample_cuda(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const MidxIndex& index, int64_t samples);
at::Tensor midx_exact_log_count_cuda(const at::Tensor& queries, const at::Tensor& ids, const MidxIndex& index, int64_t samples);

#ifdef __CUDACC__
/// Where a point lies among values that are laid end to end.
struct Found {
  int64_t place;
  double before; ///< the sum up to there
};

/// The first place of 0 ... n - 1 where the running sum from `base` on exceeds `aim`; the last that is not 0 where rounding leaves none. All
/// lanes ask for one thing, and have the answer. value(place): any number beyond the end is 0; all lanes call it together, two neighbouring
/// places a lane.
template <typename Value>
__device__ inline Found warp_search(int64_t n, double aim, double base, const Value& value) {
  Found last{0, base};
  for (int64_t begin = 0; begin < n; begin += 2 * kWarp) {
    const int64_t place = begin + 2 * lane();
    const double one = value(place), two = value(place + 1);
    const double end = base + warp_inclusive_sum(one + two);
    const double end_before = __shfl_up_sync(kAllLanes, end, 1), start = lane() == 0 ? base : end_before;
    const unsigned beyond = __ballot_sync(kAllLanes, end > aim), some = __ballot_sync(kAllLanes, one > 0 || two > 0);
    const unsigned wanted = beyond != 0 ? beyond & (0u - beyond) : some; // the first beyond, or the last that is not 0
    if (wanted != 0) {
      const bool is_second = beyond != 0 ? !(start + one > aim) : two > 0;
      const int winner = 31 - __clz(int(wanted));
      last.place = __shfl_sync(kAllLanes, place + is_second, winner);
      last.before = __shfl_sync(kAllLanes, is_second ? start + one : start, winner);
    }
    if (beyond != 0) {
      return last;
    }
    base = __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  return last;
}

/// Of the first `draws` lanes each has a row of a matrix [*, n], and a point in it: the place of the point, searched by all lanes for one after
/// the other. value(row, place).
template <typename Value>
__device__ inline int64_t search_rows(int draws, int64_t n, int64_t row, double aim, double base, const Value& value) {
  int64_t mine = 0;
  for (int d = 0; d < draws; ++d) {
    const int64_t of_draw = __shfl_sync(kAllLanes, row, d);
    const double point = __shfl_sync(kAllLanes, aim, d), start = __shfl_sync(kAllLanes, base, d);
    const Found found = warp_search(n, point, start, [&](int64_t place) { return place < n ? value(of_draw, place) : 0.0; });
    mine = lane() == d ? found.place : mine;
  }
  return mine;
}

/// sums[i] = value(0) + ... + value(i), i < n, by a block; returns the sum of all. Barriers stand before and behind.
template <typename Value>
__device__ inline double running_sums(double* sums, int64_t n, double* storage, const Value& value) {
  double sum = 0, total = 0;
  for (int64_t begin = 0; begin < n; begin += blockDim.x) {
    const int64_t i = begin + threadIdx.x;
    const double end = block_inclusive_sum(i < n ? value(i) : 0.0, &total, storage);
    if (i < n) {
      sums[i] = sum + end;
    }
    sum += total;
  }
  __syncthreads();
  return sum;
}

/// The first of n rising sums that exceeds `aim`, or the last.
__device__ inline int64_t first_beyond(const double* sums, int64_t n, double aim) {
  int64_t first = 0;
  while (n > 1) {
    const int64_t half = n / 2;
    first += sums[first + half - 1] > aim ? 0 : half;
    n -= half;
  }
  return first;
}
#endif

} // namespace xsoftmax::cuda
