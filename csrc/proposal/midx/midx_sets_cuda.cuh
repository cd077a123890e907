#pragma once

#include "proposal/midx/midx_sample_cuda.cuh"

#include <cmath>
#include <limits>

// The classes of one set, found by the threads of a block (midx_sets_cuda.cu).

namespace xsoftmax::cuda {

/// The shares of cells in the distribution of each query. The cells of one first codeword form a
/// row.
struct PrivateShares {
  const double *probability, *exp_of, *z, *mass;
  int64_t k;

  __device__ double share_of_row(int64_t set, int64_t row) const {
    return probability[set * k + row];
  }
  __device__ double share_of_cell(int64_t set, int64_t row, int64_t i) const {
    const double* set_exp = exp_of + set * 2 * k;
    return set_exp[row] / z[set] * (mass[row * k + i] * set_exp[k + i]);
  }
};

/// The shares of cells in the distribution that a batch shares.
struct SharedShares {
  const double *share, *row_share;
  int64_t k;

  __device__ double share_of_row(int64_t, int64_t row) const { return row_share[row]; }
  __device__ double share_of_cell(int64_t, int64_t row, int64_t i) const {
    return share[row * k + i];
  }
};

/// The plan of each set, computed before the draw.
struct SetPlans {
  double* scale;      ///< c [sets]; NaN for a query that is not finite
  double*
      certain_scale; ///< [sets]: the c that found the last certain classes; 0 if none is certain
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
                                      double certain_scale) {
  return tables.mass[cell] / (certain_scale * share);
}

/// Returns whether a cell has a class with pi >= 1.
__device__ inline bool has_certain(const MidxCellTables& tables, int64_t cell, double share,
                                   double certain_scale) {
  return share > 0 &&
      certain_scale * share * (tables.prefix == nullptr ? 1.0 : tables.heaviest[cell]) >=
      tables.mass[cell];
}

/// Splits one cell per lane (pass share 0 for no cell). All lanes call it and scan the classes of
/// one cell after the other together.
__device__ inline CellParts parts_of(const MidxCellTables& tables, int64_t cell, double share,
                                     double certain_scale) {
  const bool some = share > 0 && has_certain(tables, cell, share, certain_scale);
  if (tables.prefix == nullptr) {
    return some ? CellParts{0.0, tables.size(cell)} : CellParts{share, 0};
  }
  CellParts parts{share, 0};
  const double mine = some ? threshold_of(tables, cell, share, certain_scale) : 0.0;
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
                                         int64_t set, int64_t row, int64_t i,
                                         double certain_scale) {
  const bool in_range = i < tables.codewords;
  return parts_of(tables, row * tables.codewords + (in_range ? i : 0),
                  in_range ? shares.share_of_cell(set, row, i) : 0.0, certain_scale);
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
      const int64_t i = at + lane(), rotated = i + cut < n ? i + cut : i + cut - n;
      const double weight = i < n ? tables.weight(begin + rotated, cell) : 0.0;
      if (visit(begin + rotated, i < n && weight < threshold, weight)) {
        return;
      }
    }
  }

  /// Returns the rank of the class at `target_sum` when the classes are laid end to end by weight.
  __device__ int64_t rank_at(double target_sum) const {
    double sum = 0;
    int64_t before = 0, found = -1;
    for_each([&](int64_t, bool is_one, double weight) {
      const double end = sum + warp_inclusive_sum(is_one ? weight : 0.0);
      const unsigned members = __ballot_sync(kAllLanes, is_one),
                     past_target = __ballot_sync(kAllLanes, is_one && end > target_sum);
      if (past_target != 0) {
        found = before + __popc(members & ((past_target & (0u - past_target)) - 1));
      }
      before += __popc(members);
      sum = __shfl_sync(kAllLanes, end, kWarp - 1);
      return past_target != 0;
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
struct SetDraw {
  const MidxDeviceIndex& index;
  const Shares& shares;
  const SetPlans& plans;
  int64_t set, query, samples;
  uint64_t seed;
  const double* row_end; ///< [K] the end of each row when rows are laid end to end
  const int64_t* certain_end; ///< [K] the number of certain classes up to the end of each row

  __device__ double scale() const { return plans.scale[set]; }
  __device__ double certain_scale() const { return plans.certain_scale[set]; }
  __device__ bool is_mixed(int64_t row) const {
    return plans.certain[set * index.tables.codewords + row] > 0;
  }
  __device__ double share(int64_t cell) const {
    return shares.share_of_cell(set, cell / index.tables.codewords, cell % index.tables.codewords);
  }

  /// Writes the certain classes of a row, by one warp.
  __device__ void write_certain(int64_t row, int64_t* out) const {
    const MidxCellTables& tables = index.tables;
    out += row > 0 ? certain_end[row - 1] : 0;
    for (int64_t i = 0; i < tables.codewords; ++i) {
      const int64_t cell = row * tables.codewords + i;
      const double share_of_cell = shares.share_of_cell(set, row, i);
      if (!has_certain(tables, cell, share_of_cell, certain_scale())) {
        continue;
      }
      const double threshold = tables.prefix == nullptr
          ? 0.0
          : threshold_of(tables, cell, share_of_cell, certain_scale());
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
            mixed ? threshold_of(tables, cell, share(cell), certain_scale())
                  : std::numeric_limits<double>::infinity()};
  }

  /// Finds the class at a point, by one warp.
  __device__ void find(double point, int64_t at, const PointPlaces& out) const {
    const MidxCellTables& tables = index.tables;
    const int64_t k = tables.codewords;
    int64_t row = first_above(row_end, k, point);
    // Rounding may put the last point past the end.
    while (row > 0 && !(plans.row_tail[set * k + row] > 0)) {
      --row;
    }
    const bool mixed_row = is_mixed(row);
    const SearchPosition found =
        warp_search(k, point, row > 0 ? row_end[row - 1] : 0.0, [&](int64_t i) {
          const double tail = mixed_row
              ? parts_of_row(tables, shares, set, row, i, certain_scale()).tail
              : i < k ? shares.share_of_cell(set, row, i)
                      : 0.0;
          return scale() * tail;
        });
    const int64_t cell = row * k + found.place;
    index.check_cell(cell);
    const double share_of_cell = share(cell);
    // parts_of takes one cell per lane: lane 0 passes the cell, the other lanes pass none.
    const CellParts mine = mixed_row
        ? parts_of(tables, cell, lane() == 0 ? share_of_cell : 0.0, certain_scale())
        : CellParts{share_of_cell, 0};
    const double tail = __shfl_sync(kAllLanes, mine.tail, 0);
    const int64_t certain = __shfl_sync(kAllLanes, mine.certain, 0), n = tables.size(cell);
    const double fraction = fmax(point - found.before, 0.0) / (scale() * tail);
    int64_t place;
    if (tables.prefix == nullptr) {
      place = int64_t(fraction * double(n));
    } else if (certain > 0) {
      place = uncertain_classes(cell, true)
                  .rank_at(fraction * (tail / share_of_cell * tables.mass[cell]));
    } else {
      const int64_t cut = cell_rotation(seed, uint64_t(query), cell, n), begin = tables.start[cell];
      const double target_sum =
          (cut == 0 ? 0.0 : tables.prefix[begin + cut - 1]) + fraction * tables.mass[cell];
      const int64_t below = tables.below(
          cell, target_sum < tables.mass[cell] ? target_sum : target_sum - tables.mass[cell]);
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

} // namespace xsoftmax::cuda
