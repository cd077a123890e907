#pragma once

#include "table/sparse_rows.h"
#include "matcher/sibling_solver.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace xsoftmax {

/// The rows of one parent with renumbered columns, so that the weights of siblings are close in
/// memory.
class ParentRows {
 public:
  /// Copies `count` rows, and appends a column of value `bias` unless that is 0. place: scratch
  /// [features], -1 before and after.
  void gather(const SparseRowsView& examples, const int32_t* rows, int64_t count, float bias,
              std::vector<int32_t>& place);

  int64_t count() const { return count_; }
  int64_t columns() const { return int64_t(feature_.size()); }
  /// Returns the feature id of a column.
  int32_t feature(int64_t column) const { return feature_[column]; }

  /// Calls found(position among the rows, position in the list) for each element of an increasing
  /// list that is one of the rows.
  template <typename Found>
  void match(const int32_t* list, int64_t size, const Found& found) const {
    const int32_t *at = rows_, *end = rows_ + count_;
    for (int64_t t = 0; t < size && at < end; ++t) {
      at = std::lower_bound(at, end, list[t]);
      if (at < end && *at == list[t]) {
        found(at - rows_, t);
      }
    }
  }

  void fill(SiblingProblem& problem) const {
    problem.rows = count_;
    problem.columns = columns();
    problem.start = start_.data();
    problem.column = column_.data();
    problem.value = value_.data();
    problem.square = square_.data();
  }

 private:
  const int32_t* rows_ = nullptr;
  int64_t count_ = 0;
  std::vector<int32_t> feature_, column_;
  std::vector<int64_t> start_;
  std::vector<float> value_, square_;
};

} // namespace xsoftmax
