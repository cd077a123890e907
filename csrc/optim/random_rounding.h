#pragma once

#include "random/philox.h"

#include <cstdint>
#include <cstring>

// Stochastic rounding to 16 bits: rounds up with probability equal to the fraction that rounding
// down would lose, so that steps too small for a 16-bit number still move it on average. Philox
// provides one key per step; cheap integer mixes derive keys for rows and bits for elements,
// because ten rounds of Philox per element would cost more time than the smaller 16-bit state
// saves. Inline functions for host and CUDA code with the same bits on both. They are static
// because each instruction set has its own copies (cpu/cpu_dispatch.h).

namespace xsoftmax {

/// Random numbers of one step.
struct StepRounding {
  uint64_t key;
  bool table; ///< whether table rows use stochastic rounding; 16-bit state always does
};
XS_HOST_DEVICE static inline StepRounding step_rounding(int64_t step, bool table) {
  return {philox(uint64_t(step), 0, 0).low(), table};
}

/// Random numbers of one row in a step.
struct RowRounding {
  uint32_t low, high;
  bool table;
};
XS_HOST_DEVICE static inline RowRounding row_rounding(const StepRounding& step, int64_t row) {
  uint64_t x = step.key +
      uint64_t(row) * 0x9E3779B97F4A7C15u; // the mix of splitmix64 (Steele, Lea and Flood 2014)
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return {uint32_t(x), uint32_t(x >> 32), step.table};
}

/// Element d adds kElement * d to its row's key; loops accumulate it.
constexpr uint32_t kElement = 0x9E3779B9u;

XS_HOST_DEVICE static inline uint32_t rounding_mix(uint32_t key, uint32_t other, uint32_t element) {
  uint32_t x = key + element;
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = ((x ^ (x >> 15)) + other) * 0x735A2D97u;
  return x ^ (x >> 15);
}

/// Return 16 random bits for element = kElement d: for an optimizer's first and second state, and
/// for the table.
XS_HOST_DEVICE static inline uint32_t state_bits(const RowRounding& r, uint32_t element) {
  return rounding_mix(r.low, r.high, element) & 0xFFFFu;
}
XS_HOST_DEVICE static inline uint32_t second_state_bits(const RowRounding& r, uint32_t element) {
  return rounding_mix(r.low, r.high, element) >> 16;
}
XS_HOST_DEVICE static inline uint32_t table_bits(const RowRounding& r, uint32_t element) {
  return rounding_mix(r.high, r.low, element) & 0xFFFFu;
}

/// Rounds x to a value that bfloat16 (or float16) holds exactly, by the 16 bits of `random`.
/// Infinity and NaN stay unchanged.
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
    const float rounded =
        (whole + (float(random) < (units - whole) * 65536.0f ? 1.0f : 0.0f)) * 0x1p-24f;
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
