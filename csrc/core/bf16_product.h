#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// Whether ATen has a kernel for blocks of such products on this CPU: oneDNN, AMX or AVX-512 with bfloat16 dot products.
bool has_bf16_product();

/// out [M, N] (+)= left [M, K] @ right [K, N]: operands float32, rounded to bfloat16 as they are laid out, or bfloat16; sums and out in float32,
/// out with a unit stride along its rows. The same bits for any number of threads. Only where has_bf16_product().
void bf16_product(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right, bool add);

} // namespace xsoftmax
