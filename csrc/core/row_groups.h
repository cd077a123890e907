#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace xsoftmax {

/// Positions of a list of row ids, grouped by id. Group g holds positions order[starts[g]] .. order[starts[g + 1] - 1], in rising
/// order, and groups stand in rising order of id: sums taken group by group do not depend on the number of threads.
struct RowGroups {
  std::vector<int64_t> order;  ///< [n] positions, sorted by id, equal ids by position
  std::vector<int64_t> starts; ///< [groups + 1]

  int64_t size() const { return int64_t(starts.size()) - 1; }
  std::span<const int64_t> operator[](int64_t group) const { return {order.data() + starts[group], size_t(starts[group + 1] - starts[group])}; }
};

/// ids are not negative.
RowGroups group_rows(const int64_t* ids, int64_t n);

} // namespace xsoftmax
