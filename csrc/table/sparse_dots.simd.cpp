#include "table/sparse_dots.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace xsoftmax::XS_ISA {
namespace {

/// Returns sum_t value[t] dense[column[t]] for t < n. Written with intrinsics, because compilers
/// avoid the gather instruction.
static inline float dot(const int32_t* column, const float* value, int64_t n, const float* dense) {
  float sum = 0;
  int64_t t = 0;
#ifdef __AVX512F__
  __m512 sums = _mm512_setzero_ps();
  for (; t + 16 <= n; t += 16) {
    const __m512 gathered = _mm512_i32gather_ps(_mm512_loadu_si512(column + t), dense, 4);
    sums = _mm512_fmadd_ps(_mm512_loadu_ps(value + t), gathered, sums);
  }
  if (t < n) {
    const __mmask16 rest = __mmask16((1u << (n - t)) - 1);
    const __m512i columns = _mm512_maskz_loadu_epi32(rest, column + t);
    const __m512 gathered = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), rest, columns, dense, 4);
    sums = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(rest, value + t), gathered, sums);
    t = n;
  }
  sum = _mm512_reduce_add_ps(sums);
#endif
#pragma omp simd reduction(+ : sum)
  for (int64_t u = t; u < n; ++u) {
    sum += value[u] * dense[column[u]];
  }
  return sum;
}

void dots(const int64_t* offset, const int32_t* column, const float* value, const int32_t* rows,
          int64_t n, const float* dense, float* out) {
  constexpr int64_t kAhead = 4; // rows may be far apart
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(column + offset[rows[i + kAhead]]);
      __builtin_prefetch(value + offset[rows[i + kAhead]]);
    }
    const int64_t begin = offset[rows[i]];
    out[i] = dot(column + begin, value + begin, offset[rows[i] + 1] - begin, dense);
  }
}

} // namespace

extern const SparseDotTable sparse_dots{dots};

} // namespace xsoftmax::XS_ISA
