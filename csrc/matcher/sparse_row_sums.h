#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

// sparse_row_sums(offsets [n + 1], columns, values, features, list_offsets [m + 1], list_rows)
//     -> (offsets [m + 1], columns, values)
//   Returns the sum of the rows in each list, scaled to norm 1 unless it is 0, with increasing
//   columns. All rows are sparse: offsets int64, columns int32 below `features`, values float32;
//   list_rows int32. Sums run in float64 in the order of the list, so they do not depend on the
//   number of threads.
using SparseRows = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
SparseRows sparse_row_sums(const at::Tensor& offsets, const at::Tensor& columns,
                           const at::Tensor& values, int64_t features,
                           const at::Tensor& list_offsets, const at::Tensor& list_rows);

} // namespace xsoftmax
