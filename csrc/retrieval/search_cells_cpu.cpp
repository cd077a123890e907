#include "retrieval/search_cells_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

// Which cells are read, in what order, and the scan of a cell.

namespace xsoftmax {
namespace {

constexpr int64_t kChunk = 64; // queries that scan the cells together
constexpr int64_t kParts = 8; // tasks that share the cells of a chunk if queries are few
constexpr int64_t kGroups = 64; // groups of a cell whose coarse codes are compared at once
// Cells that a query reads before the bounds of the others are compared. Of many queries, each
// reads few, since the others are then read together.
constexpr int64_t kFirstCells = 8, kFirstOfMany = 2, kMany = 16;
constexpr int64_t kFirstLikely = 2; // the same if the number of cells is limited
constexpr int64_t kCandidates = 4096; // candidates per query before they are rescored

struct RankedCell {
  float value;
  int64_t cell;

  friend bool operator>(const RankedCell& a, const RankedCell& b) {
    return a.value > b.value || (a.value == b.value && a.cell < b.cell);
  }
};

// Keeps the `count` most likely cells in a heap, least likely in front.
void keep_best(std::vector<RankedCell>& cells, int64_t count, RankedCell cell) {
  if (int64_t(cells.size()) == count) {
    if (!(cell > cells.front())) {
      return;
    }
    std::pop_heap(cells.begin(), cells.end(), std::greater<>());
    cells.pop_back();
  }
  cells.push_back(cell);
  std::push_heap(cells.begin(), cells.end(), std::greater<>());
}

} // namespace

void BestClasses::add(int64_t k, double low, double upper, int64_t id) {
  candidates.push_back({upper, id});
  if (int64_t(lower.size()) == k) {
    if (!(low > lower.front())) {
      return;
    }
    std::pop_heap(lower.begin(), lower.end(), std::greater<>());
    lower.pop_back();
  }
  lower.push_back(low);
  std::push_heap(lower.begin(), lower.end(), std::greater<>());
  if (int64_t(lower.size()) == k) {
    threshold = std::max(threshold, lower.front());
  }
}

CellReader::CellReader(const SearchIndexView& index, int64_t classes, int64_t k,
                       const SearchOptions& options)
    : index_(index), classes_(classes), k_(k), options_(options),
      exact_(!options.max_cells.has_value()), start_(index.start.const_data_ptr<int64_t>()),
      order_(index.order.const_data_ptr<int64_t>()), radius_(index.radius.const_data_ptr<float>()),
      tail_(index.tail.const_data_ptr<float>()), codes_(index.codes.const_data_ptr<uint8_t>()),
      coarse_(index.directions > 0 ? index.coarse.const_data_ptr<uint8_t>() : codes_),
      coarse_quads_(index.directions > 0 ? index.directions / 4 : index.quads) {}

int64_t CellReader::chunk_size(int64_t chunk) const {
  return std::min(kChunk, count_ - chunk * kChunk);
}

// Returns where the products z.c of the 16 cells of a block begin.
int64_t CellReader::product_offset(int64_t q, int64_t block) const {
  const int64_t chunk = q / kChunk;
  return (chunk * kChunk * index_.blocks + block * chunk_size(chunk) + q % kChunk) * kScanLanes;
}

uint32_t CellReader::remaining(int64_t q, int64_t block, double threshold) const {
  const float length = above(queries_[q].length), least = -above(-threshold);
  const uint32_t bits = cell_scan().reached(peaks(q, block), bounds(kReach, block), length, least) &
      ~uint32_t(read_[q * index_.blocks + block]);
  return (block + 1) * kScanLanes <= index_.cells
      ? bits
      : bits & ((uint32_t(1) << (index_.cells - block * kScanLanes)) - 1);
}

void CellReader::read_wave(int64_t first, int64_t count) {
  first_ = first;
  count_ = count;
  queries_.assign(count_, {});
  found_.assign(count_, {});
  query_codes_.assign(count_ * index_.quads * 4, 0);
  query_coarse_.assign(count_ * index_.directions, 0);
  products_.resize(count_ * index_.blocks * kScanLanes);
  read_.assign(count_ * index_.blocks, 0);
  const int64_t chunks = (count_ + kChunk - 1) / kChunk;
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> rows(kChunk * index_.width);
    ScanScratch scratch;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      for (int64_t j = 0; j < chunk_size(chunk); ++j) {
        prepare(chunk * kChunk + j, scratch, rows.data() + j * index_.width);
      }
      cell_scan().score(products_.data() + chunk * kChunk * index_.blocks * kScanLanes, rows.data(),
                        chunk_size(chunk), index_.centre.const_data_ptr<float>(), index_.blocks,
                        index_.width);
    }
  });
  if (is_perturbed()) {
    peaks_.resize(products_.size());
    group_noise_.resize(count_ * index_.groups);
  }
  at::parallel_for(0, count_, 1, [&](int64_t begin, int64_t end) {
    ScanScratch scratch;
    for (int64_t q = begin; q < end; ++q) {
      if (queries_[q].searched) {
        place_noise(q);
        read_first(q, scratch);
        if (!exact_) {
          read_promising(q, scratch);
        }
      }
    }
  });
  if (exact_) {
    chunks < kParts ? read_in_parts(chunks) : read_chunks(chunks);
  }
}

void CellReader::prepare(int64_t q, ScanScratch& scratch, float* row) {
  CodedQuery& query = queries_[q];
  std::vector<double>& wide = scratch.wide;
  widen(q, wide);
  std::fill_n(row, index_.width, 0.0f);
  double largest = 0;
  bool finite = true;
  for (const double z : wide) {
    finite &= std::isfinite(z);
    largest = std::max(largest, std::abs(z));
  }
  // The noise is scaled as the query is, which must not overflow.
  query.searched = finite && largest > 0 && !(is_perturbed() && largest < 0x1p-800);
  if (!query.searched) {
    return;
  }
  query.exponent = -std::ilogb(largest);
  query.factors[0] = std::ldexp(1.0, query.exponent / 2);
  query.factors[1] = std::ldexp(1.0, query.exponent - query.exponent / 2);
  double square = 0;
  for (int64_t d = 0; d < index_.width; ++d) {
    wide[d] = query.scaled(wide[d]);
    row[d] = float(wide[d]);
    square += wide[d] * wide[d];
  }
  query.length = std::sqrt(square) * (1 + 1e-7);
  query.whole =
      cell_scan().encode(query_codes_.data() + q * index_.quads * 4, wide.data(), index_.width);
  if (index_.directions == 0) {
    query.coarse = query.whole;
    return;
  }
  std::vector<double>& coordinates = scratch.coordinates;
  coordinates.resize(index_.directions);
  const double* basis = index_.basis.const_data_ptr<double>();
  double of_coordinates = 0;
  for (int64_t i = 0; i < index_.directions; ++i) {
    coordinates[i] = cell_scan().dot(wide.data(), basis + i * index_.width, index_.width);
    TORCH_CHECK_VALUE(std::isfinite(coordinates[i]),
                      "search: expected index[7] with finite values, got others");
    of_coordinates += coordinates[i] * coordinates[i];
  }
  query.tail = std::sqrt(remaining_square(square, of_coordinates)) * (1 + 1e-7);
  query.coarse = cell_scan().encode(query_coarse_.data() + q * index_.directions,
                                    coordinates.data(), index_.directions);
}

// Finds the largest noise of each group and cell of a query.
void CellReader::place_noise(int64_t q) {
  if (!is_perturbed()) {
    return;
  }
  const float* noise = noise_ + (first_ + q) * classes_;
  float* of_group = group_noise_.data() + q * index_.groups;
  for (int64_t group = 0; group < index_.groups; ++group) {
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t lane = 0; lane < kScanLanes; ++lane) {
      const int64_t id = order_[group * kScanLanes + lane];
      if (id >= 0 && id < classes_) { // others are refused when they are scored
        largest = std::max(largest, noise[id]);
      }
    }
    of_group[group] = largest;
  }
  for (int64_t block = 0; block < index_.blocks; ++block) {
    const int64_t first = block * kScanLanes;
    float* peak = peaks_.data() + product_offset(q, block);
    for (int64_t lane = 0; lane < kScanLanes; ++lane) {
      float largest = -std::numeric_limits<float>::infinity();
      if (first + lane < index_.cells) {
        for (int64_t g = start_[first + lane]; g < start_[first + lane + 1]; ++g) {
          largest = std::max(largest, of_group[g]);
        }
      }
      const double scaled = queries_[q].scaled(largest);
      peak[lane] = above(products(q, block)[lane] + scaled + noise_rounding(scaled));
    }
  }
}

// Returns the standard deviation of z.r / |r| for r of random direction.
float CellReader::deviation(int64_t q) const {
  return float(queries_[q].length / std::sqrt(double(index_.width)));
}

// Reads the most promising cells until they hold k classes.
void CellReader::read_first(int64_t q, ScanScratch& scratch) {
  const float range = 3 * deviation(q);
  const int64_t most = !exact_ ? std::min(kFirstLikely, *options_.max_cells)
      : count_ < kMany         ? kFirstCells
                               : kFirstOfMany;
  std::vector<RankedCell> cells;
  const auto gather = [&](int64_t keep) {
    for (int64_t block = 0; block < index_.blocks; ++block) {
      const float *product = peaks(q, block), *reach = bounds(kReach, block),
                  *size = bounds(kSize, block);
      for (int64_t lane = 0; lane < kScanLanes; ++lane) {
        if (size[lane] > 0 && block * kScanLanes + lane < index_.cells) {
          keep_best(cells, keep, {product[lane] + range * reach[lane], block * kScanLanes + lane});
        }
      }
    }
    std::sort_heap(cells.begin(), cells.end(), std::greater<>());
  };
  gather(most);
  size_t next = 0;
  for (; next < cells.size(); ++next) {
    scan_cell(cells[next].cell, &q, 1, &found_[q], scratch);
  }
  const auto is_full = [&] { return int64_t(found_[q].lower.size()) == k_; };
  if (!is_full()) { // rare: small cells or a large k
    cells.clear();
    gather(index_.cells);
    for (; next < cells.size() && !is_full(); ++next) {
      scan_cell(cells[next].cell, &q, 1, &found_[q], scratch);
    }
  }
}

// Reads the cells that are likely to hold some of the best.
void CellReader::read_promising(int64_t q, ScanScratch& scratch) {
  BestClasses& found = found_[q];
  const int64_t most = *options_.max_cells;
  std::vector<RankedCell> cells;
  while (found.cells < most) {
    // Recomputed each time the number of cells read has quadrupled: the threshold has risen, so
    // the ranking changes and some cells are excluded. max(1, ...) matters for a damaged index.
    const int64_t until = std::min(most, std::max<int64_t>(1, 4 * found.cells));
    cells.clear();
    for (int64_t block = 0; block < index_.blocks; ++block) {
      uint32_t bits = remaining(q, block, found.threshold);
      if (bits == 0) {
        continue;
      }
      std::array<float, kScanLanes> value;
      cell_scan().expected_hits(value.data(), products(q, block), bounds(kReach, block),
                                bounds(kSize, block), deviation(q), float(found.threshold));
      for (; bits != 0; bits &= bits - 1) {
        const int lane = std::countr_zero(bits);
        keep_best(cells, until - found.cells, {value[lane], block * kScanLanes + lane});
      }
    }
    if (cells.empty()) {
      return;
    }
    std::sort_heap(cells.begin(), cells.end(), std::greater<>());
    for (const RankedCell& one : cells) {
      scan_cell(one.cell, &q, 1, &found, scratch);
    }
  }
}

void CellReader::read_chunks(int64_t chunks) {
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    ScanScratch scratch;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      read_remaining(chunk, 0, index_.blocks, found_.data() + chunk * kChunk, scratch);
    }
  });
}

// For few queries: splits the cells into parts. The split depends on shapes only.
void CellReader::read_in_parts(int64_t chunks) {
  std::vector<std::vector<BestClasses>> part_results(chunks * kParts);
  at::parallel_for(0, chunks * kParts, 1, [&](int64_t begin, int64_t end) {
    ScanScratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t chunk = i / kParts, part = i % kParts;
      part_results[i].resize(chunk_size(chunk));
      for (int64_t j = 0; j < chunk_size(chunk); ++j) {
        part_results[i][j].lower = found_[chunk * kChunk + j].lower;
        part_results[i][j].threshold = found_[chunk * kChunk + j].threshold;
      }
      read_remaining(chunk, index_.blocks * part / kParts, index_.blocks * (part + 1) / kParts,
                     part_results[i].data(), scratch);
    }
  });
  for (int64_t i = 0; i < chunks * kParts; ++i) {
    for (size_t j = 0; j < part_results[i].size(); ++j) {
      BestClasses &into = found_[i / kParts * kChunk + j], &from = part_results[i][j];
      into.threshold = std::max(into.threshold, from.threshold);
      into.cells += from.cells;
      into.candidates.insert(into.candidates.end(), from.candidates.begin(), from.candidates.end());
      into.scored.insert(into.scored.end(), from.scored.begin(), from.scored.end());
    }
  }
}

// Reads all cells of some blocks that the bounds do not exclude, cell by cell, so that queries
// share the loads of a cell.
void CellReader::read_remaining(int64_t chunk, int64_t first_block, int64_t last_block,
                                BestClasses* found, ScanScratch& scratch) {
  std::array<std::vector<int64_t>, kScanLanes> wanted;
  for (int64_t block = first_block; block < last_block; ++block) {
    for (int64_t j = 0; j < chunk_size(chunk); ++j) {
      const int64_t q = chunk * kChunk + j;
      if (!queries_[q].searched) {
        continue;
      }
      for (uint32_t bits = remaining(q, block, found[j].threshold); bits != 0; bits &= bits - 1) {
        wanted[std::countr_zero(bits)].push_back(q);
      }
    }
    for (int64_t lane = 0; lane < kScanLanes; ++lane) {
      const int64_t n = int64_t(wanted[lane].size());
      for (int64_t i = 0; i < n; i += kScanQueries) {
        scan_cell(block * kScanLanes + lane, wanted[lane].data() + i, std::min(kScanQueries, n - i),
                  found - chunk * kChunk, scratch,
                  /*indexed=*/true);
      }
      wanted[lane].clear();
    }
  }
}

// A cell and the queries that scan it.
struct CellReader::Cell {
  // How far a score may be from the product of codes, and what a unit of that product is.
  struct Scan { double error, unit; };
  int64_t count; // number of queries
  const int64_t* query;
  double code_error;
  std::array<BestClasses*, kScanQueries> best;
  std::array<double, kScanQueries> product;
  std::array<Scan, kScanQueries> whole, coarse;
};

// Scans a cell for n queries. found: results of the first query; if indexed, of query 0.
void CellReader::scan_cell(int64_t cell, const int64_t* query, int64_t n, BestClasses* found,
                           ScanScratch& scratch, bool indexed) {
  const int64_t block = cell / kScanLanes, lane = cell % kScanLanes;
  const auto bound = [&](SearchBound which) { return double(bounds(which, block)[lane]); };
  const auto scan = [&](const CodedQuery& of, const VectorCode& code, SearchBound scale,
                        SearchBound error, SearchBound norm) {
    return Cell::Scan{of.length * bound(error) + code.residual * bound(norm),
                      code.scale * bound(scale)};
  };
  Cell of_cell{n, query, bound(kCodeError), {}, {}, {}, {}};
  for (int64_t i = 0; i < n; ++i) {
    const CodedQuery& of = queries_[query[i]];
    of_cell.best[i] = indexed ? found + query[i] : found;
    of_cell.product[i] = products(query[i], block)[lane];
    of_cell.whole[i] = scan(of, of.whole, kScale, kCodeError, kCodeNorm);
    of_cell.coarse[i] = index_.directions > 0
        ? scan(of, of.coarse, kCoarseScale, kCoarseError, kCoarseNorm)
        : of_cell.whole[i];
    read_[query[i] * index_.blocks + block] |= uint16_t(1) << lane;
    ++of_cell.best[i]->cells;
  }
  for (int64_t first = start_[cell]; first < start_[cell + 1]; first += kGroups) {
    scan_groups(of_cell, first, std::min(first + kGroups, start_[cell + 1]), scratch);
  }
}

// Compares the coarse codes of groups [first, last) of a cell, at most kGroups, and reads those
// groups that may hold one of the best.
void CellReader::scan_groups(const Cell& cell, int64_t first, int64_t last, ScanScratch& scratch) {
  std::array<int64_t, kScanQueries> which, counts;
  std::array<const int8_t*, kScanQueries> codes;
  int64_t scanned = 0, groups = 0;
  for (int64_t i = 0; i < cell.count; ++i) {
    const int64_t q = cell.query[i];
    int64_t count = last - first;
    if (!is_perturbed()) {
      // Groups are sorted by falling radius. Counts those that may hold one of the best.
      const double above_product = cell.best[i]->threshold - cell.product[i];
      const float least =
          float((above_product / queries_[q].length - cell.code_error) * (1 - 1e-6));
      count = std::partition_point(radius_ + first, radius_ + last,
                                   [&](float radius) { return !(radius < least); }) -
          (radius_ + first);
    }
    if (count > 0) {
      which[scanned] = i;
      counts[scanned] = count;
      codes[scanned++] = index_.directions > 0 ? query_coarse_.data() + q * index_.directions
                                               : query_codes_.data() + q * index_.quads * 4;
      groups = std::max(groups, count);
    }
  }
  if (scanned == 0) {
    return;
  }
  scratch.peaks.resize(kScanQueries * kGroups);
  cell_scan().peaks(scratch.peaks.data(), codes.data(), scanned,
                    coarse_ + first * coarse_quads_ * 4 * kScanLanes, groups, coarse_quads_);
  for (int64_t s = 0; s < scanned; ++s) {
    read_groups(cell, which[s], first, counts[s], scratch.peaks.data() + s * groups, scratch);
  }
}

// Reads groups for query i, the most promising one first, so that its best classes exclude others.
void CellReader::read_groups(const Cell& cell, int64_t i, int64_t first, int64_t groups,
                             const int32_t* peak, ScanScratch& scratch) {
  const int64_t q = cell.query[i];
  const CodedQuery& query = queries_[q];
  const Cell::Scan& coarse = cell.coarse[i];
  const BestClasses& best = *cell.best[i];
  std::vector<double>& bounds = scratch.bounds;
  bounds.resize(kGroups);
  double largest =
      cell_scan().bounds(bounds.data(), peak, tail_ + first, groups, cell.product[i] + coarse.error,
                         coarse.unit, query.coarse.offset, query.tail);
  if (is_perturbed()) {
    largest = -HUGE_VAL;
    for (int64_t g = 0; g < groups; ++g) {
      const double noise = group_noise(q, first + g);
      bounds[g] += noise + noise_rounding(noise);
      largest = std::isnan(bounds[g]) ? HUGE_VAL : std::max(largest, bounds[g]);
    }
  }
  if (largest < best.threshold) {
    return;
  }
  const auto at = std::find(bounds.begin(), bounds.begin() + groups, largest);
  const int64_t highest = (at - bounds.begin()) % groups; // 0 if a bound of a damaged index is NaN
  read_group(cell, i, first + highest, group_noise(q, first + highest), scratch);
  for (int64_t g = 0; g < groups; ++g) {
    if (g != highest && !(bounds[g] < best.threshold)) {
      read_group(cell, i, first + g, group_noise(q, first + g), scratch);
    }
  }
}

// Adds the classes of a group that may be among the best of query i to its candidates. No class of
// the group has more noise than `noise_of_group`.
void CellReader::read_group(const Cell& cell, int64_t i, int64_t group, double noise_of_group,
                            ScanScratch& scratch) {
  const int64_t q = cell.query[i];
  const Cell::Scan& scan = cell.whole[i];
  BestClasses& best = *cell.best[i];
  const double offset = queries_[q].whole.offset;
  const double least = std::floor((best.threshold - noise_of_group - cell.product[i] - scan.error -
                                   noise_rounding(noise_of_group)) /
                                  scan.unit) +
      offset;
  constexpr double lowest = std::numeric_limits<int32_t>::min(),
                   highest = std::numeric_limits<int32_t>::max();
  if (least > highest) {
    return;
  }
  alignas(64) std::array<int32_t, kScanLanes> product;
  uint32_t hits =
      cell_scan().hits(product.data(), query_codes_.data() + q * index_.quads * 4,
                       codes_ + group * index_.quads * 4 * kScanLanes, index_.quads,
                       least > lowest ? int32_t(least) : std::numeric_limits<int32_t>::min());
  for (; hits != 0; hits &= hits - 1) {
    const int lane = std::countr_zero(hits);
    const int64_t id = order_[group * kScanLanes + lane];
    if (id < 0) {
      continue;
    }
    const double noise_of_class = id < classes_ ? noise(q, id) : 0,
                 score = cell.product[i] + scan.unit * (double(product[lane]) - offset) +
        noise_of_class,
                 error = scan.error + noise_rounding(noise_of_class);
    if (!(score + error < best.threshold)) {
      best.add(k_, score - error, score + error, id);
    }
  }
  if (int64_t(best.candidates.size()) > kCandidates) {
    rescore(q, best, scratch);
  }
}

} // namespace xsoftmax
