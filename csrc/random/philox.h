#pragma once

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11). Random bits
// are a pure function of (seed, query, draw), so results do not depend on the number of threads or
// the device. All functions are inline, for host and CUDA code.

#include <cstdint>

#if defined(__CUDACC__)
#define XS_HOST_DEVICE __host__ __device__
#else
#define XS_HOST_DEVICE
#endif

namespace xsoftmax {

/// 128 random bits.
struct PhiloxBlock {
  uint32_t word[4];

  XS_HOST_DEVICE constexpr uint64_t low() const { return uint64_t(word[1]) << 32 | word[0]; }
  XS_HOST_DEVICE constexpr uint64_t high() const { return uint64_t(word[3]) << 32 | word[2]; }
};

/// Applies ten rounds to `counter` (four words) with the key (key0, key1).
XS_HOST_DEVICE constexpr PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(0xD2511F53u) * c0;
    const uint64_t product1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ key0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ key1;
    c3 = uint32_t(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Returns the random block of one draw. The counter is (draw, query), low words first; the key is
/// the seed.
XS_HOST_DEVICE constexpr PhiloxBlock philox(uint64_t seed, uint64_t query, uint64_t draw) {
  return philox4x32(
      {{uint32_t(draw), uint32_t(draw >> 32), uint32_t(query), uint32_t(query >> 32)}},
      uint32_t(seed), uint32_t(seed >> 32));
}

/// Returns the upper 64 bits of a * b. For a random `a`, this is an integer in [0, b) with a bias
/// of at most b / 2^64.
XS_HOST_DEVICE constexpr uint64_t multiply_shift(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
  return uint64_t((static_cast<unsigned __int128>(a) * b) >> 64);
#else
  const uint64_t a0 = uint32_t(a), a1 = a >> 32, b0 = uint32_t(b), b1 = b >> 32;
  const uint64_t middle = a1 * b0 + (a0 * b0 >> 32);
  return a1 * b1 + (middle >> 32) + ((a0 * b1 + uint32_t(middle)) >> 32);
#endif
}

/// Returns the upper 53 bits as a double in [0, 1).
XS_HOST_DEVICE constexpr double unit_double(uint64_t bits) { return double(bits >> 11) * 0x1p-53; }

/// Returns an exactly uniform integer in [0, n), by multiply-shift with rejection (Lemire, "Fast
/// random integer generation in an interval"). A rejection has probability below n / 2^64. After a
/// rejection it tries the block's other half, then blocks with draw numbers that no caller uses.
XS_HOST_DEVICE constexpr uint64_t uniform_below(uint64_t seed, uint64_t query, uint64_t draw,
                                                uint64_t n) {
  const uint64_t rejected = (0 - n) % n; // 2^64 mod n
  for (;; draw += uint64_t(1) << 48) {
    const PhiloxBlock block = philox(seed, query, draw);
    if (block.low() * n >= rejected) {
      return multiply_shift(block.low(), n);
    }
    if (block.high() * n >= rejected) {
      return multiply_shift(block.high(), n);
    }
  }
}

} // namespace xsoftmax
