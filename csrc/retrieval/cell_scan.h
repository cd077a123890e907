#pragma once

#include "cpu/cpu_dispatch.h"
#include "cpu/simd.h"

#include <cstdint>

namespace xsoftmax {

constexpr int64_t kScanLanes = 16;  ///< rows, or cells, per vectorised product
constexpr int64_t kScanQueries = 4; ///< queries that share each load of a cell

/// The 8-bit code of a vector z: z is approximately scale x code.
struct VectorCode {
  double scale = 1;
  double residual = 0; ///< |z - scale x code|
  double offset = 0;   ///< contribution of the 128 in the codes of rows to a product
};

/// Inner loops of a search: products with 16 rows at once. Rows are stored in groups of 16, with
/// four coordinates (a quad) of each row adjacent: codes [groups, quads, 16, 4].
struct CellScanTable {
  /// Writes the code of a finite vector z of n coordinates.
  VectorCode (*encode)(int8_t* code, const double* z, int64_t n);
  /// peak[query, group] = the largest product sum(code x query code), exact in int32, of the 16
  /// rows of each group, for n <= kScanQueries queries.
  void (*peaks)(int32_t* peak, const int8_t* const* query, int64_t n, const uint8_t* codes,
                int64_t groups, int64_t quads);
  /// Writes the products of the 16 rows of a group. Returns a mask with bit `lane` set where the
  /// product is at least the threshold.
  uint32_t (*hits)(int32_t* product, const int8_t* query, const uint8_t* codes, int64_t quads,
                   int32_t threshold);
  /// out[group] = base + unit * (peak[group] - offset) + tail * tails[group]. Returns the
  /// largest, infinity if one is NaN.
  double (*bounds)(double* out, const int32_t* peak, const float* tails, int64_t groups,
                   double base, double unit, double offset, double tail);
  /// out[block, query, lane] = sum_d query[query, d] * rows[block, d, lane], with 16 rows per
  /// block. Sums are in the order of d, independent of n.
  void (*score)(float* out, const float* query, int64_t n, const float* rows, int64_t blocks,
                int64_t width);
  /// Returns a mask with bit `lane` set unless centre[lane] + length * reach[lane] < threshold.
  uint32_t (*reached)(const float* centre, const float* reach, float length, float threshold);
  /// out[lane] = size[lane] P(X > threshold), X Gaussian with mean centre[lane] and standard
  /// deviation deviation * reach[lane]
  void (*expected_hits)(float* out, const float* centre, const float* reach, const float* size,
                        float deviation, float threshold);

  /// Returns sum_d query[d] * row[d].
  double (*dot_f32)(const double* query, const float* row, int64_t width);
  double (*dot_f64)(const double* query, const double* row, int64_t width);
  double (*dot_bf16)(const double* query, const Bf16* row, int64_t width);
  double (*dot_f16)(const double* query, const F16* row, int64_t width);

  double dot(const double* query, const float* row, int64_t width) const {
    return dot_f32(query, row, width);
  }
  double dot(const double* query, const double* row, int64_t width) const {
    return dot_f64(query, row, width);
  }
  double dot(const double* query, const Bf16* row, int64_t width) const {
    return dot_bf16(query, row, width);
  }
  double dot(const double* query, const F16* row, int64_t width) const {
    return dot_f16(query, row, width);
  }
};

XS_DECLARE_ISA_TABLE(CellScanTable, cell_scan)

} // namespace xsoftmax
