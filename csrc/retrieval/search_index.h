#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {

// A search index: a snapshot of a class table in which the classes are grouped into cells, with
// bounds on the scores in each cell. All tensors are on the table's device.
//
// search_index(weight [N, D], bias [N] or none, cell int32 [N], num_cells, queries [Q, D] or none)
// -> index
//
// W = D, or D + 1 with a bias: the bias is an additional coordinate, b / beta in a row and beta in
// a query. A row is the sum of its cell's centre c and a remainder r, and r is approximately scale
// x code. The tensors of the index:
//
//   order   int64   [16 G]                    class ids in groups of 16, cell by cell, by falling
//                                             |r| within a cell; -1: padding.
//                                             G = (N + 15 num_cells) / 16
//   codes   uint8   [G, ceil(W / 4), 16, 4]   128 + round(r / scale); four coordinates of each
//                                             row of a group are adjacent
//   start   int64   [num_cells + 1]           first group of each cell
//   radius  float32 [G]                       upper bound of |r| in this group and all later
//                                             groups of its cell
//   centre  float32 [B, W, 16]                centres, 16 cells side by side;
//                                             B = ceil(num_cells / 16)
//   bounds  float32 [8, 16 B]                 per cell:
//                                             reach: the largest |r|, plus the rounding error of
//                                               z.c / |z|; -inf for a cell without classes
//                                             scale
//                                             code_error: the largest |r - scale x code|, plus
//                                               the same rounding error
//                                             code_norm: the largest |scale x code|
//                                             size: the number of classes
//                                             coarse_scale, coarse_error, coarse_norm: scale,
//                                               code_error and code_norm of the coarse codes
//   beta    float32 []                        power of two that scales biases to the spread of
//                                             the other coordinates
//   basis   float64 [P, W]                    orthonormal directions in which `queries` are long,
//                                             or else the rows,
//                                             P = search_directions(W); 0 for short rows
//   coarse  uint8   [G, P / 4, 16, 4]         as codes, of the coordinates of r in the basis
//   tail    float32 [G]                       upper bound in this group of the length of the
//                                             component of r outside the basis
//
// Bounds are rounded up. cell: values in [0, num_cells), 1 <= num_cells <= 2^20. W is at most 2^15.
// Rows and biases must be finite.
//
// For a query z with 8-bit code ẑ, z.w is within |z| reach of z.c, and within |z| code_error + |z -
// ẑ| code_norm of z.c + ẑ.(scale x code). For its coordinates y in the basis, with 8-bit code ŷ,
// z.w is within |z| coarse_error + |y - ŷ| coarse_norm + t tail of z.c + ŷ.(coarse_scale x coarse),
// where t is the length of the component of z outside the basis.

constexpr int64_t kBounds = 8;
enum SearchBound : int64_t {
  kReach,
  kScale,
  kCodeError,
  kCodeNorm,
  kSize,
  kCoarseScale,
  kCoarseError,
  kCoarseNorm
};

/// The squared length of the component of a vector outside a basis, given the squared lengths of
/// the vector and of its coordinates. Rounded up by more than the basis differs from an orthonormal
/// one: with M = 1 - B^T B + 1e-9, which is positive, z.r - (Bz).(Br) = z.Mr - 1e-9 z.r, and z.Mr
/// is at most the root of z.Mz r.Mr.
inline double remaining_square(double square, double of_coordinates) {
  return (square > of_coordinates ? square - of_coordinates : 0) + 1e-9 * square;
}

struct SearchIndexView {
  /// Checks the shapes, dtypes and devices of an index, but not its values.
  SearchIndexView(const char* op, at::TensorList index, const at::Tensor& weight,
                  const OptionalTensor& bias);

  at::Tensor order, codes, start, radius, centre, bounds, beta, basis, coarse, tail;
  int64_t cells, blocks, groups, quads, width; ///< B, G, W
  int64_t directions; ///< P

  /// Checks that the starts of the cells rise and are within the groups. CPU only.
  void check_starts(const char* op) const;
  const float* bound(SearchBound which) const {
    return bounds.const_data_ptr<float>() + which * blocks * 16;
  }
};

/// Returns the smallest float that is not below x.
inline float above(double x) {
  const float nearest = float(x);
  return double(nearest) >= x ? nearest
                              : std::nextafter(nearest, std::numeric_limits<float>::infinity());
}

} // namespace xsoftmax
