#include "retrieval/cell_scan.h"

#include "cpu/simd.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace xsoftmax::XS_ISA {
namespace {

constexpr int64_t kLanes = kScanLanes;

constexpr int64_t kFloats = kRegisterBytes / sizeof(float);
using Floats = float __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
using Quad = int32_t __attribute__((aligned(1), may_alias)); // four coordinates of a query code

// Accumulates the products of a quad (four coordinates) for 16 rows.
#ifdef __AVX2__
struct Sums {
  __m256i part[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                     _mm256_setzero_si256()};

  void add(const uint8_t* codes, const int8_t* code) {
    const __m256i wide =
        _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(*(const Quad*)code)));
    for (int i = 0; i < 4; ++i) {
      const __m256i rows = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(codes + 16 * i)));
      part[i] = _mm256_add_epi32(part[i], _mm256_madd_epi16(rows, wide));
    }
  }
  void store(int32_t* out) const {
    for (int i = 0; i < 4; i += 2) {
      const __m256i both = _mm256_hadd_epi32(part[i], part[i + 1]); // rows 0 1 4 5 2 3 6 7
      _mm256_storeu_si256((__m256i*)(out + 4 * i), _mm256_permute4x64_epi64(both, 0xD8));
    }
  }
};
#else
struct Sums {
  int32_t sum[kLanes] = {};

  void add(const uint8_t* codes, const int8_t* code) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sum[lane] += codes[4 * lane] * code[0] + codes[4 * lane + 1] * code[1] +
          codes[4 * lane + 2] * code[2] + codes[4 * lane + 3] * code[3];
    }
  }
  void store(int32_t* out) const {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      out[lane] = sum[lane];
    }
  }
};
#endif

void products(int32_t* out, const int8_t* query, const uint8_t* codes, int64_t quads) {
  Sums sums;
  for (int64_t quad = 0; quad < quads; ++quad) {
    sums.add(codes + quad * 4 * kLanes, query + 4 * quad);
  }
  sums.store(out);
}

void peaks_widened(int32_t* peak, const int8_t* const* query, int64_t n, const uint8_t* codes,
                   int64_t groups, int64_t quads) {
  for (int64_t group = 0; group < groups; ++group, codes += quads * 4 * kLanes) {
    for (int64_t q = 0; q < n; ++q) {
      alignas(64) int32_t product[kLanes];
      products(product, query[q], codes, quads);
      int32_t largest = product[0];
      for (int64_t lane = 1; lane < kLanes; ++lane) {
        largest = product[lane] > largest ? product[lane] : largest;
      }
      peak[q * groups + group] = largest;
    }
  }
}

#ifdef __AVX512F__
#define XS_VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))

// As _mm512_reduce_max_epi32, of which GCC 12 warns.
XS_VNNI inline int32_t largest_of(__m512i sums) {
  alignas(64) int32_t sum[kLanes];
  _mm512_store_si512(sum, sums);
  const __m256i eight = _mm256_max_epi32(_mm256_load_si256((const __m256i*)sum),
                                         _mm256_load_si256((const __m256i*)(sum + 8)));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}

// Products of `count` groups with n queries: several sums at once, since each addition waits for
// the one before.
template <int64_t n, int64_t count>
XS_VNNI inline void peaks_of_groups(int32_t* peak, const int8_t* const* query, const uint8_t* codes,
                                    int64_t groups, int64_t quads) {
  __m512i sum[n][count];
  for (int64_t q = 0; q < n; ++q) {
    for (int64_t g = 0; g < count; ++g) {
      sum[q][g] = _mm512_setzero_si512();
    }
  }
  for (int64_t quad = 0; quad < quads; ++quad) {
    __m512i rows[count];
    for (int64_t g = 0; g < count; ++g) {
      rows[g] = _mm512_loadu_si512(codes + (g * quads + quad) * 4 * kLanes);
    }
    for (int64_t q = 0; q < n; ++q) {
      const __m512i code = _mm512_set1_epi32(*(const Quad*)(query[q] + 4 * quad));
      for (int64_t g = 0; g < count; ++g) {
        sum[q][g] = _mm512_dpbusd_epi32(sum[q][g], rows[g], code);
      }
    }
  }
  for (int64_t q = 0; q < n; ++q) {
    for (int64_t g = 0; g < count; ++g) {
      peak[q * groups + g] = largest_of(sum[q][g]);
    }
  }
}

template <int64_t n>
XS_VNNI void peaks_vnni(int32_t* peak, const int8_t* const* query, const uint8_t* codes,
                        int64_t groups, int64_t quads) {
  constexpr int64_t count = n == 1 ? 8 : 4;
  int64_t group = 0;
  for (; group + count <= groups; group += count) {
    peaks_of_groups<n, count>(peak + group, query, codes + group * quads * 4 * kLanes, groups,
                              quads);
  }
  for (; group < groups; ++group) {
    peaks_of_groups<n, 1>(peak + group, query, codes + group * quads * 4 * kLanes, groups, quads);
  }
}

XS_VNNI uint32_t hits_vnni(int32_t* product, const int8_t* query, const uint8_t* codes,
                           int64_t quads, int32_t threshold) {
  constexpr int64_t parts = 4;
  __m512i sum[parts];
  for (int64_t i = 0; i < parts; ++i) {
    sum[i] = _mm512_setzero_si512();
  }
  const auto add = [&](int64_t quad, __m512i& part) XS_VNNI {
    part = _mm512_dpbusd_epi32(part, _mm512_loadu_si512(codes + quad * 4 * kLanes),
                               _mm512_set1_epi32(*(const Quad*)(query + 4 * quad)));
  };
  int64_t quad = 0;
  for (; quad + parts <= quads; quad += parts) {
    for (int64_t i = 0; i < parts; ++i) {
      add(quad + i, sum[i]);
    }
  }
  for (; quad < quads; ++quad) {
    add(quad, sum[0]);
  }
  const __m512i all =
      _mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3]));
  _mm512_storeu_si512(product, all);
  return _mm512_cmpge_epi32_mask(all, _mm512_set1_epi32(threshold));
}
#endif

void peaks(int32_t* peak, const int8_t* const* query, int64_t n, const uint8_t* codes,
           int64_t groups, int64_t quads) {
#ifdef __AVX512F__
  if (__builtin_cpu_supports("avx512vnni")) {
    switch (n) {
      case 1: return peaks_vnni<1>(peak, query, codes, groups, quads);
      case 2: return peaks_vnni<2>(peak, query, codes, groups, quads);
      case 3: return peaks_vnni<3>(peak, query, codes, groups, quads);
      case 4: return peaks_vnni<4>(peak, query, codes, groups, quads);
      default: return;
    }
  }
#endif
  peaks_widened(peak, query, n, codes, groups, quads);
}

uint32_t hits(int32_t* product, const int8_t* query, const uint8_t* codes, int64_t quads,
              int32_t threshold) {
#ifdef __AVX512F__
  if (__builtin_cpu_supports("avx512vnni")) {
    return hits_vnni(product, query, codes, quads, threshold);
  }
#endif
  products(product, query, codes, quads);
  uint32_t mask = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    mask |= uint32_t(product[lane] >= threshold) << lane;
  }
  return mask;
}

VectorCode encode(int8_t* __restrict code, const double* __restrict z, int64_t n) {
  constexpr double kRound = 0x1.8p52; // x + kRound has no fraction
  double largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t d = 0; d < n; ++d) {
    const double x = z[d] < 0 ? -z[d] : z[d];
    largest = x > largest ? x : largest;
  }
  VectorCode result;
  result.scale = largest > 0x1p-1000 ? largest / 127 : 1;
  const double scale = result.scale;
  double square = 0, sum = 0;
#pragma omp simd reduction(+ : square, sum)
  for (int64_t d = 0; d < n; ++d) {
    const double nearest = (z[d] / scale + kRound) - kRound, error = z[d] - nearest * scale;
    code[d] = int8_t(int32_t(nearest));
    sum += nearest;
    square += error * error;
  }
  result.residual = __builtin_sqrt(square) * (1 + 1e-7);
  result.offset = 128 * sum;
  return result;
}

double bounds(double* __restrict out, const int32_t* __restrict peak, const float* __restrict tails,
              int64_t groups, double base, double unit, double offset, double tail) {
  double largest = -__builtin_inf();
  int any_nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : any_nan)
  for (int64_t g = 0; g < groups; ++g) {
    const double bound = base + unit * (double(peak[g]) - offset) + tail * double(tails[g]);
    out[g] = bound;
    largest = bound > largest ? bound : largest;
    any_nan |= bound != bound;
  }
  return any_nan ? __builtin_inf() : largest;
}

template <int64_t n>
void score_some(float* out, const float* query, const float* rows, int64_t width,
                int64_t out_stride) {
  for (int64_t lane = 0; lane < kLanes; lane += kFloats) {
    Floats sum[n] = {};
    for (int64_t d = 0; d < width; ++d) {
      const Floats row = *(const Floats*)(rows + d * kLanes + lane);
      for (int64_t q = 0; q < n; ++q) {
        sum[q] += query[q * width + d] * row;
      }
    }
    for (int64_t q = 0; q < n; ++q) {
      *(Floats*)(out + q * out_stride + lane) = sum[q];
    }
  }
}

void score(float* out, const float* query, int64_t n, const float* rows, int64_t blocks,
           int64_t width) {
  for (int64_t block = 0; block < blocks; ++block, rows += width * kLanes, out += n * kLanes) {
    int64_t q = 0;
    for (; q + 4 <= n; q += 4) {
      score_some<4>(out + q * kLanes, query + q * width, rows, width, kLanes);
    }
    for (; q < n; ++q) {
      score_some<1>(out + q * kLanes, query + q * width, rows, width, kLanes);
    }
  }
}

uint32_t reached(const float* centre, const float* reach, float length, float threshold) {
  uint32_t bits = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    bits |= uint32_t(!(centre[lane] + length * reach[lane] < threshold)) << lane;
  }
  return bits;
}

void expected_hits(float* __restrict out, const float* centre, const float* reach,
                   const float* size, float deviation, float threshold) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    // Approximates the Gaussian tail within 2 %, with the right steepness far out.
    const float x = (threshold - centre[lane]) / (deviation * reach[lane] + 1e-30f),
                y = x < 0 ? -x : x, z = y < 12.0f ? y : 12.0f;
    const float tail = 0.5f * exponential(-0.717f * z - 0.416f * z * z);
    out[lane] = size[lane] * (x < 0 ? 1.0f - tail : tail);
  }
}

template <typename T>
double dot(const double* query, const T* row, int64_t width) {
  constexpr int64_t n = 16;
  double sum[n] = {};
  int64_t d = 0;
  for (; d + n <= width; d += n) {
    for (int64_t i = 0; i < n; ++i) {
      sum[i] += query[d + i] * double(load(row[d + i]));
    }
  }
  for (int64_t i = 0; d < width; ++d, ++i) {
    sum[i] += query[d] * double(load(row[d]));
  }
  for (int64_t step = n / 2; step > 0; step /= 2) {
    for (int64_t i = 0; i < step; ++i) {
      sum[i] += sum[i + step];
    }
  }
  return sum[0];
}

} // namespace

extern const CellScanTable cell_scan{encode,      peaks,     hits,          bounds,
                                     score,       reached,   expected_hits, dot<float>,
                                     dot<double>, dot<Bf16>, dot<F16>};

} // namespace xsoftmax::XS_ISA
