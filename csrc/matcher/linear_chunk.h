#pragma once

#include "core/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

// The weights of one parent's children, a hash table over its features before them: scores of sparse queries.

/// Where the weights of a feature lie in the chunk.
struct FeatureSlot {
  int32_t feature; ///< -1: free
  uint32_t begin, count;
};

struct LinearChunk {
  const FeatureSlot* slots; ///< a power of two; one at least is free
  uint32_t mask;            ///< their number less one
  int shift;                ///< of the hash
  const void* child;        ///< uint8, or int32 where `wide`
  const void* value;        ///< float, or F16 where `half`
  bool wide, half;
};

/// The slot where the search for a feature begins.
inline uint32_t first_slot(int32_t feature, int shift) { return uint32_t((uint32_t(feature) * uint64_t(0x9E3779B1u) & 0xFFFFFFFFu) >> shift); }

struct LinearChunkTable {
  /// scores[child] += x[i] w[feature[i]] for every feature that the chunk has, in their order.
  void (*add)(const LinearChunk& chunk, const int32_t* feature, const float* x, int64_t n, float* scores);
  /// scores[child] += x times the `count` weights from `begin` on.
  void (*add_weights)(const LinearChunk& chunk, int64_t begin, int64_t count, float x, float* scores);
};

XS_DECLARE_ISA_TABLE(LinearChunkTable, linear_chunk)

} // namespace xsoftmax
