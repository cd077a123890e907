#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace xsoftmax {

/// Returns how many directions a search compares first, in tables of rows with this many
/// coordinates: a sixteenth of them, but at least 16. 0 for short rows, whose codes are as quickly
/// compared whole, and for very long ones, whose directions would take minutes to find.
constexpr int64_t search_directions(int64_t width) {
  constexpr int64_t shortest = 96, longest = 4096, fewest = 16;
  const int64_t sixteenth = (width / 16 + 3) / 4 * 4;
  return width < shortest || width > longest ? 0 : sixteenth < fewest ? fewest : sixteenth;
}

/// Finds directions in which rows are long: approximately the leading eigenvectors of the sum of r
/// r^T over a sample of rows. Deterministic for any number of threads.
///
/// Args:
///   read: writes row i to a buffer of `width` numbers.
///   count: the number of rows. Those with a value that is not finite are left out.
///   stopped: returns whether to give up, which is asked several times a second.
///
/// Returns [directions, width], orthonormal up to rounding.
std::vector<double> leading_directions(const std::function<void(int64_t, double*)>& read,
                                       int64_t count, int64_t width, int64_t directions,
                                       const std::function<bool()>& stopped);

} // namespace xsoftmax
