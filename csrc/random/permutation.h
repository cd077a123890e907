#pragma once

#include "random/philox.h"

namespace xsoftmax {

/// A keyed pseudorandom permutation of [0, n): a Feistel network over the bits of n - 1 with cycle
/// walking (fewer than two passes on average), then a rotation by a uniform number, which makes the
/// image of any single argument exactly uniform.
class RandomPermutation {
 public:
  /// Derives the permutation from Philox draws 0 to 2 of the query. n must be at least 1.
  XS_HOST_DEVICE RandomPermutation(uint64_t seed, uint64_t query, uint64_t n)
      : n_(n), shift_(uniform_below(seed, query, 0, n)) {
    int bits = 0;
    while (bits < 64 && ((n - 1) >> bits) != 0) {
      ++bits;
    }
    right_bits_ = bits - bits / 2;
    left_bits_ = bits / 2;
    for (int i = 0; i < kRounds / 4; ++i) {
      const PhiloxBlock block = philox(seed, query, 1 + i);
      for (int j = 0; j < 4; ++j) {
        key_[4 * i + j] = block.word[j];
      }
    }
  }

  /// Returns the image of x, 0 <= x < n.
  XS_HOST_DEVICE uint64_t operator()(uint64_t x) const {
    do {
      x = pass(x);
    } while (x >= n_);
    return x >= n_ - shift_ ? x - (n_ - shift_) : x + shift_;
  }

 private:
  static constexpr int kRounds = 8;

  // The finaliser of MurmurHash3.
  XS_HOST_DEVICE static uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
  }

  // Returns the upper `bits` bits of a word, 0 <= bits <= 32.
  XS_HOST_DEVICE static uint32_t top(uint32_t x, int bits) {
    return uint32_t((uint64_t(x) << bits) >> 32);
  }

  XS_HOST_DEVICE uint64_t pass(uint64_t x) const {
    uint32_t left = uint32_t(x >> right_bits_);
    uint32_t right = uint32_t(x & ((uint64_t(1) << right_bits_) - 1));
    for (int i = 0; i < kRounds; i += 2) {
      right ^= top(mix(left + key_[i]), right_bits_);
      left ^= top(mix(right + key_[i + 1]), left_bits_);
    }
    return uint64_t(left) << right_bits_ | right;
  }

  uint64_t n_, shift_;
  int left_bits_, right_bits_;
  uint32_t key_[kRounds];
};

} // namespace xsoftmax
