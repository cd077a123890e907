#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace xsoftmax {

/// Returns how many directions a search compares first, in tables of rows with this many
/// coordinates: a sixteenth of them; 0 for short rows, whose codes are as quickly compared whole.
constexpr int64_t search_directions(int64_t width) {
  constexpr int64_t shortest = 96, fewest = 16;
  const int64_t some = (width / 16 + 3) / 4 * 4;
  return width < shortest ? 0 : some < fewest ? fewest : some;
}

/// Finds directions in which rows are long: approximately the leading eigenvectors of the sum of r
/// r^T over a sample of rows. Deterministic for any number of threads.
///
/// Args:
///   read: writes row i to a buffer of `width` numbers.
///   count: the number of rows.
///
/// Returns [directions, width], orthonormal up to rounding.
std::vector<double> leading_directions(const std::function<void(int64_t, double*)>& read,
                                       int64_t count, int64_t width, int64_t directions);

} // namespace xsoftmax
