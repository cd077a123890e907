#include "cpu/bf16_pack.h"

namespace xsoftmax::XS_ISA {
namespace {

constexpr int64_t kTile = 16;

inline uint32_t bits_of(float x) {
  Bf16 rounded;
  store(&rounded, x);
  return rounded.bits;
}
inline uint32_t bits_of(Bf16 x) { return x.bits; }

template <typename T>
void along_rows(uint32_t* out, int64_t out_stride, const T* in, int64_t in_stride, int64_t rows,
                int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t* __restrict to = out + r * out_stride;
    const T* __restrict from = in + r * in_stride;
    for (int64_t p = 0; p < columns / 2; ++p) {
      to[p] = bits_of(from[2 * p]) | bits_of(from[2 * p + 1]) << 16;
    }
    if (columns % 2 != 0) {
      to[columns / 2] = bits_of(from[columns - 1]);
    }
  }
}

template <typename T>
void along_columns(uint32_t* out, int64_t out_stride, const T* in, int64_t in_stride, int64_t rows,
                   int64_t columns) {
  for (int64_t p = 0; p < rows / 2; ++p) {
    uint32_t* __restrict to = out + p * out_stride;
    const T* __restrict upper = in + 2 * p * in_stride;
    const T* __restrict lower = upper + in_stride;
    for (int64_t c = 0; c < columns; ++c) {
      to[c] = bits_of(upper[c]) | bits_of(lower[c]) << 16;
    }
  }
  if (rows % 2 != 0) {
    for (int64_t c = 0; c < columns; ++c) {
      out[(rows / 2) * out_stride + c] = bits_of(in[(rows - 1) * in_stride + c]);
    }
  }
}

typedef uint32_t Lanes __attribute__((vector_size(4 * kTile)));

// Transposes a 16 x 16 tile in four rounds. A position in the tile has 8 bits, 4 for the row and 4
// for the column. Each round rotates them left by one bit: the lanes of rows i and i + 8 are
// interleaved into rows 2 i and 2 i + 1. After four rounds the row and column bits have swapped.
inline void transpose_tile(uint32_t* out, int64_t out_stride, const uint32_t* in,
                           int64_t in_stride) {
  Lanes tile[kTile], turned[kTile];
  for (int64_t r = 0; r < kTile; ++r) {
    __builtin_memcpy(&tile[r], in + r * in_stride, sizeof(Lanes));
  }
  for (int round = 0; round < 2; ++round) {
    for (int64_t r = 0; r < kTile / 2; ++r) {
      turned[2 * r] = __builtin_shufflevector(tile[r], tile[r + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                              20, 5, 21, 6, 22, 7, 23);
      turned[2 * r + 1] = __builtin_shufflevector(tile[r], tile[r + 8], 8, 24, 9, 25, 10, 26, 11,
                                                  27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int64_t r = 0; r < kTile / 2; ++r) {
      tile[2 * r] = __builtin_shufflevector(turned[r], turned[r + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                            20, 5, 21, 6, 22, 7, 23);
      tile[2 * r + 1] = __builtin_shufflevector(turned[r], turned[r + 8], 8, 24, 9, 25, 10, 26, 11,
                                                27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
  }
  for (int64_t c = 0; c < kTile; ++c) {
    __builtin_memcpy(out + c * out_stride, &tile[c], sizeof(Lanes));
  }
}

void transpose(uint32_t* out, int64_t out_stride, const uint32_t* in, int64_t in_stride,
               int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r += kTile) {
    const int64_t tile_rows = rows - r < kTile ? rows - r : kTile;
    for (int64_t c = 0; c < columns; c += kTile) {
      const int64_t tile_columns = columns - c < kTile ? columns - c : kTile;
      const uint32_t* from = in + r * in_stride + c;
      uint32_t* to = out + c * out_stride + r;
      if (tile_rows == kTile && tile_columns == kTile) {
        transpose_tile(to, out_stride, from, in_stride);
        continue;
      }
      for (int64_t i = 0; i < tile_columns; ++i) {
        for (int64_t j = 0; j < tile_rows; ++j) {
          to[i * out_stride + j] = from[j * in_stride + i];
        }
      }
    }
  }
}

} // namespace

extern const Bf16PackTable bf16_pack{{along_rows<float>, along_columns<float>, transpose},
                                     {along_rows<Bf16>, along_columns<Bf16>, transpose}};

} // namespace xsoftmax::XS_ISA
