#pragma once

#include "cpu/cpu_dispatch.h"
#include "cpu/simd.h"

#include <cstdint>

namespace xsoftmax {

constexpr int64_t kScanLanes = 16;  ///< rows, or cells, per vectorised product
constexpr int64_t kScanQueries = 4; ///< queries that share each load of a cell

/// Input and output of a scan for one query.
struct ScanQuery {
  const int8_t* code; ///< [4 quads]
  int32_t threshold;
  int32_t* slot;    ///< slots whose product is at least the threshold; room for 16 groups
  int32_t* product; ///< products of these slots
  int64_t count;    ///< number of these slots
};

/// Inner loops of a search: products with 16 rows at once. Rows are stored in groups of 16, with
/// four coordinates (a quad) of each row adjacent: codes [groups, quads, 16, 4].
struct CellScanTable {
  /// Finds, for each of n <= kScanQueries queries, the slots (row - 16 x first group) whose product
  /// sum(code x query code), exact in int32, is at least the threshold.
  void (*scan)(ScanQuery* query, int64_t n, const uint8_t* codes, int64_t groups, int64_t quads);
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
