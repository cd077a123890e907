#include "proposal/midx/midx_sets_cuda.cuh"
#include "proposal/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

// Systematic sampling of sets without replacement (method: midx_sets.h) on CUDA, one block per set.
// Shares of cells are recomputed where they are needed: a set reads few rows of cells, and K^2
// shares for each private set of a batch would not fit in memory.

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

// Finds c, with one block per set and one warp per row. c grows in each round that finds more
// certain classes.
template <typename Shares>
__global__ void midx_plan_kernel(SetPlans plans, MidxCellTables tables, Shares shares, int64_t sets,
                                 int64_t samples) {
  __shared__ double sums[kWarp];
  __shared__ int64_t counts[kWarp];
  const int64_t k = tables.codewords, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (int64_t set = blockIdx.x; set < sets; set += gridDim.x) {
    double* tail = plans.row_tail + set * k;
    int64_t* certain = plans.certain + set * k;
    for (int64_t row = threadIdx.x; row < k; row += blockDim.x) {
      tail[row] = shares.share_of_row(set, row);
      certain[row] = 0;
    }
    double scale = 0, certain_scale = 0;
    for (bool changed = true; changed;) {
      __syncthreads();
      double uncertain = 0;
      int64_t num_certain = 0;
      for (int64_t row = threadIdx.x; row < k; row += blockDim.x) {
        uncertain += tail[row];
        num_certain += certain[row];
      }
      uncertain = block_sum(uncertain, sums);
      num_certain = block_sum(num_certain, counts);
      CUDA_KERNEL_ASSERT(num_certain <=
                         samples); // otherwise prefix, heaviest and mass are inconsistent
      // NaN if the shares are NaN.
      scale = uncertain > 0 ? double(samples - num_certain) / uncertain : uncertain * 0;
      bool more = false;
      for (int64_t row = warp; num_certain < samples && row < k; row += warps) {
        // The share of a class is at most that of its row.
        if (!(tail[row] > 0) || !(scale * shares.share_of_row(set, row) >= 1 - 1e-9)) {
          continue;
        }
        CellParts sum{0.0, 0};
        for (int64_t begin = 0; begin < k; begin += kWarp) {
          const CellParts parts = parts_of_row(tables, shares, set, row, begin + lane(), scale);
          sum = {sum.tail + parts.tail, sum.certain + parts.certain};
        }
        sum = {warp_sum(sum.tail), warp_sum(sum.certain)};
        if (sum.certain > certain[row]) {
          more = true;
          __syncwarp();
          if (lane() == 0) {
            tail[row] = sum.tail;
            certain[row] = sum.certain;
          }
        }
      }
      changed = __syncthreads_or(more);
      certain_scale = changed ? scale : certain_scale;
    }
    if (threadIdx.x == 0) {
      plans.scale[set] = scale;
      plans.certain_scale[set] = certain_scale;
    }
  }
}

/// Makes the places within a cell strictly increasing and in range. A class is at most as long as
/// the distance of two points, so only rounding can break this. Run by one thread, from the first
/// point of a cell on.
__device__ inline void separate_places(const PointPlaces& found, int64_t first, int64_t points) {
  int64_t end = first + 1;
  for (; end < points && found.cell[end] == found.cell[first]; ++end) {
    const int64_t least = found.place[end - 1] + 1;
    found.place[end] = found.place[end] < least ? least : found.place[end];
  }
  int64_t bound = found.count[first];
  for (int64_t i = end - 1; i >= first && found.place[i] >= bound; --i) {
    found.place[i] = --bound; // below 0 if there are more points than classes
  }
}

/// Fills the places that rounding left empty with any classes not yet in the set. Run by one
/// thread, and rarely needed.
__device__ inline void fill_missing(int64_t* slots, int64_t samples, int64_t classes) {
  int64_t candidate = 0;
  for (int64_t j = 0; j < samples; ++j) {
    for (bool taken = slots[j] < 0; taken && candidate < classes; ++candidate) {
      taken = false;
      for (int64_t other = 0; other < samples; ++other) {
        taken = taken || slots[other] == candidate;
      }
      slots[j] = taken ? slots[j] : candidate;
    }
  }
}

/// Writes the number of certain classes up to the end of each row. Returns that of all rows. All
/// threads of a block call it.
__device__ inline int64_t count_certain(int64_t* certain_end, const int64_t* share_of_row,
                                        int64_t rows, int64_t* counts) {
  int64_t certain = 0;
  for (int64_t begin = 0; begin < rows; begin += blockDim.x) {
    const int64_t row = begin + threadIdx.x;
    int64_t total = 0;
    const int64_t end =
        block_inclusive_sum(row < rows ? share_of_row[row] : int64_t(0), &total, counts);
    if (row < rows) {
      certain_end[row] = certain + end;
    }
    certain += total;
  }
  return certain;
}

/// Writes the slots at the points of a set. Returns false if no class is left for a point of this
/// thread's warp. All threads of a block call it.
template <typename Shares>
__device__ inline bool pick_points(const SetDraw<Shares>& set, const PointPlaces& found,
                                   int64_t points) {
  const int64_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const double u = unit_double(philox(set.seed, uint64_t(set.query), 0).low());
  for (int64_t p = warp; p < points; p += warps) {
    set.find(u + double(p), p, found);
  }
  __syncthreads();
  for (int64_t p = threadIdx.x; p < points; p += blockDim.x) {
    if (p == 0 || found.cell[p] != found.cell[p - 1]) {
      separate_places(found, p, points);
    }
  }
  __syncthreads();
  bool drawn = true;
  for (int64_t p = warp; p < points; p += warps) {
    const int64_t slot = set.slot_of(found.place[p], found.cell[p], found.count[p]);
    __syncwarp();
    if (lane() == 0) {
      found.place[p] = slot;
    }
    drawn = drawn && slot >= 0;
  }
  return drawn;
}

// Draws one set per block. Warps share the rows with certain classes and the points.
template <typename Shares>
__global__ void midx_pick_kernel(PointPlaces out, DrawSeed seed, int64_t first_query,
                                 MidxDeviceIndex index, Shares shares, SetPlans plans, int64_t sets,
                                 int64_t samples) {
  extern __shared__ double shared[];
  __shared__ double sums[kWarp];
  __shared__ int64_t counts[kWarp];
  const int64_t k = index.tables.codewords, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  double* row_end = shared;
  int64_t* certain_end = reinterpret_cast<int64_t*>(shared + k);
  for (int64_t number = blockIdx.x; number < sets; number += gridDim.x) {
    const double scale = plans.scale[number];
    int64_t* slots = out.place + number * samples;
    // The query is not finite, and neither is its loss: any classes will do.
    if (!std::isfinite(scale)) {
      for (int64_t j = threadIdx.x; j < samples; j += blockDim.x) {
        slots[j] = index.class_at(j);
      }
      continue;
    }
    __syncthreads(); // the shared memory of the last set is free
    const double* tail = plans.row_tail + number * k;
    running_sums(row_end, k, sums, [&](int64_t row) { return scale * tail[row]; });
    const int64_t certain = count_certain(certain_end, plans.certain + number * k, k, counts);
    __syncthreads();
    const SetDraw<Shares> set{
        index,   shares,     plans,   number,     int64_t(seed.query(first_query + number)),
        samples, seed.key(), row_end, certain_end};
    for (int64_t row = warp; row < k; row += warps) {
      if (set.is_mixed(row)) {
        set.write_certain(row, slots);
      }
    }
    const int64_t points = samples - certain, at = number * samples + certain;
    const PointPlaces found{out.place + at, out.cell + at, out.count + at};
    if (__syncthreads_or(!pick_points(set, found, points))) {
      if (threadIdx.x == 0) {
        fill_missing(slots, samples, index.tables.classes);
      }
      __syncthreads();
    }
    for (int64_t j = threadIdx.x; j < samples; j += blockDim.x) {
      slots[j] = index.class_at(slots[j]);
    }
  }
}

template <typename Shares>
Tensor draw_sets(const Tensor& ids, const Tensor& seed, int64_t first_query,
                 const MidxDeviceIndex& index, const Shares& shares, int64_t sets, int64_t samples,
                 const at::TensorOptions& doubles) {
  const int64_t k = index.tables.codewords;
  const Tensor scales = at::empty({2, sets}, doubles);
  if (sets == 0) {
    return scales;
  }
  const auto longs = doubles.dtype(at::kLong);
  const Tensor row_tail = at::empty({sets, k}, doubles), certain = at::empty({sets, k}, longs);
  const SetPlans plans{scales.mutable_data_ptr<double>(), scales.mutable_data_ptr<double>() + sets,
                       row_tail.mutable_data_ptr<double>(), certain.mutable_data_ptr<int64_t>()};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  midx_plan_kernel<Shares><<<grid_size(sets, 1), sets == 1 ? kThreads : kThreads / 4, 0, stream>>>(
      plans, index.tables, shares, sets, samples);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (!ids.defined() || ids.numel() == 0) {
    return scales;
  }
  const Tensor cell = at::empty({sets, samples}, doubles.dtype(at::kInt)),
               count = at::empty({sets, samples}, longs);
  const unsigned warps =
      unsigned(std::clamp<int64_t>(sets == 1 ? samples : (samples + 7) / 8, 1, kThreads / kWarp));
  const PointPlaces places{ids.mutable_data_ptr<int64_t>(), cell.mutable_data_ptr<int32_t>(),
                           count.mutable_data_ptr<int64_t>()};
  midx_pick_kernel<Shares><<<grid_size(sets, 1), warps * kWarp, 2 * k * sizeof(double), stream>>>(
      places, DrawSeed(seed), first_query, index, shares, plans, sets, samples);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return scales;
}

} // namespace

namespace cuda {

Tensor midx_private_sets_cuda(const Tensor& ids, const Tensor& seed, int64_t first_query,
                              const MidxDeviceTables& tables, const MidxQueries& queries,
                              int64_t samples) {
  const PrivateShares shares{
      queries.first_probability.const_data_ptr<double>(), queries.exp.const_data_ptr<double>(),
      queries.z.const_data_ptr<double>(), tables.view.tables.mass, tables.view.tables.codewords};
  return draw_sets(ids, seed, first_query, tables.view, shares, queries.z.size(0), samples,
                   queries.z.options());
}

Tensor midx_shared_set_cuda(const Tensor& ids, const Tensor& seed, const MidxDeviceTables& tables,
                            const Tensor& shares, int64_t samples) {
  const Tensor row_share = shares.sum(1);
  const SharedShares cell_shares{shares.const_data_ptr<double>(),
                                 row_share.const_data_ptr<double>(), tables.view.tables.codewords};
  return draw_sets(ids, seed, 0, tables.view, cell_shares, 1, samples, shares.options());
}

} // namespace cuda
} // namespace xsoftmax
