#include "cpu/prefetch.h"
#include "table/row_kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace xsoftmax::XS_ISA {
namespace {

// A register of accumulators, and the integer lanes from which 16-bit floats are widened.
typedef float Floats __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(kRegisterBytes), aligned(8), may_alias));
typedef uint32_t Words __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
typedef uint16_t HalfWords __attribute__((vector_size(kRegisterBytes / 2), aligned(2), may_alias));

static inline Floats load_lanes(const float* x) { return *reinterpret_cast<const Floats*>(x); }
static inline Doubles load_lanes(const double* x) { return *reinterpret_cast<const Doubles*>(x); }
static inline Floats load_lanes(const Bf16* x) {
  return reinterpret_cast<Floats>(
      __builtin_convertvector(*reinterpret_cast<const HalfWords*>(x), Words) << 16);
}
static inline Floats load_lanes(const F16* x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#else
  float lanes[kRegisterBytes / 4];
  for (int l = 0; l < kRegisterBytes / 4; ++l) {
    lanes[l] = load(x[l]);
  }
  return load_lanes(lanes);
#endif
}

template <typename T> using Lanes = decltype(load_lanes(static_cast<const T*>(nullptr)));
template <typename T> constexpr int64_t kLanes = kRegisterBytes / int64_t(sizeof(opmath<T>));

// Returns the sum of all lanes, adding halves recursively.
template <typename Vector>
static inline auto total(Vector x) {
  using Lane = __typeof__(+x[0]);
  if constexpr (sizeof(x) == 2 * sizeof(Lane)) {
    return x[0] + x[1];
  } else {
    typedef Lane Half __attribute__((vector_size(sizeof(x) / 2)));
    Half low, high;
    __builtin_memcpy(&low, &x, sizeof(low));
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof(low), sizeof(high));
    return total<Half>(low + high);
  }
}

// Rows come from anywhere in a table larger than the caches. Prefetching about 8 KB of rows keeps
// several cache misses in flight.
template <typename T>
inline int64_t rows_ahead(int64_t width) {
  const int64_t rows = 8192 / (1 + width * int64_t(sizeof(T)));
  return rows < 8 ? 8 : rows > 32 ? 32 : rows;
}

template <typename T>
inline void prefetch_row(const T* row, int64_t width) {
  const int64_t size = width * int64_t(sizeof(T));
  prefetch_bytes</*kWrite=*/false, PrefetchInto::kFar>(row,
                                                       size < kRowBeginning ? size : kRowBeginning);
}

// out[i] = <x, row[i]>, with independent accumulators so that the sums do not wait for each other.
template <int kRows, typename T>
inline void dot_of_rows(opmath<T>* out, const T* x, const T* const (&row)[kRows], int64_t width) {
  Lanes<T> sum[kRows] = {};
  int64_t d = 0;
  for (; d + kLanes<T> <= width; d += kLanes<T>) {
    const Lanes<T> value = load_lanes(x + d);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      sum[i] += value * load_lanes(row[i] + d);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    out[i] = total(sum[i]);
  }
  for (; d < width; ++d) {
    for (int i = 0; i < kRows; ++i) {
      out[i] += load(x[d]) * load(row[i][d]);
    }
  }
}

template <typename T>
void dot_rows(opmath<T>* out, const T* x, const T* table, int64_t stride, const int64_t* index,
              int64_t n, int64_t readable, int64_t width) {
  const int64_t ahead = rows_ahead<T>(width);
  const auto row = [=](int64_t j) { return table + index[j] * stride; };
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    for (int64_t next = j + ahead; next < j + ahead + 4 && next < readable; ++next) {
      prefetch_row(row(next), width);
    }
    dot_of_rows<4, T>(out + j, x, {row(j), row(j + 1), row(j + 2), row(j + 3)}, width);
  }
  for (; j < n; ++j) {
    if (j + ahead < readable) {
      prefetch_row(row(j + ahead), width);
    }
    dot_of_rows<1, T>(out + j, x, {row(j)}, width);
  }
}

// Accumulates columns, kVectors vectors at a time and then half as many, which stay in registers
// while all rows are added. Returns the first column that is left.
template <bool kFresh, int kVectors, typename T>
inline int64_t add_columns(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index,
                           const opmath<T>* coefficient, int64_t n, int64_t first, int64_t width) {
  constexpr int64_t kColumns = kVectors * kLanes<T>;
  for (; first + kColumns <= width; first += kColumns) {
    Lanes<T> part[kVectors] = {};
    for (int v = 0; !kFresh && v < kVectors; ++v) {
      part[v] = load_lanes(sum + first + v * kLanes<T>);
    }
    for (int64_t j = 0; j < n; ++j) {
      const opmath<T> c = coefficient[j];
      if (c != 0) {
        const T* row = table + index[j] * stride + first;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          part[v] += c * load_lanes(row + v * kLanes<T>);
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Lanes<T>*>(sum + first + v * kLanes<T>) = part[v];
    }
  }
  if constexpr (kVectors > 1) {
    return add_columns<kFresh, kVectors / 2>(sum, table, stride, index, coefficient, n, first,
                                             width);
  }
  return first;
}

// Computes sum[d] += ..., or sum[d] = ... if kFresh.
template <bool kFresh, typename T>
inline void accumulate(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index,
                       const opmath<T>* coefficient, int64_t n, int64_t width) {
  const int64_t first = add_columns<kFresh, 8>(sum, table, stride, index, coefficient, n, 0, width);
  for (int64_t d = first; d < width; ++d) {
    opmath<T> part = kFresh ? opmath<T>(0) : sum[d];
    for (int64_t j = 0; j < n; ++j) {
      part +=
          coefficient[j] == 0 ? opmath<T>(0) : coefficient[j] * load(table[index[j] * stride + d]);
    }
    sum[d] = part;
  }
}

// Rows per pass, few enough to stay in cache from one block of columns to the next.
constexpr int64_t kRowsPassed = 32;

template <typename T>
void add_rows(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index,
              const opmath<T>* coefficient, int64_t n, int64_t width) {
  int64_t prefetched = 0;
  for (int64_t j = 0; j < n; j += kRowsPassed) {
    for (; prefetched < n && prefetched < j + 2 * kRowsPassed; ++prefetched) {
      prefetch_row(table + index[prefetched] * stride, width);
    }
    accumulate<false>(sum, table, stride, index + j, coefficient + j,
                      n - j < kRowsPassed ? n - j : kRowsPassed, width);
  }
}

template <typename T>
void sum_rows(opmath<T>* sum, const T* table, int64_t stride, const int64_t* index,
              const opmath<T>* coefficient, int64_t n, int64_t width) {
  const int64_t first = n < kRowsPassed ? n : kRowsPassed;
  accumulate<true>(sum, table, stride, index, coefficient, first, width);
  add_rows(sum, table, stride, index + first, coefficient + first, n - first, width);
}

#if defined(__AVX512F__)
constexpr int64_t kStreamBytes = 64;
inline void stream(float* out, const float* x, float c) {
  _mm512_stream_ps(out, _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(c)));
}
inline void stream(double* out, const double* x, double c) {
  _mm512_stream_pd(out, _mm512_mul_pd(_mm512_loadu_pd(x), _mm512_set1_pd(c)));
}
#elif defined(__AVX__)
constexpr int64_t kStreamBytes = 32;
inline void stream(float* out, const float* x, float c) {
  _mm256_stream_ps(out, _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(c)));
}
inline void stream(double* out, const double* x, double c) {
  _mm256_stream_pd(out, _mm256_mul_pd(_mm256_loadu_pd(x), _mm256_set1_pd(c)));
}
#elif defined(__SSE2__)
constexpr int64_t kStreamBytes = 16;
inline void stream(float* out, const float* x, float c) {
  _mm_stream_ps(out, _mm_mul_ps(_mm_loadu_ps(x), _mm_set1_ps(c)));
}
inline void stream(double* out, const double* x, double c) {
  _mm_stream_pd(out, _mm_mul_pd(_mm_loadu_pd(x), _mm_set1_pd(c)));
}
#else
constexpr int64_t kStreamBytes = 0; // no non-temporal stores
#endif

template <typename T>
void stream_rows(T* out, const int64_t* row, const T* table, const int64_t* index,
                 const T* coefficient, int64_t n, int64_t width) {
#if defined(__SSE2__)
  constexpr int64_t kLanes = kStreamBytes / int64_t(sizeof(T));
  // Non-temporal stores need aligned rows.
  if (width % kLanes == 0 && reinterpret_cast<uintptr_t>(out) % kStreamBytes == 0) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t d = 0; d < width; d += kLanes) {
        stream(out + row[j] * width + d, table + index[j] * width + d, coefficient[j]);
      }
    }
    _mm_sfence(); // makes the stores visible before later writes of this thread
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

// Calls row(out, table) for each row of a list, with prefetching.
template <typename Out, typename T, typename Row>
inline void gather_rows(Out* out, const T* table, int64_t stride, const int64_t* index, int64_t n,
                        int64_t width, const Row& row) {
  const int64_t ahead = rows_ahead<T>(width);
  for (int64_t j = 0; j < n; ++j) {
    if (j + ahead < n) {
      prefetch_row(table + index[j + ahead] * stride, width);
    }
    row(out + j * width, table + index[j] * stride);
  }
}

template <typename T>
void widen_rows(opmath<T>* out, const T* table, int64_t stride, const int64_t* index, int64_t n,
                int64_t width) {
  gather_rows(out, table, stride, index, n, width,
              [width](opmath<T>* to, const T* from) { widen_row(to, from, width); });
}

template <typename T>
void round_rows(T* out, const opmath<T>* table, int64_t stride, const int64_t* index, int64_t n,
                int64_t width) {
  gather_rows(out, table, stride, index, n, width,
              [width](T* to, const opmath<T>* from) { round_row(to, from, width); });
}

template <typename T>
void copy_rows(T* out, const T* table, int64_t stride, const int64_t* index, int64_t n,
               int64_t width) {
  gather_rows(out, table, stride, index, n, width,
              [width](T* __restrict to, const T* __restrict from) {
                for (int64_t d = 0; d < width; ++d) {
                  to[d] = from[d];
                }
              });
}

template <typename T>
constexpr RowKernels<T> kernels() {
  RowKernels<T> table{dot_rows<T>,  add_rows<T>,   sum_rows<T>,   nullptr,     round_row<T>,
                      widen_row<T>, widen_rows<T>, round_rows<T>, copy_rows<T>};
  if constexpr (__is_same(T, opmath<T>)) {
    table.stream_rows = stream_rows<T>;
  }
  return table;
}

} // namespace

extern const RowKernelTable row_kernels{kernels<float>(), kernels<double>(), kernels<Bf16>(),
                                        kernels<F16>()};

} // namespace xsoftmax::XS_ISA
