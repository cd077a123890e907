#pragma once

#include "retrieval/search_index.h"
#include "retrieval/search_list.cuh"

// Searches that read some cells: a block of threads reads, for one query, the 8-bit codes of the
// cells whose bounds allow one of the best classes.

namespace xsoftmax::cuda {

constexpr int64_t kFirstCells = 8;  // cells read before the bounds of the others are compared
constexpr int64_t kFirstLikely = 2; // the same if the number of cells is limited
constexpr int kCellLanes = 16;      // cells, or rows, that are interleaved
constexpr int kQueriesAtOnce = 8;   // queries that share each load of the centres
constexpr int kCoordinates = 32;    // coordinates of these queries in shared memory at a time

/// Device view of the index.
struct CellTable {
  const int64_t *start, *order;
  const float *radius, *centre, *bounds;
  const int32_t* codes; // [groups, quads, 16], four coordinates each
  int64_t cells, blocks, groups, quads, width;

  explicit CellTable(const SearchIndexView& index)
      : start(index.start.const_data_ptr<int64_t>()), order(index.order.const_data_ptr<int64_t>()),
        radius(index.radius.const_data_ptr<float>()), centre(index.centre.const_data_ptr<float>()),
        bounds(index.bounds.const_data_ptr<float>()),
        codes(static_cast<const int32_t*>(index.codes.const_data_ptr())), cells(index.cells),
        blocks(index.blocks), groups(index.groups), quads(index.quads), width(index.width) {}

  __host__ __device__ int64_t columns() const { return blocks * kCellLanes; }
  __device__ float bound(SearchBound which, int64_t cell) const {
    return bounds[which * columns() + cell];
  }
};

/// Queries of a wave.
struct CellQueries {
  const SearchQuery* query; // [Q]
  const double* wide;       // [Q, width], scaled
  const float* row;         // [Q, width], the same in float32
  const int32_t* code;      // [Q, quads], four coordinates each
  float* product;           // [Q, columns], products with the centres
  uint32_t* key;            // [Q, columns], rank of a cell; 0: it must not be read next
  bool* read;               // [Q, columns], whether a cell was read
  int64_t* cells_read;      // [L], number of cells read for a list
  int64_t queries;
};

#ifdef __CUDACC__
/// Computes the products of 256 cells (blockIdx.x) with 8 queries (blockIdx.y).
__global__ void centre_products_kernel(CellQueries cell_queries, CellTable table) {
  __shared__ float rows[kQueriesAtOnce][kCoordinates];
  const int64_t cell = global_thread(), block = cell / kCellLanes,
                first = int64_t(blockIdx.y) * kQueriesAtOnce;
  const bool in_range = cell < table.columns();
  float sum[kQueriesAtOnce] = {};
  for (int64_t base = 0; base < table.width; base += kCoordinates) {
    const int count = int(min(int64_t(kCoordinates), table.width - base));
    __syncthreads();
    for (int i = threadIdx.x; i < kQueriesAtOnce * kCoordinates; i += blockDim.x) {
      const int j = i / kCoordinates, d = i % kCoordinates;
      rows[j][d] = first + j < cell_queries.queries && d < count
          ? cell_queries.row[(first + j) * table.width + base + d]
          : 0.0f;
    }
    __syncthreads();
    for (int d = 0; in_range && d < count; ++d) {
      const float centre =
          table.centre[(block * table.width + base + d) * kCellLanes + cell % kCellLanes];
#pragma unroll
      for (int j = 0; j < kQueriesAtOnce; ++j) {
        sum[j] += rows[j][d] * centre;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kQueriesAtOnce; ++j) {
    if (in_range && first + j < cell_queries.queries) {
      cell_queries.product[(first + j) * table.columns() + cell] = sum[j];
    }
  }
}

/// Shared memory of a block for the cells that it scans together.
struct CellBatch {
  int64_t cell[kThreads],
      first_group[kThreads]; // first_group: the number of groups in earlier cells
  double product[kThreads], error[kThreads], unit[kThreads];
  int64_t storage[kWarp];
};

/// Reads cells for one query. Held by every thread of a block.
template <typename T>
class CellReader {
 public:
  __device__ CellReader(const CellQueries& cell_queries, const CellTable& table, int64_t q,
                        const RowScorer<T>& scorer, CellBatch& batch)
      : query_(cell_queries.query[q]), table_(table),
        product_(cell_queries.product + q * table.columns()),
        key_(cell_queries.key + q * table.columns()),
        read_(cell_queries.read + q * table.columns()), code_(cell_queries.code + q * table.quads),
        scorer_(scorer), batch_(batch) {}

  /// Returns whether a cell was not read and may hold a class that reaches the threshold.
  __device__ bool is_remaining(int64_t cell, double threshold) const {
    const float length = float(query_.length * (1 + 1e-6));
    return cell < table_.cells && !read_[cell] &&
        !(product_[cell] + length * table_.bound(kReach, cell) * (1 + 1e-6f) < below(threshold));
  }

  /// Ranks the cells by an optimistic score: three standard deviations above the product with the
  /// centre, if remainders are Gaussian.
  __device__ void rank_first() {
    const float range = 3 * deviation();
    for (int64_t c = threadIdx.x; c < table_.columns(); c += blockDim.x) {
      const bool in_range = c < table_.cells && table_.bound(kSize, c) > 0;
      key_[c] = in_range ? rank_of(product_[c] + range * table_.bound(kReach, c)) : 0;
    }
    __syncthreads();
  }

  /// Ranks the cells that are left by the expected number of classes above the threshold.
  __device__ void rank_by_expected_hits(double threshold) {
    for (int64_t c = threadIdx.x; c < table_.columns(); c += blockDim.x) {
      key_[c] = is_remaining(c, threshold) ? rank_of(expected_hits(c, float(threshold))) : 0;
    }
    __syncthreads();
  }

  /// Reads cells in order of rank until they are at least `cells` and hold at least `classes`
  /// classes, if that many exist. Returns the number of cells read.
  __device__ int64_t read_best(SearchList& list, int64_t cells, int64_t classes) {
    uint32_t least = 0; // the largest rank with enough cells at or above it, built bit by bit
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
      const Counted counted = count([&](uint32_t key) { return key >= (least | bit); });
      least = counted.cells >= cells && counted.classes >= classes ? least | bit : least;
    }
    // Cells ranked above `least` are all read; of the ties at `least`, the first ones.
    Counted before = count([&](uint32_t key) { return key > least && key > 0; });
    int64_t read = 0;
    for (int64_t base = 0; base < table_.columns(); base += blockDim.x) {
      const int64_t c = base + threadIdx.x;
      const uint32_t key = c < table_.columns() ? key_[c] : 0;
      const int64_t mine = key == least && key > 0 ? packed(c) : 0;
      int64_t tied, chosen;
      const int64_t ahead = block_inclusive_sum(mine, &tied, batch_.storage) - mine;
      const bool needed =
          before.cells + cells_of(ahead) < cells || before.classes + classes_of(ahead) < classes;
      const bool choose = key > 0 && (key > least || (key == least && needed));
      const int64_t place = block_inclusive_sum(int64_t(choose), &chosen, batch_.storage) - 1;
      if (choose) {
        batch_.cell[place] = c;
      }
      read += chosen;
      before.cells += cells_of(tied);
      before.classes += classes_of(tied);
      scan(list, chosen);
    }
    return read;
  }

  /// Reads those of cells begin ... end - 1 that are left. Returns the number of cells read.
  __device__ int64_t read_remaining(SearchList& list, int64_t begin, int64_t end) {
    int64_t read = 0, tightened = list.count;
    for (int64_t base = begin; base < end; base += blockDim.x) {
      const int64_t c = base + threadIdx.x;
      const bool choose = c < end && is_remaining(c, list.threshold);
      int64_t chosen;
      const int64_t place = block_inclusive_sum(int64_t(choose), &chosen, batch_.storage) - 1;
      if (choose) {
        batch_.cell[place] = c;
      }
      scan(list, chosen);
      read += chosen;
      if (list.count > 2 * tightened + kWarp) {
        list.tighten();
        tightened = list.count;
      }
    }
    return read;
  }

 private:
  // Packs a number of cells (at most 2^20) and a number of classes (at most 2^34) into one int64.
  static constexpr int kCellBits = 21;
  struct Counted { int64_t cells, classes; };
  static __device__ int64_t cells_of(int64_t packed) {
    return packed & ((int64_t(1) << kCellBits) - 1);
  }
  static __device__ int64_t classes_of(int64_t packed) { return packed >> kCellBits; }
  __device__ int64_t packed(int64_t cell) const {
    return (int64_t(table_.bound(kSize, cell)) << kCellBits) + 1;
  }

  template <typename Predicate>
  __device__ Counted count(const Predicate& predicate) const {
    int64_t mine = 0;
    for (int64_t c = threadIdx.x; c < table_.columns(); c += blockDim.x) {
      mine += predicate(key_[c]) ? packed(c) : 0;
    }
    const int64_t all = block_sum(mine, batch_.storage);
    return {cells_of(all), classes_of(all)};
  }

  // Returns the standard deviation of z.r / |r| for r of random direction.
  __device__ float deviation() const { return float(query_.length / sqrt(double(table_.width))); }

  // Returns size x P(X > threshold) for a Gaussian X, within 2 %, with the right steepness far out.
  __device__ float expected_hits(int64_t cell, float threshold) const {
    const float x = (threshold - product_[cell]) /
        (deviation() * table_.bound(kReach, cell) + 1e-30f),
                y = fabsf(x), z = y < 12.0f ? y : 12.0f;
    const float tail = 0.5f * on_device::exponential(-0.717f * z - 0.416f * z * z);
    return table_.bound(kSize, cell) * (x < 0 ? 1.0f - tail : tail);
  }

  // Returns how many groups may hold one of the best. Groups are sorted by falling radius.
  __device__ int64_t groups_within(int64_t cell, double threshold) const {
    const int64_t begin = table_.start[cell], end = table_.start[cell + 1];
    CUDA_KERNEL_ASSERT(begin >= 0 && begin <= end && end <= table_.groups); // from index[2]
    const float least =
        float(((threshold - product_[cell]) / query_.length - table_.bound(kCodeError, cell)) *
              (1 - 1e-6));
    int64_t low = begin, high = end;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      table_.radius[middle] < least ? high = middle : low = middle + 1;
    }
    return low - begin;
  }

  // Scans the first `chosen` cells of the batch. One thread per row.
  __device__ void scan(SearchList& list, int64_t chosen) {
    if (chosen == 0) {
      return;
    }
    __syncthreads();
    const int64_t i = threadIdx.x;
    int64_t groups = 0, all;
    if (i < chosen) {
      const int64_t cell = batch_.cell[i];
      groups = groups_within(cell, list.threshold);
      read_[cell] = true;
      batch_.product[i] = product_[cell];
      batch_.error[i] = query_.length * table_.bound(kCodeError, cell) +
          query_.residual * table_.bound(kCodeNorm, cell);
      batch_.unit[i] = query_.scale * table_.bound(kScale, cell);
    }
    const int64_t first_group = block_inclusive_sum(groups, &all, batch_.storage) - groups;
    batch_.first_group[i] = first_group;
    __syncthreads();
    for (int64_t base = 0; base < all; base += blockDim.x / kCellLanes) {
      const int64_t group = base + threadIdx.x / kCellLanes;
      const Candidate mine[1] = {group < all ? row_at(list, group, chosen)
                                             : Candidate{0, 0, 0, false}};
      if (__syncthreads_or(mine[0].reaches(list.threshold)) != 0) {
        list.add(mine, scorer_);
      }
    }
    __syncthreads();
  }

  // Returns this thread's row of a group of the batch as a candidate.
  __device__ Candidate row_at(const SearchList& list, int64_t group, int64_t chosen) const {
    const int64_t place = last_at_or_before(batch_.first_group, chosen, group);
    const int64_t row =
        (table_.start[batch_.cell[place]] + group - batch_.first_group[place]) * kCellLanes +
        threadIdx.x % kCellLanes;
    const int32_t* codes =
        table_.codes + (row / kCellLanes) * table_.quads * kCellLanes + threadIdx.x % kCellLanes;
    int32_t sum = 0;
#pragma unroll 8
    for (int64_t quad = 0; quad < table_.quads; ++quad) {
      // The xor maps 128 + x to x in two's complement.
      sum = __dp4a(codes[quad * kCellLanes] ^ int32_t(0x80808080), code_[quad], sum);
    }
    Candidate one{batch_.product[place] + batch_.unit[place] * double(sum),
                  float(batch_.error[place] * (1 + 1e-6)), 0, true};
    if (one.reaches(list.threshold)) {
      one.id = table_.order[row];
      one.is_candidate = one.id >= 0;
    }
    return one;
  }

  const SearchQuery query_;
  const CellTable& table_;
  const float* product_;
  uint32_t* key_;
  bool* read_;
  const int32_t* code_;
  const RowScorer<T>& scorer_;
  CellBatch& batch_;
};

/// Reads the most promising cells, which give a threshold; with a limit, also the cells that are
/// likely to hold some of the best. One block per query. most: the limit; 0: none.
template <typename T>
__global__ void first_cells_kernel(CellQueries cell_queries, CellTable table, ListStorage lists,
                                   RowScorer<T> scorer, int64_t k, int64_t parts, int64_t most) {
  __shared__ CellBatch batch;
  for (int64_t q = blockIdx.x; q < cell_queries.queries; q += gridDim.x) {
    const int64_t at = q * (parts + 1);
    SearchList list(lists, at, k, batch.storage);
    int64_t cells = 0;
    if (cell_queries.query[q].state == kSearched) {
      scorer.query = cell_queries.wide + q * table.width;
      scorer.exponent = cell_queries.query[q].exponent;
      CellReader<T> reader(cell_queries, table, q, scorer, batch);
      reader.rank_first();
      cells = reader.read_best(list, most == 0 ? kFirstCells : min(kFirstLikely, most), k);
      list.tighten();
      for (int64_t more = 1; more > 0 && cells < most; cells += more) {
        // Ranked again each time the number of cells read has quadrupled, with a higher threshold.
        reader.rank_by_expected_hits(list.threshold);
        more = reader.read_best(list, min(most, max(int64_t(1), 4 * cells)) - cells, 0);
        list.tighten();
      }
    }
    list.store(lists, at);
    if (threadIdx.x == 0) {
      cell_queries.cells_read[at] = cells;
    }
  }
}

/// Reads the remaining cells that the threshold does not exclude. One block per query and part of
/// the cells.
template <typename T>
__global__ void left_cells_kernel(CellQueries cell_queries, CellTable table, ListStorage lists,
                                  RowScorer<T> scorer, int64_t k, int64_t parts) {
  __shared__ CellBatch batch;
  for (int64_t task = blockIdx.x; task < cell_queries.queries * parts; task += gridDim.x) {
    const int64_t q = task / parts, part = task % parts, at = q * (parts + 1);
    SearchList list(lists, at + 1 + part, k, batch.storage);
    list.threshold = lists.threshold[at];
    int64_t cells = 0;
    if (cell_queries.query[q].state == kSearched) {
      scorer.query = cell_queries.wide + q * table.width;
      scorer.exponent = cell_queries.query[q].exponent;
      CellReader<T> reader(cell_queries, table, q, scorer, batch);
      cells =
          reader.read_remaining(list, table.cells * part / parts, table.cells * (part + 1) / parts);
    }
    list.store(lists, at + 1 + part);
    if (threadIdx.x == 0) {
      cell_queries.cells_read[at + 1 + part] = cells;
    }
  }
}
#endif

} // namespace xsoftmax::cuda
