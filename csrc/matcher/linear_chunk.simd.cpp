#include "matcher/linear_chunk.h"

#include "cpu/simd.h"

namespace xsoftmax::XS_ISA {
namespace {

// The number of features whose slots, then weights, are prefetched before the first is read.
constexpr int64_t kAhead = 32;

static inline float weight(float value) { return value; }
static inline float weight(F16 value) {
#ifdef __F16C__
  // One instruction for one number, where load() expects a vectorised loop.
  return float(bit_cast<_Float16>(value.bits));
#else
  return load(value);
#endif
}

template <typename Child, typename Value>
static inline void add_scaled(const Child* child, const Value* value, int64_t count, float x,
                              float* scores) {
  for (int64_t e = 0; e < count; ++e) {
    scores[child[e]] += x * weight(value[e]);
  }
}

template <typename Child, typename Value>
void add_features(const LinearChunk& chunk, const int32_t* feature, const float* x, int64_t n,
                  float* scores) {
  const Child* child = static_cast<const Child*>(chunk.child);
  const Value* value = static_cast<const Value*>(chunk.value);
  FeatureSlot hit[kAhead];
  float factor[kAhead];
  for (int64_t base = 0; base < n; base += kAhead) {
    const int64_t count = n - base < kAhead ? n - base : kAhead;
    for (int64_t i = 0; i < count; ++i) {
      __builtin_prefetch(chunk.slots + first_slot(feature[base + i], chunk.shift));
    }
    int64_t hits = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t wanted = feature[base + i];
      uint32_t at = first_slot(wanted, chunk.shift);
      while (chunk.slots[at].feature != wanted && chunk.slots[at].feature >= 0) {
        at = (at + 1) & chunk.mask;
      }
      if (chunk.slots[at].feature == wanted) {
        hit[hits] = chunk.slots[at];
        factor[hits++] = x[base + i];
        __builtin_prefetch(child + chunk.slots[at].begin);
        __builtin_prefetch(value + chunk.slots[at].begin);
      }
    }
    for (int64_t h = 0; h < hits; ++h) {
      add_scaled(child + hit[h].begin, value + hit[h].begin, hit[h].count, factor[h], scores);
    }
  }
}

void add(const LinearChunk& chunk, const int32_t* feature, const float* x, int64_t n,
         float* scores) {
  if (chunk.wide) {
    chunk.half ? add_features<int32_t, F16>(chunk, feature, x, n, scores)
               : add_features<int32_t, float>(chunk, feature, x, n, scores);
  } else {
    chunk.half ? add_features<uint8_t, F16>(chunk, feature, x, n, scores)
               : add_features<uint8_t, float>(chunk, feature, x, n, scores);
  }
}

template <typename Child>
void add_children(const LinearChunk& chunk, int64_t begin, int64_t count, float x, float* scores) {
  const Child* child = static_cast<const Child*>(chunk.child) + begin;
  chunk.half ? add_scaled(child, static_cast<const F16*>(chunk.value) + begin, count, x, scores)
             : add_scaled(child, static_cast<const float*>(chunk.value) + begin, count, x, scores);
}

void add_weights(const LinearChunk& chunk, int64_t begin, int64_t count, float x, float* scores) {
  chunk.wide ? add_children<int32_t>(chunk, begin, count, x, scores)
             : add_children<uint8_t>(chunk, begin, count, x, scores);
}

} // namespace

extern const LinearChunkTable linear_chunk{add, add_weights};

} // namespace xsoftmax::XS_ISA
