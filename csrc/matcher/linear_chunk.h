#pragma once

#include "cpu/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

// The weights of one parent's children, preceded by a hash table over its features, for scoring
// sparse queries.

/// The position of a feature's weights in the chunk.
struct FeatureSlot {
  int32_t feature; ///< -1: free
  uint32_t begin, count;
};

struct LinearChunk {
  const FeatureSlot* slots; ///< a power of two in number; at least one is free
  uint32_t mask;            ///< the number of slots minus one
  int shift;                ///< of the hash function
  const void* child;        ///< uint8, or int32 if `wide`
  const void* value;        ///< float, or F16 if `half`
  bool wide, half;
};

/// Returns the slot where the search for a feature begins.
inline uint32_t first_slot(int32_t feature, int shift) {
  return uint32_t((uint32_t(feature) * uint64_t(0x9E3779B1u) & 0xFFFFFFFFu) >> shift);
}

struct LinearChunkTable {
  /// Computes scores[child] += x[i] w[feature[i]] for every feature in the chunk, in their order.
  void (*add)(const LinearChunk& chunk, const int32_t* feature, const float* x, int64_t n,
              float* scores);
  /// Computes scores[child] += x times each of the `count` weights from `begin` on.
  void (*add_weights)(const LinearChunk& chunk, int64_t begin, int64_t count, float x,
                      float* scores);
};

XS_DECLARE_ISA_TABLE(LinearChunkTable, linear_chunk)

} // namespace xsoftmax
