#include "cpu/row_groups.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace xsoftmax {
namespace {

constexpr int kDigitBits = 11;
constexpr int64_t kDigits = int64_t(1) << kDigitBits;

// Sorts positions by id with a stable radix sort, one pass per 11 bits of the largest id (two for a
// million classes). A comparison sort of the 15,000 ids of a batch costs as much as scoring them.
void sort_positions(const int64_t* ids, int64_t n, std::vector<int64_t>& order) {
  const uint64_t largest = uint64_t(*std::max_element(ids, ids + n));
  std::vector<int64_t> other(n);
  for (int shift = 0; shift < 64 && (largest >> shift) != 0; shift += kDigitBits) {
    std::array<int64_t, kDigits + 1> start{};
    const auto digit = [&](int64_t position) {
      return int64_t(uint64_t(ids[position]) >> shift) & (kDigits - 1);
    };
    for (int64_t i = 0; i < n; ++i) {
      ++start[digit(i) + 1];
    }
    std::partial_sum(start.begin(), start.end(), start.begin());
    for (int64_t i = 0; i < n; ++i) {
      other[start[digit(order[i])]++] = order[i];
    }
    order.swap(other);
  }
}

} // namespace

RowGroups group_rows(const int64_t* ids, int64_t n) {
  RowGroups groups;
  groups.order.resize(n);
  std::iota(groups.order.begin(), groups.order.end(), int64_t(0));
  if (!std::is_sorted(ids, ids + n)) {
    sort_positions(ids, n, groups.order);
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
