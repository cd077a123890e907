#pragma once

// The radix sort of torch's CUDA library, based on the standard library. Like a device, it ignores
// the bits of a key outside [begin_bit, end_bit).

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

namespace at::cuda::cub {

template <typename Key, typename Value>
void radix_sort_pairs(const Key* keys_in, Key* keys_out, const Value* values_in, Value* values_out,
                      int64_t n, bool descending = false, int64_t begin_bit = 0,
                      int64_t end_bit = sizeof(Key) * 8) {
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
