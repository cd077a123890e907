#include "core/row_groups.h"

#include <algorithm>
#include <numeric>

namespace xsoftmax {
namespace {

// Sorting (id, position) as one integer is several times faster than sorting positions by a look-up; it needs both to fit.
bool sort_packed(const int64_t* ids, int64_t n, std::vector<int64_t>& order) {
  constexpr int kPositionBits = 24;
  const bool fits = n <= (int64_t(1) << kPositionBits) &&
      std::all_of(ids, ids + n, [](int64_t id) { return uint64_t(id) < (uint64_t(1) << (63 - kPositionBits)); });
  if (!fits) {
    return false;
  }
  for (int64_t i = 0; i < n; ++i) {
    order[i] = (ids[i] << kPositionBits) | i;
  }
  std::sort(order.begin(), order.end());
  for (int64_t& entry : order) {
    entry &= (int64_t(1) << kPositionBits) - 1;
  }
  return true;
}

} // namespace

RowGroups group_rows(const int64_t* ids, int64_t n) {
  RowGroups groups;
  groups.order.resize(n);
  if (std::is_sorted(ids, ids + n)) {
    std::iota(groups.order.begin(), groups.order.end(), int64_t(0));
  } else if (!sort_packed(ids, n, groups.order)) {
    std::iota(groups.order.begin(), groups.order.end(), int64_t(0));
    std::stable_sort(groups.order.begin(), groups.order.end(), [ids](int64_t a, int64_t b) { return ids[a] < ids[b]; });
  }
  groups.starts.reserve(n + 1);
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || ids[groups.order[i]] != ids[groups.order[i - 1]]) {
      groups.starts.push_back(i);
    }
  }
  groups.starts.push_back(n);
  return groups;
}

} // namespace xsoftmax
