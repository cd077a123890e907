#include "scores/row_kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace xsoftmax::XS_ISA {
namespace {

// Rows come from anywhere in a table that no cache holds. Reading some ahead keeps cache misses under way: as many as make 4 KB, and
// a few in any case.
template <typename T>
inline int64_t rows_ahead(int64_t width) {
  const int64_t rows = 4096 / (1 + width * int64_t(sizeof(T)));
  return rows < 4 ? 4 : rows > 16 ? 16 : rows;
}

template <typename T>
inline void prefetch_row(const T* row, int64_t width) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t b = 0; b < width * int64_t(sizeof(T)); b += 64) {
    __builtin_prefetch(bytes + b);
  }
}

template <typename T>
void dot_rows(opmath<T>* out, const T* x, const T* table, int64_t stride, const int64_t* index, int64_t n, int64_t readable,
              int64_t width) {
  const int64_t ahead = rows_ahead<T>(width);
  for (int64_t j = 0; j < n; ++j) {
    if (j + ahead < readable) {
      prefetch_row(table + index[j + ahead] * stride, width);
    }
    const T* __restrict row = table + index[j] * stride;
    opmath<T> sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; ++d) {
      sum += load(x[d]) * load(row[d]);
    }
    out[j] = sum;
  }
}

template <typename T>
void add_rows(opmath<T>* __restrict sum, const T* table, int64_t stride, const int64_t* index, const opmath<T>* coefficient,
              int64_t n, int64_t width) {
  const int64_t ahead = rows_ahead<T>(width);
  for (int64_t j = 0; j < n && j < ahead; ++j) {
    prefetch_row(table + index[j] * stride, width);
  }
  for (int64_t j = 0; j < n; ++j) {
    if (j + ahead < n) {
      prefetch_row(table + index[j + ahead] * stride, width);
    }
    const opmath<T> c = coefficient[j];
    if (c == 0) {
      continue;
    }
    const T* __restrict row = table + index[j] * stride;
    for (int64_t d = 0; d < width; ++d) {
      sum[d] += c * load(row[d]);
    }
  }
}

template <typename T>
void sum_rows(opmath<T>* __restrict sum, const T* table, int64_t stride, const int64_t* index, const opmath<T>* coefficient,
              int64_t n, int64_t width) {
  const opmath<T> c = n > 0 ? coefficient[0] : opmath<T>(0);
  const T* __restrict row = c == 0 ? nullptr : table + index[0] * stride;
  for (int64_t d = 0; d < width; ++d) {
    sum[d] = c == 0 ? opmath<T>(0) : c * load(row[d]);
  }
  if (n > 1) {
    add_rows(sum, table, stride, index + 1, coefficient + 1, n - 1, width);
  }
}

#if defined(__AVX512F__)
constexpr int64_t kStreamBytes = 64;
inline void stream(float* out, const float* x, float c) { _mm512_stream_ps(out, _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(c))); }
inline void stream(double* out, const double* x, double c) { _mm512_stream_pd(out, _mm512_mul_pd(_mm512_loadu_pd(x), _mm512_set1_pd(c))); }
#elif defined(__AVX__)
constexpr int64_t kStreamBytes = 32;
inline void stream(float* out, const float* x, float c) { _mm256_stream_ps(out, _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(c))); }
inline void stream(double* out, const double* x, double c) { _mm256_stream_pd(out, _mm256_mul_pd(_mm256_loadu_pd(x), _mm256_set1_pd(c))); }
#elif defined(__SSE2__)
constexpr int64_t kStreamBytes = 16;
inline void stream(float* out, const float* x, float c) { _mm_stream_ps(out, _mm_mul_ps(_mm_loadu_ps(x), _mm_set1_ps(c))); }
inline void stream(double* out, const double* x, double c) { _mm_stream_pd(out, _mm_mul_pd(_mm_loadu_pd(x), _mm_set1_pd(c))); }
#else
constexpr int64_t kStreamBytes = 0; // no such stores
#endif

template <typename T>
void stream_rows(T* out, const int64_t* row, const T* table, const int64_t* index, const T* coefficient, int64_t n, int64_t width) {
#if defined(__SSE2__)
  constexpr int64_t kLanes = kStreamBytes / int64_t(sizeof(T));
  // Stores of this kind want aligned rows.
  if (width % kLanes == 0 && reinterpret_cast<uintptr_t>(out) % kStreamBytes == 0) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t d = 0; d < width; d += kLanes) {
        stream(out + row[j] * width + d, table + index[j] * width + d, coefficient[j]);
      }
    }
    _mm_sfence(); // other threads see them before whatever this one writes next
    return;
  }
#endif
  for (int64_t j = 0; j < n; ++j) {
    T* __restrict to = out + row[j] * width;
    const T* __restrict from = table + index[j] * width;
    for (int64_t d = 0; d < width; ++d) {
      to[d] = coefficient[j] * from[d];
    }
  }
}

template <typename T>
void round_row(T* __restrict out, const opmath<T>* __restrict x, int64_t width) {
  for (int64_t d = 0; d < width; ++d) {
    store(out + d, x[d]);
  }
}

template <typename T>
void widen_row(opmath<T>* __restrict out, const T* __restrict x, int64_t width) {
  for (int64_t d = 0; d < width; ++d) {
    out[d] = load(x[d]);
  }
}

template <typename T>
void widen_rows(opmath<T>* out, const T* table, int64_t stride, const int64_t* index, int64_t n, int64_t width) {
  const int64_t ahead = rows_ahead<T>(width);
  for (int64_t j = 0; j < n; ++j) {
    if (j + ahead < n) {
      prefetch_row(table + index[j + ahead] * stride, width);
    }
    widen_row(out + j * width, table + index[j] * stride, width);
  }
}

template <typename T>
constexpr RowKernels<T> kernels() {
  RowKernels<T> table{dot_rows<T>, add_rows<T>, sum_rows<T>, nullptr, round_row<T>, widen_row<T>, widen_rows<T>};
  if constexpr (__is_same(T, opmath<T>)) {
    table.stream_rows = stream_rows<T>;
  }
  return table;
}

} // namespace

extern const RowKernelTable row_kernels{kernels<float>(), kernels<double>(), kernels<Bf16>(), kernels<F16>()};

} // namespace xsoftmax::XS_ISA
