#pragma once

#include "core/optional.h"
#include "retrieval/search_index.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// search_topk(input [Q, D], weight [N, D], bias [N] or none, index, k, options) -> (scores [Q, k], ids int64 [Q, k], cells_read int64 [Q],
// certified bool [Q]): the k classes of largest score z.w + b, by an index that search_index made of the same table.
//
// Codes of 8 bits bound the scores of what is read; the classes that may be among the best are scored from the table, in float64. Scores are in
// float32, or float64 for float64 tables; best first, of equal scores the lower id. A query with a NaN or an infinity has scores of NaN at classes
// 0 .. k - 1, reads nothing and is not certified. Has no gradient.
//
// The cells that look best are read first. Option max_cells: none, and all others are read whose bound leaves room for one of the best k; every finite
// query is certified. Or a number, and cells are read in the order of how many of the best k they are likely to hold, remainders taken for Gaussian, until
// so many are read, though at least what holds k classes, or until the bound leaves none; then the query is certified, as it is where the best k turn out
// to stand above all bounds.
//
// search_budget(input [Q, D], weight, bias, index, k, recall) -> int64 []: the least max_cells out of 1, 2, 3, 4, 6, 8, 12, 16, ... by which these queries,
// those that are finite, find the share `recall` of their best k, and one standard error more; the number of cells where no less does, or there is no query.
//
// On CUDA, blocks read the cells of a few queries, and of all queries where max_cells is set. Other batches multiply all rows, which they share, on tensor
// cores, rounded to 16 bits; that counts as all cells. Which way is taken follows from the shapes. No call waits for the device; an index that does not fit
// the table, as its values say, is an assert of the kernel there. search_budget waits.
//
// The composite scores all classes, and reads all cells.

struct SearchOptions {
  std::optional<int64_t> max_cells = std::nullopt; ///< at least 1

  template <typename Visitor>
  void visit(Visitor& v) {
    v("max_cells", max_cells);
  }
};

using Found = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

SearchOptions check_search_topk(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const c10::SymInt& k, std::string_view options);
Found search_topk_reference(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, at::TensorList index, c10::SymInt k,
                            c10::string_view options);

} // namespace xsoftmax
