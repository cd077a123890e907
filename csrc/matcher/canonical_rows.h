#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace xsoftmax {

/// How entries of sparse rows are read.
enum class RowKind {
  Features, ///< numbers in float32; zeros are dropped
  Labels,   ///< pairs of a row and a column, the non-zeros; values become 1
  Weights,  ///< numbers in float32; stored zeros count
  Scores,   ///< of a ranking, in their dtype; stored zeros count, and entries stay in their order
};

/// Sparse rows: those of row i stand from offsets[i] to offsets[i + 1] - 1.
struct SparseRowTensors { at::Tensor offsets, columns, values; };

// canonical_rows(offsets int64 [n + 1], columns int32 or int64, values float32 or float64, width, kind) -> Tensor[]: offsets, columns and values of the same
// rows in canonical form; an empty list if they have it already. Columns rise in each row, entries of one column are summed in float64, in the order in which
// they are stored, and zeros are dropped. kind: "features", "labels", "weights" or "scores" (RowKind). Values of the result are float32, those of scores keep
// their dtype. Scores are canonical in any order of columns: only those stored twice are summed, and only their row is sorted.
//
// ValueError: offsets that fall or do not end at the number of columns; values that are not finite as float32 (scores: NaN).
// IndexError: a column is not in [0, width). One pass over rows that are canonical, which allocates nothing.
std::optional<SparseRowTensors> canonical_rows(const char* op, const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values, int64_t width,
                                               RowKind kind);

} // namespace xsoftmax
