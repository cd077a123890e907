#pragma once

#include "cpu/cpu_dispatch.h"
#include "cpu/simd.h"

#include <cstdint>

namespace xsoftmax {

/// Kernels that pack bfloat16 operands for block_product. A pair is two neighbouring elements along
/// the summed dimension in one 32-bit word, the first element in the lower half. If their number is
/// odd, the last element is paired with zero. Inputs are Bf16, or float rounded to nearest.
template <typename T>
struct Bf16Pack {
  /// Packs pairs along rows: out[r * out_stride + p] = the pair of in[r * in_stride + 2 p] and its
  /// right neighbour, for r < rows and p < (columns + 1) / 2.
  void (*along_rows)(uint32_t* out, int64_t out_stride, const T* in, int64_t in_stride,
                     int64_t rows, int64_t columns);
  /// Packs pairs along columns: out[p * out_stride + c] = the pair of in[2 p * in_stride + c] and
  /// the element below it, for p < (rows + 1) / 2 and c < columns.
  void (*along_columns)(uint32_t* out, int64_t out_stride, const T* in, int64_t in_stride,
                        int64_t rows, int64_t columns);
  /// Transposes pairs or any other 32-bit elements: out[c * out_stride + r] = in[r * in_stride + c]
  /// for r < rows and c < columns.
  void (*transpose)(uint32_t* out, int64_t out_stride, const uint32_t* in, int64_t in_stride,
                    int64_t rows, int64_t columns);
};

struct Bf16PackTable {
  Bf16Pack<float> f32;
  Bf16Pack<Bf16> bf16;

  const Bf16Pack<float>& of(const float*) const { return f32; }
  const Bf16Pack<Bf16>& of(const Bf16*) const { return bf16; }
};

XS_DECLARE_ISA_TABLE(Bf16PackTable, bf16_pack)

} // namespace xsoftmax
