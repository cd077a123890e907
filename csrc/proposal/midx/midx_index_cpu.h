#pragma once

#include "proposal/midx/midx_index.h"

namespace xsoftmax {

/// Runs midx_cells into existing contiguous CPU tensors.
void fill_cells_cpu(const at::Tensor& cell, const std::optional<at::Tensor>& log_weight,
                    const MidxCells& cells);

} // namespace xsoftmax
