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
constexpr int64_t kGroups = 64; // groups of a cell per scan
constexpr int64_t kFirstCells = 8; // cells read before the bounds of the others are compared
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

ScanScratch::ScanScratch() {
  for (int64_t i = 0; i < kScanQueries; ++i) {
    slot[i].resize(kGroups * kScanLanes);
    product[i].resize(kGroups * kScanLanes);
  }
}

CellReader::CellReader(const SearchIndexView& index, int64_t k, const SearchOptions& options)
    : index_(index), k_(k), options_(options), exact_(!options.max_cells.has_value()),
      start_(index.start.const_data_ptr<int64_t>()), order_(index.order.const_data_ptr<int64_t>()),
      radius_(index.radius.const_data_ptr<float>()), codes_(index.codes.const_data_ptr<uint8_t>()) {
}

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
  query.searched = finite && largest > 0;
  if (!query.searched) {
    return;
  }
  int8_t* code = query_codes_.data() + q * index_.quads * 4;
  query.exponent = -std::ilogb(largest);
  query.scale = std::scalbn(largest, query.exponent) / 127;
  double square = 0, residual = 0;
  for (int64_t d = 0; d < index_.width; ++d) {
    const double z = std::scalbn(wide[d], query.exponent),
                 nearest = std::nearbyint(z / query.scale), error = z - nearest * query.scale;
    row[d] = float(z);
    code[d] = int8_t(nearest);
    query.offset += 128 * int64_t(nearest);
    square += z * z;
    residual += error * error;
  }
  query.length = std::sqrt(square) * (1 + 1e-7);
  query.residual = std::sqrt(residual) * (1 + 1e-7);
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
      if (id >= 0 && id < classes_) { // other ids are refused when they are scored
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
      peak[lane] =
          above(products(q, block)[lane] + std::scalbn(double(largest), queries_[q].exponent));
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
  const int64_t most = exact_ ? kFirstCells : std::min(kFirstLikely, *options_.max_cells);
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
  int64_t count; // number of queries
  const int64_t* query;
  double code_error;
  std::array<BestClasses*, kScanQueries> best;
  std::array<double, kScanQueries> product, error, unit;
};

// Scans a cell for n queries. found: results of the first query; if indexed, of query 0.
void CellReader::scan_cell(int64_t cell, const int64_t* query, int64_t n, BestClasses* found,
                           ScanScratch& scratch, bool indexed) {
  const int64_t block = cell / kScanLanes, lane = cell % kScanLanes;
  const double scale = bounds(kScale, block)[lane], code_error = bounds(kCodeError, block)[lane],
               code_norm = bounds(kCodeNorm, block)[lane];
  Cell of_cell{n, query, code_error, {}, {}, {}, {}};
  for (int64_t i = 0; i < n; ++i) {
    const CodedQuery& cell_queries = queries_[query[i]];
    of_cell.best[i] = indexed ? found + query[i] : found;
    of_cell.product[i] = products(query[i], block)[lane];
    of_cell.error[i] = cell_queries.length * code_error + cell_queries.residual * code_norm;
    of_cell.unit[i] = cell_queries.scale * scale;
    read_[query[i] * index_.blocks + block] |= uint16_t(1) << lane;
    ++of_cell.best[i]->cells;
  }
  for (int64_t first = start_[cell]; first < start_[cell + 1]; first += kGroups) {
    const int64_t last = std::min(first + kGroups, start_[cell + 1]);
    is_perturbed() ? scan_perturbed_groups(of_cell, first, last, scratch)
                   : scan_groups(of_cell, first, last, scratch);
  }
}

// Returns the smallest product of codes whose class may score above z.c by this much; the largest
// int32 if there is none.
int32_t CellReader::product_threshold(const Cell& cell, int64_t i, double above_product) const {
  const double threshold = std::floor((above_product - cell.error[i]) / cell.unit[i]) +
      double(queries_[cell.query[i]].offset);
  constexpr double least = std::numeric_limits<int32_t>::min(),
                   most = std::numeric_limits<int32_t>::max();
  return threshold > least ? int32_t(std::min(threshold, most)) : int32_t(least);
}

// As scan_groups, but each group has a threshold of its own, lower by its largest noise.
void CellReader::scan_perturbed_groups(const Cell& cell, int64_t first, int64_t last,
                                       ScanScratch& scratch) {
  for (int64_t i = 0; i < cell.count; ++i) {
    const int64_t q = cell.query[i];
    const CodedQuery& query = queries_[q];
    for (int64_t group = first; group < last; ++group) {
      const double above_product = cell.best[i]->threshold - cell.product[i] -
          std::scalbn(double(group_noise_[q * index_.groups + group]), query.exponent);
      const float least = float((above_product / query.length - cell.code_error) * (1 - 1e-6));
      if (radius_[group] < least) {
        continue;
      }
      const int32_t threshold = product_threshold(cell, i, above_product);
      if (threshold == std::numeric_limits<int32_t>::max()) {
        continue;
      }
      ScanQuery scan{query_codes_.data() + q * index_.quads * 4, threshold, scratch.slot[0].data(),
                     scratch.product[0].data(), 0};
      cell_scan().scan(&scan, 1, codes_ + group * index_.quads * 4 * kScanLanes, 1, index_.quads);
      take_hits(cell, i, group, scan, scratch);
    }
  }
}

// Scans groups [first, last) of a cell, at most kGroups.
void CellReader::scan_groups(const Cell& cell, int64_t first, int64_t last, ScanScratch& scratch) {
  std::array<ScanQuery, kScanQueries> scans;
  std::array<int64_t, kScanQueries> which;
  int64_t scanned = 0, groups = 0;
  for (int64_t i = 0; i < cell.count; ++i) {
    const CodedQuery& cell_queries = queries_[cell.query[i]];
    const double above_product = cell.best[i]->threshold - cell.product[i];
    // Groups are sorted by falling radius. Counts those that may hold one of the best.
    const float least = float((above_product / cell_queries.length - cell.code_error) * (1 - 1e-6));
    const int64_t some = std::partition_point(radius_ + first, radius_ + last,
                                              [&](float radius) { return !(radius < least); }) -
        (radius_ + first);
    const int32_t bound = product_threshold(cell, i, above_product);
    if (some == 0 || bound == std::numeric_limits<int32_t>::max()) {
      continue;
    }
    groups = std::max(groups, some);
    which[scanned] = i;
    scans[scanned] = {query_codes_.data() + cell.query[i] * index_.quads * 4, bound,
                      scratch.slot[scanned].data(), scratch.product[scanned].data(), 0};
    ++scanned;
  }
  if (scanned == 0) {
    return;
  }
  cell_scan().scan(scans.data(), scanned, codes_ + first * index_.quads * 4 * kScanLanes, groups,
                   index_.quads);
  for (int64_t s = 0; s < scanned; ++s) {
    take_hits(cell, which[s], first, scans[s], scratch);
  }
}

// Adds the classes that a scan of query i found to its candidates.
void CellReader::take_hits(const Cell& cell, int64_t i, int64_t first, const ScanQuery& scan,
                           ScanScratch& scratch) const {
  BestClasses& best = *cell.best[i];
  const int64_t offset = queries_[cell.query[i]].offset;
  for (int64_t hit = 0; hit < scan.count; ++hit) {
    const int64_t id = order_[first * kScanLanes + scan.slot[hit]];
    double score = cell.product[i] + cell.unit[i] * double(scan.product[hit] - offset);
    if (is_perturbed() && id >= 0 && id < classes_) {
      score += noise(cell.query[i], id);
    }
    if (id >= 0 && !(score + cell.error[i] < best.threshold)) {
      best.add(k_, score - cell.error[i], score + cell.error[i], id);
    }
  }
  if (int64_t(best.candidates.size()) > kCandidates) {
    rescore(cell.query[i], best, scratch);
  }
}

} // namespace xsoftmax
