#include "proposal/midx/midx_sample_cuda.cuh"
#include "proposal/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>

// Systematic sampling of sets without replacement (method: midx_sets.h) on CUDA, one block per set.
// Shares of cells are recomputed where they are needed: a set reads few rows of cells, and K^2
// shares for each private set of a batch would not fit in memory.

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

/// The shares of cells in the distribution of each query. The cells of one first codeword form a
/// row.
struct PrivateShares {
  const double *probability, *exp_of, *z, *mass;
  int64_t k;

  __device__ double of_row(int64_t set, int64_t row) const { return probability[set * k + row]; }
  __device__ double of_cell(int64_t set, int64_t row, int64_t i) const {
    const double* of_set = exp_of + set * 2 * k;
    return of_set[row] / z[set] * (mass[row * k + i] * of_set[k + i]);
  }
};

/// The shares of cells in the distribution that a batch shares.
struct SharedShares {
  const double *share, *row_share;
  int64_t k;

  __device__ double of_row(int64_t, int64_t row) const { return row_share[row]; }
  __device__ double of_cell(int64_t, int64_t row, int64_t i) const { return share[row * k + i]; }
};

/// The plan of each set, computed before the draw.
struct SetPlans {
  double* scale;      ///< c [sets]; NaN for a query that is not finite
  double* bar; ///< [sets]: the c that found the last certain classes; 0 if none is certain
  double* row_tail; ///< [sets, K]: the share of a row's classes that are not certain
  int64_t* certain; ///< [sets, K]: the number of a row's classes that are certain
};

/// The split of a cell: the share of the classes that are not certain, and the number that are.
struct CellParts {
  double tail;
  int64_t certain;
};

/// Returns the weight from which on a class of a cell is certain.
__device__ inline double threshold_of(const MidxCellTables& tables, int64_t cell, double share,
                                      double bar) {
  return tables.mass[cell] / (bar * share);
}

/// Returns whether a cell has a class with pi >= 1.
__device__ inline bool has_certain(const MidxCellTables& tables, int64_t cell, double share,
                                   double bar) {
  return share > 0 &&
      bar * share * (tables.prefix == nullptr ? 1.0 : tables.heaviest[cell]) >= tables.mass[cell];
}

/// Splits one cell per lane (pass share 0 for no cell). All lanes call it and scan the classes of
/// one cell after the other together.
__device__ inline CellParts parts_of(const MidxCellTables& tables, int64_t cell, double share,
                                     double bar) {
  const bool some = share > 0 && has_certain(tables, cell, share, bar);
  if (tables.prefix == nullptr) {
    return some ? CellParts{0.0, tables.size(cell)} : CellParts{share, 0};
  }
  CellParts parts{share, 0};
  const double mine = some ? threshold_of(tables, cell, share, bar) : 0.0;
  for (unsigned left = __ballot_sync(kAllLanes, some); left != 0; left &= left - 1) {
    const int owner = __ffs(int(left)) - 1;
    const int64_t c = __shfl_sync(kAllLanes, cell, owner);
    const double threshold = __shfl_sync(kAllLanes, mine, owner);
    double light = 0;
    int64_t heavy = 0;
    for (int64_t slot = tables.start[c] + lane(); slot < tables.start[c + 1]; slot += kWarp) {
      const double weight = tables.weight(slot, c);
      heavy += weight >= threshold;
      light += weight >= threshold ? 0.0 : weight;
    }
    light = warp_sum(light);
    heavy = warp_sum(heavy);
    if (lane() == owner) {
      parts = heavy > 0 ? CellParts{share * (light / tables.mass[c]), heavy} : parts;
    }
  }
  return parts;
}

/// Splits the cell `i` of a row with certain classes. All lanes call it; an `i` past the end of the
/// row gives an empty result.
template <typename Shares>
__device__ inline CellParts parts_of_row(const MidxCellTables& tables, const Shares& shares,
                                         int64_t set, int64_t row, int64_t i, double bar) {
  const bool is_there = i < tables.codewords;
  return parts_of(tables, row * tables.codewords + (is_there ? i : 0),
                  is_there ? shares.of_cell(set, row, i) : 0.0, bar);
}

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
      tail[row] = shares.of_row(set, row);
      certain[row] = 0;
    }
    double scale = 0, bar = 0;
    for (bool grown = true; grown;) {
      __syncthreads();
      double uncertain = 0;
      int64_t taken = 0;
      for (int64_t row = threadIdx.x; row < k; row += blockDim.x) {
        uncertain += tail[row];
        taken += certain[row];
      }
      uncertain = block_sum(uncertain, sums);
      taken = block_sum(taken, counts);
      CUDA_KERNEL_ASSERT(taken <= samples); // otherwise prefix, heaviest and mass are inconsistent
      // NaN if the shares are NaN.
      scale = uncertain > 0 ? double(samples - taken) / uncertain : uncertain * 0;
      bool more = false;
      for (int64_t row = warp; taken < samples && row < k; row += warps) {
        // The share of a class is at most that of its row.
        if (!(tail[row] > 0) || !(scale * shares.of_row(set, row) >= 1 - 1e-9)) {
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
      grown = __syncthreads_or(more);
      bar = grown ? scale : bar;
    }
    if (threadIdx.x == 0) {
      plans.scale[set] = scale;
      plans.bar[set] = bar;
    }
  }
}

/// The result for each point: the place of its class among the cell's classes that are not certain,
/// after rotation by the cut, and the number of those classes.
struct PointPlaces {
  int64_t* place; ///< [sets, M]; later overwritten by slots, then by ids
  int32_t* cell;
  int64_t* count;
};

/// The classes of a cell that are not certain, starting at the cut. All lanes call its members.
struct UncertainClasses {
  const MidxCellTables& tables;
  int64_t cell, cut;
  double threshold;

  /// Calls visit(slot, whether it is such a class, its weight) for 32 slots at a time, until it
  /// returns true.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
    const int64_t begin = tables.start[cell], n = tables.size(cell);
    for (int64_t at = 0; at < n; at += kWarp) {
      const int64_t i = at + lane(), turned = i + cut < n ? i + cut : i + cut - n;
      const double weight = i < n ? tables.weight(begin + turned, cell) : 0.0;
      if (visit(begin + turned, i < n && weight < threshold, weight)) {
        return;
      }
    }
  }

  /// Returns the rank of the class at `aim` when the classes are laid end to end by weight.
  __device__ int64_t rank_at(double aim) const {
    double sum = 0;
    int64_t before = 0, found = -1;
    for_each([&](int64_t, bool is_one, double weight) {
      const double end = sum + warp_inclusive_sum(is_one ? weight : 0.0);
      const unsigned members = __ballot_sync(kAllLanes, is_one),
                     beyond = __ballot_sync(kAllLanes, is_one && end > aim);
      if (beyond != 0) {
        found = before + __popc(members & ((beyond & (0u - beyond)) - 1));
      }
      before += __popc(members);
      sum = __shfl_sync(kAllLanes, end, kWarp - 1);
      return beyond != 0;
    });
    return found >= 0 ? found : before - 1;
  }

  __device__ int64_t slot_of(int64_t rank) const {
    int64_t before = 0, found = tables.start[cell];
    for_each([&](int64_t slot, bool is_one, double) {
      const unsigned members = __ballot_sync(kAllLanes, is_one);
      const bool hit = is_one && before + __popc(members & ((1u << lane()) - 1)) == rank;
      const unsigned winner = __ballot_sync(kAllLanes, hit);
      if (winner != 0) {
        found = __shfl_sync(kAllLanes, slot, __ffs(int(winner)) - 1);
      }
      before += __popc(members);
      return winner != 0;
    });
    return found;
  }
};

/// A set during the draw. All threads of a block run its steps, with barriers between them.
template <typename Shares>
struct Set {
  const MidxDeviceIndex& index;
  const Shares& shares;
  const SetPlans& plans;
  int64_t set, query, samples;
  uint64_t seed;
  const double* row_end; ///< [K] the end of each row when rows are laid end to end
  const int64_t* certain_end; ///< [K] the number of certain classes up to the end of each row

  __device__ double scale() const { return plans.scale[set]; }
  __device__ double bar() const { return plans.bar[set]; }
  __device__ bool is_mixed(int64_t row) const {
    return plans.certain[set * index.tables.codewords + row] > 0;
  }
  __device__ double share(int64_t cell) const {
    return shares.of_cell(set, cell / index.tables.codewords, cell % index.tables.codewords);
  }

  /// Writes the certain classes of a row, by one warp.
  __device__ void take_certain(int64_t row, int64_t* out) const {
    const MidxCellTables& tables = index.tables;
    out += row > 0 ? certain_end[row - 1] : 0;
    for (int64_t i = 0; i < tables.codewords; ++i) {
      const int64_t cell = row * tables.codewords + i;
      const double of_cell = shares.of_cell(set, row, i);
      if (!has_certain(tables, cell, of_cell, bar())) {
        continue;
      }
      const double threshold =
          tables.prefix == nullptr ? 0.0 : threshold_of(tables, cell, of_cell, bar());
      for (int64_t at = tables.start[cell]; at < tables.start[cell + 1]; at += kWarp) {
        const int64_t slot = at + lane();
        const bool taken = slot < tables.start[cell + 1] && tables.weight(slot, cell) >= threshold;
        const unsigned members = __ballot_sync(kAllLanes, taken);
        if (taken) {
          out[__popc(members & ((1u << lane()) - 1))] = slot;
        }
        out += __popc(members);
      }
    }
  }

  __device__ UncertainClasses uncertain_classes(int64_t cell, bool mixed) const {
    const MidxCellTables& tables = index.tables;
    return {tables, cell, cell_rotation(seed, uint64_t(query), cell, tables.size(cell)),
            mixed ? threshold_of(tables, cell, share(cell), bar())
                  : std::numeric_limits<double>::infinity()};
  }

  /// Finds the class at a point, by one warp.
  __device__ void find(double point, int64_t at, const PointPlaces& out) const {
    const MidxCellTables& tables = index.tables;
    const int64_t k = tables.codewords;
    int64_t row = first_beyond(row_end, k, point);
    // Rounding may put the last point past the end.
    while (row > 0 && !(plans.row_tail[set * k + row] > 0)) {
      --row;
    }
    const bool mixed_row = is_mixed(row);
    const Found found = warp_search(k, point, row > 0 ? row_end[row - 1] : 0.0, [&](int64_t i) {
      const double tail = mixed_row ? parts_of_row(tables, shares, set, row, i, bar()).tail
          : i < k                   ? shares.of_cell(set, row, i)
                                    : 0.0;
      return scale() * tail;
    });
    const int64_t cell = row * k + found.place;
    index.check_cell(cell);
    const double of_cell = share(cell);
    // parts_of takes one cell per lane: lane 0 passes the cell, the other lanes pass none.
    const CellParts mine = mixed_row ? parts_of(tables, cell, lane() == 0 ? of_cell : 0.0, bar())
                                     : CellParts{of_cell, 0};
    const double tail = __shfl_sync(kAllLanes, mine.tail, 0);
    const int64_t certain = __shfl_sync(kAllLanes, mine.certain, 0), n = tables.size(cell);
    const double fraction = fmax(point - found.before, 0.0) / (scale() * tail);
    int64_t place;
    if (tables.prefix == nullptr) {
      place = int64_t(fraction * double(n));
    } else if (certain > 0) {
      place =
          uncertain_classes(cell, true).rank_at(fraction * (tail / of_cell * tables.mass[cell]));
    } else {
      const int64_t cut = cell_rotation(seed, uint64_t(query), cell, n), begin = tables.start[cell];
      const double aim =
          (cut == 0 ? 0.0 : tables.prefix[begin + cut - 1]) + fraction * tables.mass[cell];
      const int64_t below =
          tables.below(cell, aim < tables.mass[cell] ? aim : aim - tables.mass[cell]);
      place = below >= cut ? below - cut : below - cut + n;
    }
    if (lane() == 0) {
      out.place[at] = place;
      out.cell[at] = int32_t(cell);
      out.count[at] = n - certain;
    }
  }

  /// Converts a place to a slot, by one warp. Returns -1 if no class is left for the point.
  __device__ int64_t slot_of(int64_t place, int64_t cell, int64_t count) const {
    const MidxCellTables& tables = index.tables;
    const int64_t n = tables.size(cell);
    const UncertainClasses classes = uncertain_classes(cell, count < n);
    if (place < 0) {
      return -1;
    }
    if (count < n) {
      return classes.slot_of(place);
    }
    return tables.start[cell] +
        (place + classes.cut < n ? place + classes.cut : place + classes.cut - n);
  }
};

/// Makes the places within a cell strictly increasing and in range. A class is at most as long as
/// the distance of two points, so only rounding can break this. Run by one thread, from the first
/// point of a cell on.
__device__ inline void catch_up(const PointPlaces& found, int64_t first, int64_t points) {
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
__device__ inline void fill_up(int64_t* slots, int64_t samples, int64_t classes) {
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
    int64_t certain = 0;
    for (int64_t begin = 0; begin < k; begin += blockDim.x) {
      const int64_t row = begin + threadIdx.x;
      int64_t total = 0;
      const int64_t end = block_inclusive_sum(
          row < k ? plans.certain[number * k + row] : int64_t(0), &total, counts);
      if (row < k) {
        certain_end[row] = certain + end;
      }
      certain += total;
    }
    __syncthreads();
    const Set<Shares> set{
        index,   shares,     plans,   number,     int64_t(seed.query(first_query + number)),
        samples, seed.key(), row_end, certain_end};
    for (int64_t row = warp; row < k; row += warps) {
      if (set.is_mixed(row)) {
        set.take_certain(row, slots);
      }
    }
    const int64_t points = samples - certain, at = number * samples + certain;
    const PointPlaces found{out.place + at, out.cell + at, out.count + at};
    const double u = unit_double(philox(set.seed, uint64_t(set.query), 0).low());
    for (int64_t p = warp; p < points; p += warps) {
      set.find(u + double(p), p, found);
    }
    __syncthreads();
    for (int64_t p = threadIdx.x; p < points; p += blockDim.x) {
      if (p == 0 || found.cell[p] != found.cell[p - 1]) {
        catch_up(found, p, points);
      }
    }
    __syncthreads();
    bool undrawn = false;
    for (int64_t p = warp; p < points; p += warps) {
      const int64_t slot = set.slot_of(found.place[p], found.cell[p], found.count[p]);
      __syncwarp();
      if (lane() == 0) {
        found.place[p] = slot;
      }
      undrawn = undrawn || slot < 0;
    }
    if (__syncthreads_or(undrawn)) {
      if (threadIdx.x == 0) {
        fill_up(slots, samples, index.tables.classes);
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
  const SharedShares of_cells{shares.const_data_ptr<double>(), row_share.const_data_ptr<double>(),
                              tables.view.tables.codewords};
  return draw_sets(ids, seed, 0, tables.view, of_cells, 1, samples, shares.options());
}

} // namespace cuda
} // namespace xsoftmax
