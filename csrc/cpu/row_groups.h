#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace xsoftmax {

/// Positions in a list of row ids, grouped by id. Group g has positions order[starts[g]] to
/// order[starts[g + 1] - 1], in ascending order, and groups are in ascending order of id. Sums over
/// one group at a time therefore do not depend on the number of threads.
struct RowGroups {
  std::vector<int64_t> order;  ///< [n] positions, sorted by (id, position)
  std::vector<int64_t> starts; ///< [groups + 1]

  int64_t size() const { return int64_t(starts.size()) - 1; }
  std::span<const int64_t> operator[](int64_t group) const {
    return {order.data() + starts[group], size_t(starts[group + 1] - starts[group])};
  }
};

/// Groups the positions of `ids` [n], which must not be negative.
RowGroups group_rows(const int64_t* ids, int64_t n);

} // namespace xsoftmax
