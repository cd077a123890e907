#pragma once

#include "samplers/midx_index.h"

namespace xsoftmax {

/// The nearest of `codewords` [K, D] for each of `rows` [n, D], both float32 on CPU: index int64 [n], squared distance float32 [n]. The
/// same for any number of threads.
std::tuple<at::Tensor, at::Tensor> nearest_codeword_cpu(const at::Tensor& rows, const at::Tensor& codewords);

} // namespace xsoftmax
