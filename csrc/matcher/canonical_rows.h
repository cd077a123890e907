#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace xsoftmax {

/// The interpretation of the entries of sparse rows.
enum class RowKind {
  Features, ///< float32 numbers; zeros are dropped
  Labels,   ///< (row, column) pairs, the non-zeros; values become 1
  Weights,  ///< float32 numbers; stored zeros are kept
  Scores,   ///< ranked scores in their dtype; stored zeros and the order of entries are kept
};

/// Sparse rows in CSR form: row i has the entries offsets[i] to offsets[i + 1] - 1.
struct SparseRowTensors { at::Tensor offsets, columns, values; };

// canonical_rows(offsets int64 [n + 1], columns int32 or int64, values float32 or float64, width,
//                kind) -> Tensor[]
//   Returns offsets, columns and values of the same rows in canonical form, or an empty list if
//   they are canonical already. In canonical form, columns increase in each row, entries of the
//   same column are summed (in float64, in stored order), sums that cancel to 0 are dropped, and so
//   are zeros of features and labels. kind: "features", "labels", "weights" or "scores" (RowKind).
//   The resulting values are float32; scores keep their dtype. Scores are canonical in any order of
//   columns: only duplicate columns are summed, and only rows with duplicates are sorted.
//
//   Raises ValueError if offsets decrease or do not end at the number of columns, or if a value is
//   not finite in float32 (scores: if it is NaN); IndexError if a column is not in [0, width). For
//   canonical rows, takes one pass and allocates nothing.
std::optional<SparseRowTensors> canonical_rows(const char* op, const at::Tensor& offsets,
                                               const at::Tensor& columns, const at::Tensor& values,
                                               int64_t width, RowKind kind);

} // namespace xsoftmax
