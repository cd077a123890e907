#pragma once

#include "op/optional.h"
#include "retrieval/search_index.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// search_topk(input [Q, D], weight [N, D], bias [N] or none, index, k, options) -> (scores [Q, k],
// ids int64 [Q, k], cells_read int64 [Q], certified bool [Q]): finds the k classes with the largest
// scores z.w + b, with an index that search_index built from the same table.
//
// 8-bit codes bound the scores of the classes that are read; those that may be among the best are
// scored again from the table in float64. Scores are returned in float32, or float64 for float64
// tables, best first; equal scores are ordered by id. A query with a NaN or an infinity gets NaN
// scores at classes 0 .. k - 1, reads no cell and is not certified. Not differentiable.
//
// The most promising cells are read first. Without max_cells, all other cells whose bound allows
// one of the best k are read too; every finite query is then certified (its result is exact). With
// max_cells, cells are read in the order of how many of the best k they are likely to hold,
// assuming Gaussian remainders. Reading stops after max_cells cells (but not before the cells read
// hold k classes), or when the bounds exclude all other cells. A query is certified if its best k
// score above the bounds of all cells that were not read.
//
// search_budget(input [Q, D], weight, bias, index, k, recall) -> int64 []: returns the smallest
// max_cells of 1, 2, 3, 4, 6, 8, 12, 16, ... with which the mean recall of these queries (the
// finite ones), less one standard error, is at least `recall`. Returns the number of cells if no
// smaller number suffices or there is no finite query.
//
// On CUDA, small batches, and any batch with max_cells set, are searched cell by cell. Other
// batches multiply with all rows, in 16 bits on tensor cores; that counts as reading all cells. The
// choice depends on shapes and options only. search_topk does not synchronise with the device;
// there, an index whose values do not fit the table fails a device assertion. search_budget
// synchronises.
//
// The composite scores all classes and reports all cells as read.

struct SearchOptions {
  std::optional<int64_t> max_cells = std::nullopt; ///< at least 1

  template <typename Visitor>
  void visit(Visitor& v) {
    v("max_cells", max_cells);
  }
};

using TopkResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

SearchOptions check_search_topk(const at::Tensor& input, const at::Tensor& weight,
                                const OptionalTensor& bias, const c10::SymInt& k,
                                std::string_view options);
TopkResult search_topk_reference(const at::Tensor& input, const at::Tensor& weight,
                                 const OptionalTensor& bias, at::TensorList index, c10::SymInt k,
                                 c10::string_view options);

} // namespace xsoftmax
