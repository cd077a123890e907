#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace xsoftmax {

/// The twin of compact_row_gradient_cpu for CUDA: the row-sparse gradient over R = `rows` whatever the pairs are, (rows [R], values [R, D], bias
/// values [R]): a row for each different id, rising, of which there are no more than R; behind them the last again, with zeros.
///
/// ids [Q, C] int64, `none` where there is no pair: an id above all others. coefficient [Q, C] in opmath dtype: of `input` [Q, D] of a query; rows of
/// input whose coefficient is 0 are not read. All contiguous. Runs on the current stream, does not wait for it, and gives the same bits at every
/// call; a row that very many queries share costs no more than as many others.
std::tuple<at::Tensor, at::Tensor, at::Tensor> compact_row_gradient_cuda(const at::Tensor& ids, const at::Tensor& coefficient, int64_t none,
                                                                         const at::Tensor& input, int64_t rows, bool want_values,
                                                                         bool want_bias);

/// sum_c coefficient[q, c] * weight[ids[q, c]], [Q, D] in opmath dtype; rows whose coefficient is 0 are not read, whatever their id. `weight` with
/// unit column stride.
at::Tensor sum_rows_cuda(const at::Tensor& ids, const at::Tensor& coefficient, const at::Tensor& weight);

} // namespace xsoftmax
