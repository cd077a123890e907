#pragma once

#include "core/philox.h"

#include <cmath>
#include <cstdint>
#include <cstring>

// Rounding to 16 bits by chance: up with the probability of what rounding down would lose, so that steps too small for a 16-bit number move it all the
// same on average. Inline functions for host and CUDA code; the same bits on both.

namespace xsoftmax {

/// 16 random bits of an element of a row, in a step.
XS_HOST_DEVICE inline uint32_t rounding_bits(int64_t step, int64_t row, int64_t element) {
  const PhiloxBlock block = philox(uint64_t(step), uint64_t(row), uint64_t(element) / 8);
  const int place = int(element % 8);
  return (place % 2 == 0 ? block.word[place / 2] : block.word[place / 2] >> 16) & 0xFFFFu;
}

/// x as a number that bfloat16, or else float16, holds exactly. What is not finite stays as it is.
XS_HOST_DEVICE inline float round_at_random(float x, uint32_t random, bool bfloat16) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t size = bits & 0x7FFFFFFFu;
  if (size >= 0x7F800000u) {
    return x;
  }
  if (!bfloat16 && size < 0x38800000u) { // a subnormal of float16: a multiple of 2^-24
    const float units = std::fabs(x) * 0x1p24f, whole = std::floor(units);
    const float rounded = (whole + (float(random) < (units - whole) * 65536.0f ? 1.0f : 0.0f)) * 0x1p-24f;
    return x < 0 ? -rounded : rounded;
  }
  const uint32_t dropped = bfloat16 ? 0xFFFFu : 0x1FFFu;
  bits = (bits + (random & dropped)) & ~dropped;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

} // namespace xsoftmax
