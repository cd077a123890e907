#pragma once

#include "samplers/midx_index.h"

namespace xsoftmax {

/// The nearest of `codewords` [K, D] for each of `rows` [n, D], both float32 on CPU: index int64 [n], squared distance float32 [n]. The
/// same for any number of threads.
std::tuple<at::Tensor, at::Tensor> nearest_codeword_cpu(const at::Tensor& rows, const at::Tensor& codewords);

/// midx_cells into contiguous CPU tensors that are there already.
void fill_cells_cpu(const at::Tensor& cell, const std::optional<at::Tensor>& log_weight, const MidxCells& cells);

} // namespace xsoftmax
