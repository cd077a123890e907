#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "retrieval/cell_scan.h"
#include "retrieval/search_topk.h"
#include "table/row_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "search_topk";
constexpr int64_t kWave = 1024; // queries whose products with the centres are stored at once
constexpr int64_t kChunk = 64; // queries that scan the cells together
constexpr int64_t kParts = 8; // tasks that share the cells of a chunk if queries are few
constexpr int64_t kGroups = 64; // groups of a cell per scan
constexpr int64_t kFirstCells = 8; // cells read before the bounds of the others are compared
constexpr int64_t kFirstLikely = 2; // the same if the number of cells is limited
constexpr int64_t kCandidates = 4096; // candidates per query before they are rescored
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Scored {
  double score;
  int64_t id;

  friend bool operator<(const Scored& a, const Scored& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
  }
};

// A query and its code. It is searched as z 2^exponent, whose largest coordinate is in [1, 2), so
// that bounds neither overflow nor underflow.
struct Query {
  bool searched = false; // whether it is finite and not 0
  int exponent = 0;
  double length = 0; // |z|
  double scale = 1; // z is approximately scale x code
  double lost = 0; // |z - scale x code|
  int64_t offset = 0; // contribution of the 128 in the codes of rows to a product
};

// Candidates and results of a query. Every class that was read and is not in one of the lists is
// below the threshold.
struct Best {
  struct Candidate {
    double upper;
    int64_t id;
  };
  std::vector<double> lower; // the k largest lower bounds: a heap, smallest in front
  std::vector<Candidate> candidates; // not yet rescored
  std::vector<Scored> scored; // the best k of those that were rescored
  double threshold = -kInfinity; // at least k classes score this much
  int64_t cells = 0; // number of cells read

  void add(int64_t k, double low, double upper, int64_t id) {
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
};

// Scan buffers of a thread.
struct Scratch {
  std::array<std::vector<int32_t>, kScanQueries> slot, product;
  std::vector<double> wide;

  Scratch() {
    for (int64_t i = 0; i < kScanQueries; ++i) {
      slot[i].resize(kGroups * kScanLanes);
      product[i].resize(kGroups * kScanLanes);
    }
  }
};

struct Likely {
  float value;
  int64_t cell;

  friend bool operator>(const Likely& a, const Likely& b) {
    return a.value > b.value || (a.value == b.value && a.cell < b.cell);
  }
};

// Keeps the `keep` most likely cells in a heap, least likely in front.
void keep_best(std::vector<Likely>& cells, int64_t keep, Likely one) {
  if (int64_t(cells.size()) == keep) {
    if (!(one > cells.front())) {
      return;
    }
    std::pop_heap(cells.begin(), cells.end(), std::greater<>());
    cells.pop_back();
  }
  cells.push_back(one);
  std::push_heap(cells.begin(), cells.end(), std::greater<>());
}

template <typename T>
class Search {
 public:
  Search(const Tensor& input, const Tensor& weight, const Tensor& bias,
         const SearchIndexView& index, int64_t k, const SearchOptions& options)
      : input_(const_data<T>(input)), weight_(const_data<T>(weight)),
        bias_(bias.defined() ? const_data<T>(bias) : nullptr), index_(index), k_(k),
        options_(options), classes_(weight.size(0)), features_(weight.size(1)),
        start_(index.start.const_data_ptr<int64_t>()),
        order_(index.order.const_data_ptr<int64_t>()),
        radius_(index.radius.const_data_ptr<float>()),
        codes_(index.codes.const_data_ptr<uint8_t>()), exact_(!options.max_cells.has_value()) {}

  void run(int64_t queries, opmath<T>* scores, int64_t* ids, int64_t* cells_read, bool* certified) {
    for (first_ = 0; first_ < queries; first_ += kWave) {
      count_ = std::min(kWave, queries - first_);
      wave();
      at::parallel_for(0, count_, 1, [&](int64_t begin, int64_t end) {
        Scratch scratch;
        for (int64_t q = begin; q < end; ++q) {
          const int64_t at = first_ + q;
          write(q, scratch, scores + at * k_, ids + at * k_, cells_read + at, certified + at);
        }
      });
    }
  }

 private:
  int64_t chunk_size(int64_t chunk) const { return std::min(kChunk, count_ - chunk * kChunk); }

  // Returns z.c for the 16 cells of a block.
  const float* products(int64_t q, int64_t block) const {
    const int64_t chunk = q / kChunk;
    return products_.data() +
        (chunk * kChunk * index_.blocks + block * chunk_size(chunk) + q % kChunk) * kScanLanes;
  }
  const float* bounds(SearchBound which, int64_t block) const {
    return index_.bound(which) + block * kScanLanes;
  }

  // Returns a mask of the cells of a block that may hold one of the best and were not read.
  uint32_t left(int64_t q, int64_t block, double threshold) const {
    const float length = above(queries_[q].length), least = -above(-threshold);
    const uint32_t bits =
        cell_scan().reached(products(q, block), bounds(kReach, block), length, least) &
        ~uint32_t(read_[q * index_.blocks + block]);
    return (block + 1) * kScanLanes <= index_.cells
        ? bits
        : bits & ((uint32_t(1) << (index_.cells - block * kScanLanes)) - 1);
  }

  void wave() {
    queries_.assign(count_, {});
    found_.assign(count_, {});
    codes_of_.assign(count_ * index_.quads * 4, 0);
    products_.resize(count_ * index_.blocks * kScanLanes);
    read_.assign(count_ * index_.blocks, 0);
    const int64_t chunks = (count_ + kChunk - 1) / kChunk;
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> rows(kChunk * index_.width);
      Scratch scratch;
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        for (int64_t j = 0; j < chunk_size(chunk); ++j) {
          prepare(chunk * kChunk + j, scratch, rows.data() + j * index_.width);
        }
        cell_scan().score(products_.data() + chunk * kChunk * index_.blocks * kScanLanes,
                          rows.data(), chunk_size(chunk), index_.centre.const_data_ptr<float>(),
                          index_.blocks, index_.width);
      }
    });
    at::parallel_for(0, count_, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t q = begin; q < end; ++q) {
        if (queries_[q].searched) {
          read_first(q, scratch);
          if (!exact_) {
            read_likely(q, scratch);
          }
        }
      }
    });
    if (exact_) {
      chunks < kParts ? read_in_parts(chunks) : read_chunks(chunks);
    }
  }

  // Converts a query to float64 and appends beta, the factor of the bias coordinate.
  void widen(int64_t q, std::vector<double>& wide) const {
    const T* input = input_ + (first_ + q) * features_;
    wide.resize(index_.width);
    if constexpr (std::is_same_v<T, double>) {
      std::copy_n(input, features_, wide.data());
    } else {
      std::vector<float> row(features_);
      row_kernels().of(input).widen_row(row.data(), input, features_);
      std::copy_n(row.data(), features_, wide.data());
    }
    if (bias_ != nullptr) {
      wide[features_] = index_.beta.const_data_ptr<float>()[0];
    }
  }

  void prepare(int64_t q, Scratch& scratch, float* row) {
    Query& query = queries_[q];
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
    int8_t* code = codes_of_.data() + q * index_.quads * 4;
    query.exponent = -std::ilogb(largest);
    query.scale = std::scalbn(largest, query.exponent) / 127;
    double square = 0, lost = 0;
    for (int64_t d = 0; d < index_.width; ++d) {
      const double z = std::scalbn(wide[d], query.exponent),
                   nearest = std::nearbyint(z / query.scale), error = z - nearest * query.scale;
      row[d] = float(z);
      code[d] = int8_t(nearest);
      query.offset += 128 * int64_t(nearest);
      square += z * z;
      lost += error * error;
    }
    query.length = std::sqrt(square) * (1 + 1e-7);
    query.lost = std::sqrt(lost) * (1 + 1e-7);
  }

  // Reads the most promising cells until they hold k classes.
  void read_first(int64_t q, Scratch& scratch) {
    const float range = 3 * deviation(q);
    const int64_t most = exact_ ? kFirstCells : std::min(kFirstLikely, *options_.max_cells);
    std::vector<Likely> cells;
    const auto gather = [&](int64_t keep) {
      for (int64_t block = 0; block < index_.blocks; ++block) {
        const float *product = products(q, block), *reach = bounds(kReach, block),
                    *size = bounds(kSize, block);
        for (int64_t lane = 0; lane < kScanLanes; ++lane) {
          if (size[lane] > 0 && block * kScanLanes + lane < index_.cells) {
            keep_best(cells, keep,
                      {product[lane] + range * reach[lane], block * kScanLanes + lane});
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
    const auto enough = [&] { return int64_t(found_[q].lower.size()) == k_; };
    if (!enough()) { // rare: small cells or a large k
      cells.clear();
      gather(index_.cells);
      for (; next < cells.size() && !enough(); ++next) {
        scan_cell(cells[next].cell, &q, 1, &found_[q], scratch);
      }
    }
  }

  // Returns the standard deviation of z.r / |r| for r of random direction.
  float deviation(int64_t q) const {
    return float(queries_[q].length / std::sqrt(double(index_.width)));
  }

  // Reads the cells that are likely to hold some of the best.
  void read_likely(int64_t q, Scratch& scratch) {
    Best& found = found_[q];
    const int64_t most = *options_.max_cells;
    std::vector<Likely> cells;
    while (found.cells < most) {
      // Recomputed each time the number of cells read has quadrupled: the threshold has risen, so
      // the ranking changes and some cells are excluded. max(1, ...) matters for a damaged index.
      const int64_t until = std::min(most, std::max<int64_t>(1, 4 * found.cells));
      cells.clear();
      for (int64_t block = 0; block < index_.blocks; ++block) {
        uint32_t bits = left(q, block, found.threshold);
        if (bits == 0) {
          continue;
        }
        std::array<float, kScanLanes> value;
        cell_scan().likely(value.data(), products(q, block), bounds(kReach, block),
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
      for (const Likely& one : cells) {
        scan_cell(one.cell, &q, 1, &found, scratch);
      }
    }
  }

  void read_chunks(int64_t chunks) {
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        read_left(chunk, 0, index_.blocks, found_.data() + chunk * kChunk, scratch);
      }
    });
  }

  // For few queries: splits the cells into parts. The split depends on shapes only.
  void read_in_parts(int64_t chunks) {
    std::vector<std::vector<Best>> of_part(chunks * kParts);
    at::parallel_for(0, chunks * kParts, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t chunk = i / kParts, part = i % kParts;
        of_part[i].resize(chunk_size(chunk));
        for (int64_t j = 0; j < chunk_size(chunk); ++j) {
          of_part[i][j].lower = found_[chunk * kChunk + j].lower;
          of_part[i][j].threshold = found_[chunk * kChunk + j].threshold;
        }
        read_left(chunk, index_.blocks * part / kParts, index_.blocks * (part + 1) / kParts,
                  of_part[i].data(), scratch);
      }
    });
    for (int64_t i = 0; i < chunks * kParts; ++i) {
      for (size_t j = 0; j < of_part[i].size(); ++j) {
        Best &into = found_[i / kParts * kChunk + j], &from = of_part[i][j];
        into.threshold = std::max(into.threshold, from.threshold);
        into.cells += from.cells;
        into.candidates.insert(into.candidates.end(), from.candidates.begin(),
                               from.candidates.end());
        into.scored.insert(into.scored.end(), from.scored.begin(), from.scored.end());
      }
    }
  }

  // Reads all cells of some blocks that the bounds do not exclude, cell by cell, so that queries
  // share the loads of a cell.
  void read_left(int64_t chunk, int64_t first_block, int64_t last_block, Best* found,
                 Scratch& scratch) {
    std::array<std::vector<int64_t>, kScanLanes> wanted;
    for (int64_t block = first_block; block < last_block; ++block) {
      for (int64_t j = 0; j < chunk_size(chunk); ++j) {
        const int64_t q = chunk * kChunk + j;
        if (!queries_[q].searched) {
          continue;
        }
        for (uint32_t bits = left(q, block, found[j].threshold); bits != 0; bits &= bits - 1) {
          wanted[std::countr_zero(bits)].push_back(q);
        }
      }
      for (int64_t lane = 0; lane < kScanLanes; ++lane) {
        const int64_t n = int64_t(wanted[lane].size());
        for (int64_t i = 0; i < n; i += kScanQueries) {
          scan_cell(block * kScanLanes + lane, wanted[lane].data() + i,
                    std::min(kScanQueries, n - i), found - chunk * kChunk, scratch,
                    /*indexed=*/true);
        }
        wanted[lane].clear();
      }
    }
  }

  // Scans a cell for n queries. found: results of the first query; if indexed, of query 0.
  void scan_cell(int64_t cell, const int64_t* query, int64_t n, Best* found, Scratch& scratch,
                 bool indexed = false) {
    const int64_t block = cell / kScanLanes, lane = cell % kScanLanes;
    const double scale = bounds(kScale, block)[lane], code_error = bounds(kCodeError, block)[lane],
                 code_norm = bounds(kCodeNorm, block)[lane];
    std::array<Best*, kScanQueries> best;
    std::array<double, kScanQueries> product, error, unit;
    for (int64_t i = 0; i < n; ++i) {
      const Query& of = queries_[query[i]];
      best[i] = indexed ? found + query[i] : found;
      product[i] = products(query[i], block)[lane];
      error[i] = of.length * code_error + of.lost * code_norm;
      unit[i] = of.scale * scale;
      read_[query[i] * index_.blocks + block] |= uint16_t(1) << lane;
      ++best[i]->cells;
    }
    for (int64_t first = start_[cell]; first < start_[cell + 1]; first += kGroups) {
      std::array<ScanQuery, kScanQueries> scans;
      std::array<int64_t, kScanQueries> which;
      int64_t scanned = 0, groups = 0;
      for (int64_t i = 0; i < n; ++i) {
        const Query& of = queries_[query[i]];
        // Groups are sorted by falling radius. Counts those that may hold one of the best.
        const float least =
            float(((best[i]->threshold - product[i]) / of.length - code_error) * (1 - 1e-6));
        const int64_t last = std::min(first + kGroups, start_[cell + 1]);
        const int64_t some = std::partition_point(radius_ + first, radius_ + last,
                                                  [&](float radius) { return !(radius < least); }) -
            (radius_ + first);
        const double threshold =
            std::floor((best[i]->threshold - product[i] - error[i]) / unit[i]) + double(of.offset);
        if (some == 0 || threshold > double(std::numeric_limits<int32_t>::max())) {
          continue;
        }
        groups = std::max(groups, some);
        const int32_t bound = threshold > double(std::numeric_limits<int32_t>::min())
            ? int32_t(threshold)
            : std::numeric_limits<int32_t>::min();
        which[scanned] = i;
        scans[scanned] = {codes_of_.data() + query[i] * index_.quads * 4, bound,
                          scratch.slot[scanned].data(), scratch.product[scanned].data(), 0};
        ++scanned;
      }
      if (scanned == 0) {
        continue;
      }
      cell_scan().scan(scans.data(), scanned, codes_ + first * index_.quads * 4 * kScanLanes,
                       groups, index_.quads);
      for (int64_t s = 0; s < scanned; ++s) {
        const int64_t i = which[s], offset = queries_[query[i]].offset;
        for (int64_t hit = 0; hit < scans[s].count; ++hit) {
          const int64_t id = order_[first * kScanLanes + scans[s].slot[hit]];
          const double score = product[i] + unit[i] * double(scans[s].product[hit] - offset);
          if (id >= 0 && !(score + error[i] < best[i]->threshold)) {
            best[i]->add(k_, score - error[i], score + error[i], id);
          }
        }
        if (int64_t(best[i]->candidates.size()) > kCandidates) {
          rescore(query[i], *best[i], scratch);
        }
      }
    }
  }

  // Scores the candidates in float64 and keeps the best k.
  void rescore(int64_t q, Best& found, Scratch& scratch) const {
    std::erase_if(found.candidates,
                  [&](const Best::Candidate& one) { return one.upper < found.threshold; });
    widen(q, scratch.wide);
    for (double& z : scratch.wide) {
      z = std::scalbn(z, queries_[q].exponent);
    }
    for (const Best::Candidate& one : found.candidates) {
      TORCH_CHECK_INDEX(one.id < classes_, kOp, ": expected classes in [-1, ", classes_,
                        ") in index[0], got ", one.id);
      for (int64_t byte = 0; byte < features_ * int64_t(sizeof(T)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(weight_ + one.id * features_) + byte);
      }
    }
    for (const Best::Candidate& one : found.candidates) {
      double score = cell_scan().dot(scratch.wide.data(), weight_ + one.id * features_, features_);
      if (bias_ != nullptr) {
        opmath<T> bias;
        row_kernels().of(bias_).widen_row(&bias, bias_ + one.id, 1);
        score += std::scalbn(double(bias), queries_[q].exponent);
      }
      found.scored.push_back({score, one.id});
    }
    found.candidates.clear();
    const int64_t kept = std::min<int64_t>(k_, int64_t(found.scored.size()));
    std::partial_sort(found.scored.begin(), found.scored.begin() + kept, found.scored.end());
    found.scored.resize(kept);
    if (kept == k_) {
      found.threshold = std::max(found.threshold, found.scored.back().score);
    }
  }

  void write(int64_t q, Scratch& scratch, opmath<T>* scores, int64_t* ids, int64_t* cells_read,
             bool* certified) {
    const Query& query = queries_[q];
    Best& found = found_[q];
    *cells_read = found.cells;
    *certified = true;
    if (!query.searched) {
      widen(q, scratch.wide);
      const bool zero =
          std::all_of(scratch.wide.begin(), scratch.wide.end(), [](double z) { return z == 0; });
      std::fill_n(scores, k_, zero ? opmath<T>(0) : std::numeric_limits<opmath<T>>::quiet_NaN());
      *certified = zero;
      for (int64_t i = 0; i < k_; ++i) {
        ids[i] = i;
      }
      return;
    }
    rescore(q, found, scratch);
    TORCH_CHECK_VALUE(int64_t(found.scored.size()) == k_, kOp,
                      ": expected an index that holds every class, got one with ",
                      found.scored.size(), " of ", k_, " classes found");
    for (int64_t i = 0; i < k_; ++i) {
      scores[i] = opmath<T>(std::scalbn(found.scored[i].score, -query.exponent));
      ids[i] = found.scored[i].id;
    }
    for (int64_t block = 0; block < index_.blocks && *certified && !exact_; ++block) {
      *certified = left(q, block, found.threshold) == 0;
    }
  }

  const T *input_, *weight_, *bias_;
  const SearchIndexView& index_;
  const int64_t k_;
  const SearchOptions options_;
  const int64_t classes_, features_;
  const int64_t *start_, *order_;
  const float* radius_;
  const uint8_t* codes_;
  const bool exact_;
  int64_t first_ = 0, count_ = 0; // queries of this wave
  std::vector<Query> queries_;
  std::vector<Best> found_;
  std::vector<int8_t> codes_of_;
  std::vector<float> products_;
  std::vector<uint16_t> read_; // masks of the cells of each block that were read
};

Found search_topk_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      at::TensorList index, c10::SymInt k, c10::string_view text) {
  const SearchOptions options =
      check_search_topk(input, weight, bias, k, {text.data(), text.size()});
  if (use_reference()) {
    return search_topk_reference(input, weight, bias, index, k, text);
  }
  const SearchIndexView of(kOp, index, weight, bias);
  of.check_starts(kOp);
  const int64_t queries = input.size(0), count = k.expect_int();
  const Tensor scores =
      at::empty({queries, count}, input.options().dtype(opmath_dtype(input.scalar_type())));
  const Tensor ids = at::empty({queries, count}, input.options().dtype(at::kLong)),
               cells = at::zeros({queries}, input.options().dtype(at::kLong));
  const Tensor certified = at::ones({queries}, input.options().dtype(at::kBool));
  if (scores.numel() == 0) {
    return {scores, ids, cells, certified};
  }
  const Tensor queries_in = input.contiguous(), rows = weight.contiguous(),
               biases = given(bias) ? bias->contiguous() : Tensor();
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    Search<T>(queries_in, rows, biases, of, count, options)
        .run(queries, data<opmath<T>>(scores), ids.mutable_data_ptr<int64_t>(),
             cells.mutable_data_ptr<int64_t>(), certified.mutable_data_ptr<bool>());
  });
  return {scores, ids, cells, certified};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("search_topk", search_topk_cpu); }

} // namespace xsoftmax
