#pragma once

#include "retrieval/cell_scan.h"
#include "retrieval/search_index.h"
#include "retrieval/search_topk.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// Reads the cells of a search index on the CPU, and collects the classes that may be among the best
// of a query.

namespace xsoftmax {

constexpr int64_t kSearchWave = 1024; // queries whose products with the centres are stored at once
constexpr int64_t kNoiseWave = 1 << 24; // noise of groups that is stored at once

struct ScoredClass {
  double score;
  int64_t id;

  friend bool operator<(const ScoredClass& a, const ScoredClass& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
  }
};

/// A query and its codes. It is searched as z 2^exponent, whose largest coordinate is in [1, 2), so
/// that bounds neither overflow nor underflow.
struct CodedQuery {
  bool searched = false; // whether it is finite and not 0
  int exponent = 0;
  double factors[2] = {1, 1}; // their product is 2^exponent, which need not be a normal number
  double length = 0; // |z|
  VectorCode whole;
  VectorCode coarse; // of its coordinates in the basis; without a basis, the same as `whole`
  double tail = 0; // length of the component of z outside the basis

  double scaled(double x) const { return x * factors[0] * factors[1]; } // x 2^exponent
};

/// Candidates and results of a query. Every class that was read and is not in one of the lists is
/// below the threshold.
struct BestClasses {
  struct Candidate {
    double upper;
    int64_t id;
  };
  std::vector<double> lower; // the k largest lower bounds: a heap, smallest in front
  std::vector<Candidate> candidates; // not yet rescored
  std::vector<ScoredClass> scored; // the best k of those that were rescored
  double threshold = -std::numeric_limits<double>::infinity(); // at least k classes score this much
  int64_t cells = 0; // number of cells read

  void add(int64_t k, double low, double upper, int64_t id);
};

/// Buffers of a thread.
struct ScanScratch {
  std::vector<int32_t> peaks;
  std::vector<double> bounds, wide, coordinates;
};

/// Reads cells for waves of queries. Derived classes know the dtype of the class table.
class CellReader {
 public:
  CellReader(const SearchIndexView& index, int64_t classes, int64_t k,
             const SearchOptions& options);
  virtual ~CellReader() = default;

 protected:
  /// Reads the cells of queries [first, first + count), which found_ and queries_ then describe.
  void read_wave(int64_t first, int64_t count);
  /// Converts a query to float64 and appends beta, the factor of the bias coordinate.
  virtual void widen(int64_t q, std::vector<double>& wide) const = 0;
  /// Scores the candidates in float64 and keeps the best k.
  virtual void rescore(int64_t q, BestClasses& found, ScanScratch& scratch) const = 0;
  /// Returns a mask of the cells of a block that may hold one of the best and were not read.
  uint32_t remaining(int64_t q, int64_t block, double threshold) const;

  /// Returns a bound of the rounding errors of sums of a score and noise.
  double noise_rounding(double noise) const {
    return is_perturbed() && std::isfinite(noise) ? 0x1p-48 * std::abs(noise) : 0;
  }
  /// Adds noise [*, classes] to the scores: row q belongs to query q of all waves.
  void perturb(const float* noise) { noise_ = noise; }
  bool is_perturbed() const { return noise_ != nullptr; }
  int64_t wave_size() const {
    return is_perturbed()
        ? std::clamp<int64_t>(kNoiseWave / std::max<int64_t>(1, index_.groups), 1, kSearchWave)
        : kSearchWave;
  }
  /// Returns the scaled noise of a class, 0 if there is none.
  double noise(int64_t q, int64_t id) const {
    return !is_perturbed() ? 0 : queries_[q].scaled(noise_[(first_ + q) * classes_ + id]);
  }

  const SearchIndexView& index_;
  const int64_t classes_, k_;
  const SearchOptions options_;
  const bool exact_;
  int64_t first_ = 0, count_ = 0; // queries of this wave
  std::vector<CodedQuery> queries_;
  std::vector<BestClasses> found_;

 private:
  struct Cell;

  int64_t chunk_size(int64_t chunk) const;
  int64_t product_offset(int64_t q, int64_t block) const;
  const float* products(int64_t q, int64_t block) const {
    return products_.data() + product_offset(q, block);
  }
  // The products, plus the largest noise of each cell.
  const float* peaks(int64_t q, int64_t block) const {
    return (is_perturbed() ? peaks_ : products_).data() + product_offset(q, block);
  }
  const float* bounds(SearchBound which, int64_t block) const {
    return index_.bound(which) + block * kScanLanes;
  }
  float deviation(int64_t q) const;
  void place_noise(int64_t q);

  void prepare(int64_t q, ScanScratch& scratch, float* row);
  void read_first(int64_t q, ScanScratch& scratch);
  void read_promising(int64_t q, ScanScratch& scratch);
  void read_chunks(int64_t chunks);
  void read_in_parts(int64_t chunks);
  void read_remaining(int64_t chunk, int64_t first_block, int64_t last_block, BestClasses* found,
                      ScanScratch& scratch);
  void scan_cell(int64_t cell, const int64_t* query, int64_t n, BestClasses* found,
                 ScanScratch& scratch, bool indexed = false);
  void scan_groups(const Cell& cell, int64_t first, int64_t last, ScanScratch& scratch);
  void read_groups(const Cell& cell, int64_t i, int64_t first, int64_t groups, const int32_t* peak,
                   ScanScratch& scratch);
  void read_group(const Cell& cell, int64_t i, int64_t group, double noise_of_group,
                  ScanScratch& scratch);
  double group_noise(int64_t q, int64_t group) const {
    return is_perturbed() ? queries_[q].scaled(group_noise_[q * index_.groups + group]) : 0;
  }

  const int64_t *start_, *order_;
  const float *radius_, *tail_;
  const uint8_t *codes_, *coarse_;
  const int64_t coarse_quads_;
  std::vector<int8_t> query_codes_, query_coarse_;
  std::vector<float> products_, peaks_;
  const float* noise_ = nullptr;
  std::vector<float> group_noise_; // [queries, groups], the largest of each group
  std::vector<uint16_t> read_; // masks of the cells of each block that were read
};

} // namespace xsoftmax
