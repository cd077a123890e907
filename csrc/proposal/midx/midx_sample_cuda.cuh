#pragma once

#include "op/cuda_launch.cuh"
#include "proposal/midx/midx_cell_tables.h"
#include "proposal/midx/midx_sample.h"

#include <cmath>

// Shared by the CUDA kernels of MIDX: the index as kernels read it, draws of sets, and searches in
// running sums.

namespace xsoftmax::cuda {

/// Contiguous tables of an index. They come from a state dict, so kernels assert the values they
/// read.
struct MidxDeviceIndex {
  MidxCellTables tables;
  const int32_t* cell;     ///< nullptr if classes are numbered by their slots
  const float* log_weight; ///< nullptr if all weights are 1
  int64_t num_classes;     ///< N

#ifdef __CUDACC__
  __device__ int64_t class_at(int64_t slot) const {
    CUDA_KERNEL_ASSERT(slot >= 0 && slot < tables.classes);
    const int64_t id = tables.order == nullptr ? slot : tables.order[slot];
    CUDA_KERNEL_ASSERT(id >= 0 && id < num_classes);
    return id;
  }
  /// Returns the cell of a class, or -1 if the class is never drawn or the id is -1.
  __device__ int64_t cell_of(int64_t id) const {
    CUDA_KERNEL_ASSERT(id >= -1 && id < num_classes);
    const int64_t c = id < 0 ? -1 : cell == nullptr ? tables.cell_of_slot(id) : int64_t(cell[id]);
    CUDA_KERNEL_ASSERT(c >= -1 && c < tables.cells);
    return c;
  }
  __device__ double log_weight_of(int64_t id) const {
    return log_weight == nullptr ? 0.0 : double(log_weight[id]);
  }
  /// Asserts that a cell to draw from is valid and not empty.
  __device__ void check_cell(int64_t c) const {
    CUDA_KERNEL_ASSERT(c >= 0 && c < tables.cells && tables.start[c] >= 0 &&
                       tables.start[c] < tables.start[c + 1] &&
                       tables.start[c + 1] <= tables.classes);
  }
#endif
};

/// Owns the tensors behind a MidxDeviceIndex.
struct MidxDeviceTables {
  explicit MidxDeviceTables(const MidxIndex& index)
      : order(index.order.contiguous()), start(index.start.contiguous()),
        mass(index.mass.contiguous()), cell(index.cell.contiguous()) {
    const bool weighted = is_defined(index.log_weight);
    if (weighted) {
      log_weight = index.log_weight->contiguous();
      prefix = index.prefix->contiguous();
      heaviest = index.heaviest->contiguous();
    }
    const int64_t k = index.codewords1.size(0), classes = index.num_classes.expect_int();
    const bool by_slot = order.size(0) == 0; // an index has at least one class to draw
    view = {{k, k * k, by_slot ? classes : order.size(0),
             by_slot ? nullptr : order.const_data_ptr<int64_t>(), start.const_data_ptr<int64_t>(),
             mass.const_data_ptr<double>(), weighted ? prefix.const_data_ptr<double>() : nullptr,
             weighted ? heaviest.const_data_ptr<double>() : nullptr},
            by_slot ? nullptr : cell.const_data_ptr<int32_t>(),
            weighted ? log_weight.const_data_ptr<float>() : nullptr,
            classes};
  }

  at::Tensor order, start, mass, cell, log_weight, prefix, heaviest;
  MidxDeviceIndex view;
};

/// Draw sets without replacement (midx_sets_cuda.cu): one per query of MidxQueries, or one from the
/// shares [K, K] of all cells. ids [sets, M] is written for the queries first_query, ...; if `ids`
/// is undefined, only the scales are computed. Return the scales, float64 [2, sets]: c, NaN for a
/// query that is not finite, and the c from which on classes are certain, 0 if none is.
at::Tensor midx_private_sets_cuda(const at::Tensor& ids, const at::Tensor& seed,
                                  int64_t first_query, const MidxDeviceTables& tables,
                                  const MidxQueries& queries, int64_t samples);
at::Tensor midx_shared_set_cuda(const at::Tensor& ids, const at::Tensor& seed,
                                const MidxDeviceTables& tables, const at::Tensor& shares,
                                int64_t samples);

/// The exact form (midx_exact_cuda.cu).
PrivateDraws midx_exact_sample_cuda(const at::Tensor& seed, const at::Tensor& queries,
                                    const OptionalTensor& target, const MidxIndex& index,
                                    int64_t samples);
at::Tensor midx_exact_log_count_cuda(const at::Tensor& queries, const at::Tensor& ids,
                                     const MidxIndex& index, int64_t samples);

#ifdef __CUDACC__
/// The result of a search for a point among values laid end to end.
struct SearchPosition {
  int64_t place;
  double before; ///< the sum of all values before the place
};

/// Returns the first place in [0, n) where the running sum, starting at `base`, exceeds
/// `target_sum`. If rounding leaves none, returns the last place whose value is not 0. All lanes
/// pass the same arguments and get the same result. All lanes call value(place) together, each for
/// two neighbouring places; value must return 0 for a place past the end.
template <typename Value>
__device__ inline SearchPosition warp_search(int64_t n, double target_sum, double base,
                                             const Value& value) {
  SearchPosition last{0, base};
  for (int64_t begin = 0; begin < n; begin += 2 * kWarp) {
    const int64_t place = begin + 2 * lane();
    const double one = value(place), two = value(place + 1);
    const double end = base + warp_inclusive_sum(one + two);
    const double end_before = __shfl_up_sync(kAllLanes, end, 1),
                 start = lane() == 0 ? base : end_before;
    const unsigned past_target = __ballot_sync(kAllLanes, end > target_sum),
                   positive = __ballot_sync(kAllLanes, one > 0 || two > 0);
    // The first lane past the target sum, else the last lane that is not 0.
    const unsigned wanted = past_target != 0 ? past_target & (0u - past_target) : positive;
    if (wanted != 0) {
      const bool is_second = past_target != 0 ? !(start + one > target_sum) : two > 0;
      const int winner = 31 - __clz(int(wanted));
      last.place = __shfl_sync(kAllLanes, place + is_second, winner);
      last.before = __shfl_sync(kAllLanes, is_second ? start + one : start, winner);
    }
    if (past_target != 0) {
      return last;
    }
    base = __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  return last;
}

/// Searches rows of a matrix [*, n]: each of the first `draws` lanes passes a row and a target sum
/// in it and gets the place of that target sum. All lanes search for one draw after the other.
/// value(row, place) returns an element.
template <typename Value>
__device__ inline int64_t search_rows(int draws, int64_t n, int64_t row, double target_sum,
                                      double base, const Value& value) {
  int64_t mine = 0;
  for (int d = 0; d < draws; ++d) {
    const int64_t draw_row = __shfl_sync(kAllLanes, row, d);
    const double point = __shfl_sync(kAllLanes, target_sum, d),
                 start = __shfl_sync(kAllLanes, base, d);
    const SearchPosition found = warp_search(
        n, point, start, [&](int64_t place) { return place < n ? value(draw_row, place) : 0.0; });
    mine = lane() == d ? found.place : mine;
  }
  return mine;
}

/// Writes sums[i] = value(0) + ... + value(i), i < n, by one block, and returns the total. Has a
/// barrier before the first write and after the last one.
template <typename Value>
__device__ inline double running_sums(double* sums, int64_t n, double* storage,
                                      const Value& value) {
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

/// Returns the first of n increasing sums that exceeds `target_sum`, or the last.
__device__ inline int64_t first_above(const double* sums, int64_t n, double target_sum) {
  int64_t first = 0;
  while (n > 1) {
    const int64_t half = n / 2;
    first += sums[first + half - 1] > target_sum ? 0 : half;
    n -= half;
  }
  return first;
}
#endif

} // namespace xsoftmax::cuda
