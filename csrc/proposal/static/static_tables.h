#pragma once

#include "proposal/static/static_sample.h"

#include <vector>

// Builds the tables of static samplers (static_sample.h).

namespace xsoftmax {

/// Returns tables of size 0.
std::vector<at::Tensor> empty_tables(at::Device device);

/// Fills the tables of distribution "table". `weights`: float64 [N], not all zero. `distinct`:
/// those of draws without replacement.
void fill_tables(std::vector<at::Tensor>& tables, const at::Tensor& weights, bool distinct);

} // namespace xsoftmax
