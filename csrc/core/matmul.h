#pragma once

#include <c10/core/ScalarType.h>

namespace xsoftmax {

/// The dtype in which CPU matrix products of tensors of `dtype` are fastest. float32 and float64: itself. bfloat16: itself where the
/// CPU has AMX and ATen hands bfloat16 products to oneDNN, float32 elsewhere (blocks are converted as they are read): without AMX,
/// ATen's bfloat16 product takes 1.8 times its float32 product on AVX-512 with bf16 instructions, and 6 to 9 times on AVX2.
/// float16: float32; few CPUs multiply it in hardware. XSOFTMAX_CPU below avx512 also selects float32.
at::ScalarType cpu_product_dtype(at::ScalarType dtype);

} // namespace xsoftmax
