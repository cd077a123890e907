#pragma once

#include "core/optional.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {

// A search index of a class table as it is now: cells of classes with what bounds the scores in them. All tensors are on the
// table's device.
//
// search_index(weight [N, D], bias [N] or none, cell int32 [N], num_cells) -> index, with W = D, or D + 1 with a bias, which is one more coordinate,
// b / beta, of the rows, beside beta in a query; a row is (its cell's centre c) + (a remainder r), and r is nearly scale x code:
//
//   order     int64 [16 G]             classes in groups of 16, cell after cell, in a cell by falling |r|; -1: none. G = (N + 15 num_cells) / 16
//   codes     uint8 [G, ceil(W / 4), 16, 4]  128 + round(r / scale), of a group four coordinates of each row side by side
//   start     int64 [num_cells + 1]    the first group of each cell
//   radius    float32 [G]              no |r| of this group or a later one of its cell is larger
//   centre    float32 [B, W, 16]       of 16 cells side by side; B = ceil(num_cells / 16)
//   bounds    float32 [5, 16 B]        of each cell: reach, the largest |r| with what rounding may add to z.c / |z|; scale; code_error, the largest
//                                      |r - scale x code| with the same; code_norm, the largest |scale x code|; size, the number of classes. Of a
//                                      cell without classes the reach is -inf.
//   beta      float32 []               a power of two, at which biases spread as the coordinates of rows do
//
// Bounds are rounded up. cell: in [0, num_cells), 1 <= num_cells <= 2^20. W is at most 2^15. Rows and biases must be finite.
//
// For a query z, and ẑ its code in 8 bits: z.w lies in z.c +- |z| reach, and within |z| code_error + |z - ẑ| code_norm of z.c + ẑ.(scale x code).

constexpr int64_t kBounds = 5;
enum SearchBound : int64_t { kReach, kScale, kCodeError, kCodeNorm, kSize };

struct SearchIndexView {
  SearchIndexView(const char* op, at::TensorList index, const at::Tensor& weight, const OptionalTensor& bias); ///< checked, but for values

  at::Tensor order, codes, start, radius, centre, bounds, beta;
  int64_t cells, blocks, groups, quads, width; ///< B, G, W

  /// Cells follow each other and end with the groups.
  void check_starts(const char* op) const;
  const float* bound(SearchBound which) const { return bounds.const_data_ptr<float>() + which * blocks * 16; }
};

/// The least float that is not below x.
inline float above(double x) {
  const float nearest = float(x);
  return double(nearest) >= x ? nearest : std::nextafter(nearest, std::numeric_limits<float>::infinity());
}

} // namespace xsoftmax
