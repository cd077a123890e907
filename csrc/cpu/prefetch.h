#pragma once

#include <cstdint>

// Requests for the processor's cache. GCC takes a function that only prefetches for one without
// effects, and drops its calls: the empty assembly is an effect. Always inline, so that files for
// different instruction sets share nothing.

namespace xsoftmax {

/// Where a prefetched line goes: kNear, the L1 cache; kFar, the L2 cache, which takes more
/// requests.
enum class PrefetchInto { kNear = 3, kFar = 2 };

template <bool kWrite = false, PrefetchInto kInto = PrefetchInto::kNear>
__attribute__((always_inline)) inline void prefetch_line(const void* data) {
  __builtin_prefetch(data, kWrite, int(kInto));
  asm volatile("");
}

/// Prefetches the cache lines of `bytes` bytes.
template <bool kWrite = false, PrefetchInto kInto = PrefetchInto::kNear>
__attribute__((always_inline)) inline void prefetch_bytes(const void* data, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t b = 0; b < bytes; b += kLine) {
    __builtin_prefetch(static_cast<const char*>(data) + b, kWrite, int(kInto));
  }
  asm volatile("");
}

} // namespace xsoftmax
