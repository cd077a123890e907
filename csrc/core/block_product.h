#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// Products of blocks by oneDNN's kernels for small matrices, which ATen hands on (brgemm). Operands are laid out here.

/// Whether ATen has a kernel for blocks of float32 numbers on this CPU.
bool has_float32_blocks();
/// The same for bfloat16 numbers with sums in float32: AMX or AVX-512 with bfloat16 dot products.
bool has_bfloat16_blocks();

/// out [M, N] (+)= left [M, K] @ right [K, N], float32, out with a unit stride along its rows. The same bits for any number of threads.
void float32_block_product(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right, bool add);
/// The same of operands in float32, rounded to bfloat16 as they are laid out, or in bfloat16; sums and out in float32.
void bfloat16_block_product(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right, bool add);

} // namespace xsoftmax
