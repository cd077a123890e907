#pragma once

#include "core/cpu_dispatch.h"
#include "core/simd.h"

#include <cstdint>

namespace xsoftmax {

/// How block_product lays out bfloat16 operands. A pair is two neighbours along the summed dimension, as one number of 32 bits: the lower half comes first. Of
/// an odd number of neighbours the last has a zero beside it. in: float or Bf16, rounded to nearest.
template <typename T>
struct Bf16Pack {
  /// out[r * out_stride + p] = the pair of in[r * in_stride + 2 p] and its right neighbour, r < rows, p < (columns + 1) / 2
  void (*along_rows)(uint32_t* out, int64_t out_stride, const T* in, int64_t in_stride, int64_t rows, int64_t columns);
  /// out[p * out_stride + c] = the pair of in[2 p * in_stride + c] and its neighbour below, p < (rows + 1) / 2, c < columns
  void (*along_columns)(uint32_t* out, int64_t out_stride, const T* in, int64_t in_stride, int64_t rows, int64_t columns);
  /// out[c * out_stride + r] = in[r * in_stride + c]: pairs, or anything of 32 bits, r < rows, c < columns
  void (*transpose)(uint32_t* out, int64_t out_stride, const uint32_t* in, int64_t in_stride, int64_t rows, int64_t columns);
};

struct Bf16PackTable {
  Bf16Pack<float> f32;
  Bf16Pack<Bf16> bf16;

  const Bf16Pack<float>& of(const float*) const { return f32; }
  const Bf16Pack<Bf16>& of(const Bf16*) const { return bf16; }
};

XS_DECLARE_ISA_TABLE(Bf16PackTable, bf16_pack)

} // namespace xsoftmax
