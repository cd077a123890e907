#pragma once

#include "core/philox.h"

#include <cstdint>
#include <cstring>

// Rounding to 16 bits by chance: up with the probability of what rounding down would lose, so that steps too small for a 16-bit number move it all the
// same on average. Philox of step and row gives a row its keys; a keyed mix of a few instructions gives an element its bits, since ten rounds of Philox
// would cost more than the memory that 16-bit state saves. Inline functions for host and CUDA code, the same bits on both. They are static: each
// instruction set has its copies (core/cpu_dispatch.h).

namespace xsoftmax {

/// The random numbers of one row in one step.
struct RowRounding {
  uint32_t first, second, both;
  bool table; ///< rows of the table round by chance; 16-bit state always does
};

XS_HOST_DEVICE static inline RowRounding row_rounding(int64_t step, int64_t row, bool table) {
  const PhiloxBlock block = philox(uint64_t(step), uint64_t(row), 0);
  return {block.word[0], block.word[1], block.word[2], table};
}

XS_HOST_DEVICE static inline uint32_t rounding_mix(uint32_t key, uint32_t other, uint32_t element) {
  uint32_t x = key + element * 0x9E3779B9u;
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = ((x ^ (x >> 15)) + other) * 0x735A2D97u;
  return x ^ (x >> 15);
}

/// 16 random bits of an element: of the table, and of an optimizer's first and second state for it.
XS_HOST_DEVICE static inline uint32_t table_bits(const RowRounding& r, int64_t element) { return rounding_mix(r.first, r.both, uint32_t(element)) >> 16; }
XS_HOST_DEVICE static inline uint32_t state_bits(const RowRounding& r, int64_t element) { return rounding_mix(r.first, r.both, uint32_t(element)) & 0xFFFFu; }
XS_HOST_DEVICE static inline uint32_t second_state_bits(const RowRounding& r, int64_t element) { return rounding_mix(r.second, r.both, uint32_t(element)) >> 16; }

/// x as a number that bfloat16, or else float16, holds exactly. What is not finite stays as it is.
XS_HOST_DEVICE static inline float round_at_random(float x, uint32_t random, bool bfloat16) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t size = bits & 0x7FFFFFFFu, sign = bits ^ size;
  if (size >= 0x7F800000u) {
    return x;
  }
  if (!bfloat16 && size < 0x38800000u) { // a subnormal of float16: a multiple of 2^-24
    float units;
    std::memcpy(&units, &size, sizeof(units));
    units *= 0x1p24f;
    const float whole = float(int32_t(units));
    const float rounded = (whole + (float(random) < (units - whole) * 65536.0f ? 1.0f : 0.0f)) * 0x1p-24f;
    std::memcpy(&bits, &rounded, sizeof(bits));
    bits |= sign;
  } else {
    const uint32_t dropped = bfloat16 ? 0xFFFFu : 0x1FFFu;
    bits = (bits + (random & dropped)) & ~dropped;
  }
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

} // namespace xsoftmax
