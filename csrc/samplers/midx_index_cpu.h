#pragma once

#include "samplers/midx_index.h"

namespace xsoftmax {

/// midx_cells into contiguous CPU tensors that are there already.
void fill_cells_cpu(const at::Tensor& cell, const std::optional<at::Tensor>& log_weight, const MidxCells& cells);

} // namespace xsoftmax
