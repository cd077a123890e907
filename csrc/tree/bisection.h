#pragma once

#include "op/long_work.h"
#include "table/sparse_rows.h"

#include <cstdint>
#include <optional>
#include <vector>

// 2-means with fixed or free part sizes, one step of label_tree_clusters.

namespace xsoftmax {

/// How nodes are split.
struct ClusterOptions {
  uint64_t seed;
  int64_t iterations;
  bool spherical;
};

/// Bisects a segment. Runs on all threads, unless it is called from a parallel region.
class Bisection {
 public:
  Bisection(const SparseRowsView& vectors, const ClusterOptions& cluster_options, LongWork& work);

  /// Bisects rows [size], sorted ascending: on return the first `left` are the first half. Both
  /// halves are sorted ascending.
  void cut(int32_t* rows, int64_t size, int64_t left, uint64_t key);
  /// Bisects at least two rows: each row joins the closer centre. Each part gets at least 1/16 of
  /// the rows, because splitting off single outliers would make the tree deep. Returns the size of
  /// the first part.
  int64_t cut_by_distance(int32_t* rows, int64_t size, uint64_t key);

 private:
  struct Change {
    int32_t row;
    int32_t sign; // +1: joins the first half, -1: leaves it
  };

  // Returns the size of the first part; equals `left` if set.
  int64_t cut_rows(int32_t* rows, int64_t size, std::optional<int64_t> left, uint64_t key);
  // Returns how many rows are closer to the first centre, within the limits of cut_by_distance.
  int64_t closer_rows(int64_t size) const;

  // The result of a stopped bisection is discarded, so it may stop anywhere.
  bool stopped_at(int64_t i) const { return i % 1024 == 0 && work_.stopped(); }

  // Sets total_ and touched_ for all rows of a segment.
  void add_all(const int32_t* rows, int64_t size);
  // Whether there are enough changes to add them in blocks, on all threads.
  bool adds_in_blocks() const;
  void add_rows(int64_t begin, int64_t end, double* sum) const;
  void add_changes(std::vector<double>& sum);
  // Adds a row as a centre, and returns its squared norm; 0 if only directions matter.
  double add_direction(int32_t row, double sign);
  // Sets direction_ to the difference of the centres: first half minus second half.
  void make_direction(int64_t left, int64_t size);
  void score(const int32_t* rows, int64_t size);
  // Puts the `left` rows with the highest scores in the first half; among equal scores, earlier
  // rows. Sets changes_ to the rows that changed sides.
  void assign(const int32_t* rows, int64_t size, int64_t left);
  void move(int32_t* rows, int64_t size);

  const SparseRowsView& vectors_;
  LongWork& work_;
  uint64_t seed_;
  int64_t iterations_;
  bool spherical_;
  // Sums per feature over all rows and over the first half, updated with the rows that change
  // sides.
  std::vector<double> total_, sum_;
  std::vector<float> direction_, score_;
  double middle_ = 0; // the score at equal distances
  std::vector<uint8_t> seen_;
  std::vector<int32_t> touched_, order_, moved_; // touched_: features that occur in the segment
  std::vector<int8_t> side_, next_side_;
  std::vector<Change> changes_;
  std::vector<std::vector<double>> blocks_;
};

} // namespace xsoftmax
