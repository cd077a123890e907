#pragma once

// Which classes the cells of a MIDX index hold, and single draws from them, as inline functions for host and CUDA code.

#include "core/philox.h"

#include <cstdint>

namespace xsoftmax {

/// The tables of midx_index.h that say which classes a cell holds.
struct MidxCellTables {
  int64_t codewords, cells, classes; ///< K, K^2 and A
  const int64_t* order;   ///< nullptr where classes are numbered by their slots
  const int64_t* start;
  const double* mass;
  const double* prefix;   ///< nullptr where all weights are 1, as the next
  const double* heaviest;

  /// The cell of a slot.
  XS_HOST_DEVICE int64_t cell_of_slot(int64_t slot) const {
    int64_t cell = 0; // the last that begins at or before it
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
  /// The slot of a class of `cell`, drawn by weight with 44 random bits.
  XS_HOST_DEVICE int64_t draw(int64_t cell, uint64_t bits) const {
    const int64_t begin = start[cell], n = size(cell);
    if (prefix == nullptr) {
      return begin + int64_t(multiply_shift(bits << 20, uint64_t(n)));
    }
    return begin + below(cell, double(bits) * 0x1p-44 * mass[cell]);
  }
  /// Which class of a cell lies at `weight` when they stand end to end: the first that ends beyond it, or the last.
  XS_HOST_DEVICE int64_t below(int64_t cell, double weight) const {
    const double* first = prefix + start[cell];
    int64_t found = 0, left = size(cell) - 1;
    while (left > 0) {
      const int64_t half = left / 2;
      const bool beyond = first[found + half] > weight;
      found += beyond ? 0 : half + 1;
      left = beyond ? half : left - half - 1;
    }
    return found;
  }
};

/// The random numbers of one private independent draw: 42 bits for each codeword, 44 for the class.
struct MidxDrawBits {
  XS_HOST_DEVICE MidxDrawBits(uint64_t seed, uint64_t query, uint64_t draw) : block(philox(seed, query, draw)) {}
  XS_HOST_DEVICE double first() const { return double(block.low() >> 22) * 0x1p-42; }
  XS_HOST_DEVICE double second() const { return double((block.low() & 0x3FFFFF) << 20 | block.high() >> 44) * 0x1p-42; }
  XS_HOST_DEVICE uint64_t in_cell() const { return block.high() & 0xFFFFFFFFFFF; }

  PhiloxBlock block;
};

/// The class of a draw for a query that is no number, whose loss will say so: any.
XS_HOST_DEVICE inline int64_t midx_any_slot(uint64_t seed, uint64_t query, uint64_t draw, int64_t classes) {
  return int64_t(multiply_shift(philox(seed, query, draw).low(), uint64_t(classes)));
}

/// Where the classes of `cell` are cut before they are laid out for a systematic set.
XS_HOST_DEVICE inline int64_t midx_cut(uint64_t seed, uint64_t query, int64_t cell, int64_t size) {
  return int64_t(multiply_shift(philox(seed, query, 1 + uint64_t(cell)).low(), uint64_t(size)));
}

} // namespace xsoftmax
