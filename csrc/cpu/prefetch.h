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

constexpr int64_t kCacheLine = 64;
/// Bytes of a row that are worth a request: the hardware prefetches what follows, and requests for
/// all of a long row would compete with its reads.
constexpr int64_t kRowBeginning = 256;

/// Prefetches the cache lines that hold `bytes` bytes.
template <bool kWrite = false, PrefetchInto kInto = PrefetchInto::kNear>
__attribute__((always_inline)) inline void prefetch_bytes(const void* data, int64_t bytes) {
  const char* line = static_cast<const char*>(data);
  const char* const end = line + bytes;
  line -= reinterpret_cast<uintptr_t>(line) % kCacheLine;
  for (; line < end; line += kCacheLine) {
    __builtin_prefetch(line, kWrite, int(kInto));
  }
  asm volatile("");
}

} // namespace xsoftmax
