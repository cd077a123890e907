#pragma once

#include <ATen/core/Tensor.h>

// Matrix products of CPU tensors, and the choice of the fastest implementation for this CPU.
//
// The table shows the time of the three products of a step, divided by the time in float32, for 700
// queries of 256 features and 2,048 rows. Measured on one thread of an Intel Xeon with AMX; the
// lower rows restrict oneDNN with ONEDNN_MAX_CPU_ISA. The AMD row is from a Zen 4 EPYC.
//
//     CPU feature                         ATen, bfloat16  block_product.h, bfloat16  ATen, float16
//     AMX                                 .08 to .28      .08                        .6 to 1.0
//     AVX-512 with bfloat16 dots, AMD     .28 to .40      not measured               not measured
//     AVX-512 with bfloat16 dots, Intel   1.1 to 1.8      1.2 to 1.8                 9 to 60
//     AVX-512 without bfloat16 dots       3.2 to 4.9      not available              9 to 60
//     AVX2                                6 to 80         not available              9 to 70
//
// For float32, the time of block_product.h divided by the time of ATen (MKL), on a Zen 5 AMD EPYC:
// .44 for 700 queries (264 against 110 GFLOP/s per core, because MKL uses AVX2 kernels on AMD
// CPUs), .5 to .55 for 16 and 32 queries with 10,000 rows. Other CPUs were not measured and use
// ATen.
//
// The choice depends on CPU features, never on a measurement at run time, because results would
// then differ between runs. XSOFTMAX_PRODUCTS=float32|bfloat16 overrides it for 16-bit tables and
// for float32 tables under matmul precision "medium", XSOFTMAX_FLOAT32_PRODUCTS=aten|blocks for
// float32.

namespace xsoftmax {

/// Whether bfloat16 products with float32 sums are faster on this CPU than float32 products, by the
/// table above or its environment variable.
bool use_bfloat16_products();

/// Whether float32 products use block_product.h on this CPU, chosen as above.
bool use_float32_blocks();

/// Whether products with rows of `table` use bfloat16 operands. True if use_bfloat16_products() and
/// the table, on CPU, is bfloat16, or float32 under
/// torch.set_float32_matmul_precision("medium").
bool uses_bfloat16_operands(const at::Tensor& table);

struct ProductOptions {
  bool add = false; ///< add to `out` instead of overwriting it
  bool bfloat16 = false; ///< round operands (float32 or bfloat16) to bfloat16, with float32 sums
                         ///< and float32 out
};

/// Computes out = left [M, K] @ right [K, N], or adds the product to `out`. Sums are in the dtype
/// of `out`, whatever the dtypes of the operands.
void multiply(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
              ProductOptions options = {});

/// Returns left [M, K] @ right [K, N]: at::mm, or block_product.h for float32 CPU tensors if that
/// is faster.
at::Tensor product(const at::Tensor& left, const at::Tensor& right);

/// Returns left [M, K] @ right [K, N], summed and returned in `dtype`. ATen's product of 16-bit
/// tensors would round each sum to 16 bits.
at::Tensor wide_product(const at::Tensor& left, const at::Tensor& right, at::ScalarType dtype);

/// Returns the coefficients [*] of table rows in the dtype for which their product with the table
/// is fastest without loss of range: bfloat16 for a bfloat16 table on CUDA, else unchanged.
at::Tensor rounded_coefficients(const at::Tensor& coefficients, const at::Tensor& table);

/// Longest sum whose order in MKL does not depend on the number of threads; in float64 it is half
/// as long. The order of longer sums does (seen from 300 terms), even inside a parallel region,
/// where each product has one thread.
constexpr int64_t kTermsOfProduct = 256;

/// Computes multiply(), on the CPU with sums whose order does not depend on the number of threads:
/// in parts, and without MKL if `left` has few rows, for which the order of shorter sums depends on
/// it, too.
void multiply_in_parts(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                       ProductOptions options = {});

/// Returns left [M, K] @ right [K, N], computed by multiply_in_parts.
at::Tensor product_in_parts(const at::Tensor& left, const at::Tensor& right);

} // namespace xsoftmax
