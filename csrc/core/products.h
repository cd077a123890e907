#pragma once

#include <ATen/core/Tensor.h>

// Which matrix product is fastest on this CPU, and matrix products of CPU tensors.
//
// Measured on one thread of an Intel Xeon with AMX, oneDNN told to use less (ONEDNN_MAX_CPU_ISA) and, in the second row, by the times of an AMD EPYC of the
// Zen 4 generation; 700 queries, 256 numbers, 2,048 rows; the three products of a step; time over that of float32:
//
//     CPU feature                               ATen, bfloat16    blocks of block_product.h   ATen, float16
//     AMX                                       .08 to .28        .08                         .6 to 1.0
//     AVX-512 with bfloat16 dot products, AMD   .28 to .40        not measured                not measured
//     the same, Intel                           1.1 to 1.8        1.2 to 1.8                  9 to 60
//     AVX-512 without them                      3.2 to 4.9        there are none              9 to 60
//     AVX2                                      6 to 80           there are none              9 to 70
//
// Of float32 numbers, blocks of block_product.h over ATen's, which are MKL's: on an AMD EPYC of the Zen 5 generation .44 for 700 queries (264 and 110 GFLOP/s
// a core: MKL has AVX2 kernels for AMD's CPUs), .5 to .55 for 16 and 32 queries with 10,000 rows. Elsewhere not measured, so ATen's are taken.
//
// The choice goes by the feature, never by a measurement when the library runs: results would not be the same from one run to the next.
// XSOFTMAX_PRODUCTS=float32 or bfloat16 overrides it for 16-bit tables and for float32 ones under "medium", XSOFTMAX_FLOAT32_PRODUCTS=aten or blocks for
// float32.

namespace xsoftmax {

/// Whether this CPU multiplies bfloat16 numbers, with sums in float32, faster than float32 ones: the table above.
bool bfloat16_products_pay();

/// Whether products of float32 numbers are made in blocks: the same, by the CPU alone.
bool float32_blocks_pay();

/// Whether products of rows of a table are made of bfloat16 numbers: of bfloat16 tables on CPU, and of float32 ones under
/// torch.set_float32_matmul_precision("medium"), where that pays.
bool multiplies_bfloat16(const at::Tensor& table);

struct ProductOptions {
  bool add = false;      ///< to what `out` holds
  bool bfloat16 = false; ///< operands are rounded to bfloat16, sums are float32: float32 and bfloat16 operands, float32 out
};

/// out (+)= left [M, K] @ right [K, N], summed in the dtype of out, whatever that of the operands.
void multiply(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right, ProductOptions options = {});

/// at::mm, as above where it is of float32 numbers on CPU.
at::Tensor product(const at::Tensor& left, const at::Tensor& right);

/// left [M, K] @ right [K, N], summed and returned in `dtype`. ATen's product of 16-bit numbers
/// would round each sum to 16 bits.
at::Tensor wide_product(const at::Tensor& left, const at::Tensor& right, at::ScalarType dtype);

/// Coefficients [*] of rows of a table, in the dtype in which a product with them is fastest without
/// loss of range: bfloat16 for such a table on CUDA, else as they are.
at::Tensor rounded_coefficients(const at::Tensor& coefficients, const at::Tensor& table);

/// MKL orders a longer sum by the number of threads (seen from 300 terms on), also inside a parallel region, where each product has one.
constexpr int64_t kTermsOfProduct = 256;

/// The same in parts of `step` terms, where that is needed for one order of sums.
void multiply_in_parts(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right, ProductOptions options = {}, int64_t step = kTermsOfProduct);

} // namespace xsoftmax
