#pragma once

// The radix sort of torch's CUDA library, based on the standard library. Like a device, it ignores
// the bits of a key outside [begin_bit, end_bit).

#include "machine.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

namespace at::cuda::cub {

/// Returns how often CUB (cub/device/dispatch/dispatch_radix_sort.cuh) launches kernels and fills
/// to sort `n` pairs on devices of compute capability 8.0 and above: one kernel if a block of 256
/// threads can keep them all, otherwise histograms, their sums and a kernel per eight bits.
inline int64_t sort_launches(int64_t n, int64_t bits, int64_t largest_type) {
  const int64_t tile = 256 * std::max<int64_t>(1, 19 * 4 / std::max<int64_t>(4, largest_type));
  return n == 0 ? 0 : n <= tile ? 1 : 4 + 2 * ((bits + 7) / 8);
}

template <typename Key, typename Value>
void radix_sort_pairs(const Key* keys_in, Key* keys_out, const Value* values_in, Value* values_out,
                      int64_t n, bool descending = false, int64_t begin_bit = 0,
                      int64_t end_bit = sizeof(Key) * 8) {
  ::emulator::count_launches(
      "radix_sort_pairs",
      sort_launches(n, end_bit - begin_bit, std::max(sizeof(Key), sizeof(Value))));
  using Bits = std::make_unsigned_t<Key>;
  const Bits mask = end_bit >= int64_t(sizeof(Key) * 8) ? ~Bits(0) : Bits((Bits(1) << end_bit) - 1);
  const auto digits = [&](int64_t i) { return (Bits(keys_in[i]) & mask) >> begin_bit; };
  std::vector<int64_t> places(n);
  std::iota(places.begin(), places.end(), int64_t(0));
  std::stable_sort(places.begin(), places.end(), [&](int64_t a, int64_t b) {
    return descending ? digits(a) > digits(b) : digits(a) < digits(b);
  });
  for (int64_t i = 0; i < n; ++i) {
    keys_out[i] = keys_in[places[i]];
    values_out[i] = values_in[places[i]];
  }
}

} // namespace at::cuda::cub
