#pragma once

// The classes in each cell of a MIDX index, and single draws from a cell, as inline functions for
// host and CUDA code.

#include "random/philox.h"

#include <cstdint>

namespace xsoftmax {

/// The tables of midx_index.h that map cells to classes.
struct MidxCellTables {
  int64_t codewords, cells, classes; ///< K, K^2 and A
  const int64_t* order;   ///< nullptr if classes are numbered by their slots
  const int64_t* start;
  const double* mass;
  const double* prefix;   ///< nullptr if all weights are 1; also heaviest
  const double* heaviest;

  /// Returns the cell of a slot.
  XS_HOST_DEVICE int64_t cell_of_slot(int64_t slot) const {
    int64_t cell = 0; // the last cell that begins at or before the slot
    for (int64_t n = cells; n > 1;) {
      const int64_t half = n / 2;
      cell += start[cell + half] <= slot ? half : 0;
      n -= half;
    }
    return cell;
  }
  XS_HOST_DEVICE int64_t size(int64_t cell) const { return start[cell + 1] - start[cell]; }
  XS_HOST_DEVICE double weight(int64_t slot, int64_t cell) const {
    return prefix == nullptr ? 1.0 : prefix[slot] - (slot > start[cell] ? prefix[slot - 1] : 0.0);
  }
  /// Draws a slot of `cell` in proportion to the weights, from 44 random bits.
  XS_HOST_DEVICE int64_t draw(int64_t cell, uint64_t bits) const {
    const int64_t begin = start[cell], n = size(cell);
    if (prefix == nullptr) {
      return begin + int64_t(multiply_shift(bits << 20, uint64_t(n)));
    }
    return begin + below(cell, double(bits) * 0x1p-44 * mass[cell]);
  }
  /// Returns the position within the cell of the first class whose running sum of weights exceeds
  /// `weight`, or of the last class.
  XS_HOST_DEVICE int64_t below(int64_t cell, double weight) const {
    const double* first = prefix + start[cell];
    int64_t found = 0, left = size(cell) - 1;
    while (left > 0) {
      const int64_t half = left / 2;
      const bool past_target = first[found + half] > weight;
      found += past_target ? 0 : half + 1;
      left = past_target ? half : left - half - 1;
    }
    return found;
  }
};

/// Random numbers for one private draw with replacement: 42 bits per codeword, 44 for the class.
struct MidxDrawBits {
  XS_HOST_DEVICE MidxDrawBits(uint64_t seed, uint64_t query, uint64_t draw)
      : block(philox(seed, query, draw)) {}
  XS_HOST_DEVICE double first() const { return double(block.low() >> 22) * 0x1p-42; }
  XS_HOST_DEVICE double second() const {
    return double((block.low() & 0x3FFFFF) << 20 | block.high() >> 44) * 0x1p-42;
  }
  XS_HOST_DEVICE uint64_t in_cell() const { return block.high() & 0xFFFFFFFFFFF; }

  PhiloxBlock block;
};

/// Returns an arbitrary slot, for a draw of a query that contains a NaN: its loss is NaN anyway.
XS_HOST_DEVICE inline int64_t arbitrary_slot(uint64_t seed, uint64_t query, uint64_t draw,
                                             int64_t classes) {
  return int64_t(multiply_shift(philox(seed, query, draw).low(), uint64_t(classes)));
}

/// Returns the random rotation of the classes of `cell` in a systematic set.
XS_HOST_DEVICE inline int64_t cell_rotation(uint64_t seed, uint64_t query, int64_t cell,
                                            int64_t size) {
  return int64_t(multiply_shift(philox(seed, query, 1 + uint64_t(cell)).low(), uint64_t(size)));
}

} // namespace xsoftmax
