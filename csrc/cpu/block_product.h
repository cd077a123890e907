#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// Blocked matrix products with oneDNN's small-matrix kernels (brgemm), which ATen exposes.
// block_product.cpp packs the operands.

/// Whether ATen has a float32 brgemm kernel for this CPU.
bool has_float32_blocks();
/// Whether ATen has a bfloat16 brgemm kernel with float32 sums for this CPU, which requires AMX or
/// AVX-512 with bfloat16 dot products.
bool has_bfloat16_blocks();

/// Computes out [M, N] = left [M, K] @ right [K, N] in float32, or adds the product to `out` if
/// `add`. The rows of `out` must be contiguous (stride(1) == 1). The result is bit-identical for
/// any number of threads.
void float32_block_product(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                           bool add);
/// Does the same as float32_block_product with bfloat16 operands, or with float32 operands, which
/// are rounded to bfloat16 when packed. Sums and `out` are float32.
void bfloat16_block_product(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                            bool add);

} // namespace xsoftmax
