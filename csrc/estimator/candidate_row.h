#pragma once

// The candidates of one query as an estimator receives them: inline functions for host and CUDA
// code, in the namespace XS_ISA of the file that includes them (cpu/cpu_dispatch.h explains why
// each instruction set has its own copy).
//
// `lanes` is the group of threads that works on a row: one thread (SingleLane), or on a CUDA device
// a warp or a block (estimator_lanes.cuh). Each lane handles a subset of the columns:
//
//     for (int64_t j = lanes.first(begin); j < end; j += Lanes::kStep)
//
// All loops over the same array assign a column to the same lane, so a lane can read what it wrote
// without synchronisation; reading what another lane wrote needs lanes.sync() first. To compute a
// sum, start with lanes.once(x) for a term that must be added once per row, and reduce the partial
// sums of the lanes with lanes.sum().

#include "cpu/simd.h"
#include "estimator/estimator_rows.h"

#ifndef XS_ISA
#error "candidate_row.h: expected XS_ISA, the namespace of an instruction set"
#endif

// The functions are host code in a C++ file and device-only code in a CUDA file, because warp
// operations do not exist on the host.
#if defined(__CUDACC__)
#define XS_ROW __device__
#else
#define XS_ROW
#endif

namespace xsoftmax::XS_ISA {
namespace {

// A single thread that handles all columns.
struct SingleLane {
  static constexpr int64_t kStep = 1;
  static XS_ROW int64_t first(int64_t begin) { return begin; }
  static XS_ROW bool is_leader() { return true; }
  static XS_ROW void sync() {}
  template <typename T> static XS_ROW T once(T value) { return value; }
  template <typename T> static XS_ROW T sum(T value) { return value; }
  template <typename T> static XS_ROW T largest(T value) { return value; }
  static XS_ROW bool any(bool value) { return value; }
  // Returns the first column in [begin, end) for which `found` is true, or `end`.
  template <typename Predicate>
  static XS_ROW int64_t find(int64_t begin, int64_t end, const Predicate& found) {
    while (begin < end && !found(begin)) {
      ++begin;
    }
    return begin;
  }
};

template <typename T>
constexpr T kInfinity = T(__builtin_inf());

#if defined(__CUDA_ARCH__)
static __device__ inline float logarithm(float x) { return ::logf(x); }
static __device__ inline double logarithm(double x) { return ::log(x); }
static __device__ inline float magnitude(float x) { return ::fabsf(x); }
static __device__ inline double magnitude(double x) { return ::fabs(x); }
static __device__ inline double widened_exponential(double x) { return ::exp(x); }
#else
static inline float logarithm(float x) { return __builtin_logf(x); }
static inline double logarithm(double x) { return __builtin_log(x); }
static inline float magnitude(float x) { return __builtin_fabsf(x); }
static inline double magnitude(double x) { return __builtin_fabs(x); }
static inline double widened_exponential(double x) { return __builtin_exp(x); }
#endif

// A loop that counts elements of type T vectorises if the counter has the width of T.
template <typename T> struct CountOf { using type = int64_t; };
template <> struct CountOf<float> { using type = int32_t; };

// Returns whether `id` is among the candidates, ignoring those of infinite count.
template <typename Lanes, typename T>
XS_ROW bool holds(const Lanes& lanes, const int64_t* ids, const T* log_count, int64_t n,
                  int64_t id) {
  int64_t equal = 0;
  for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
    equal += ids[j] == id;
  }
  const bool found = lanes.any(equal > 0);
  if (log_count == nullptr || !found) {
    return found;
  }
  equal = 0;
  for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
    equal += ids[j] == id && log_count[j] != kInfinity<T>;
  }
  return lanes.any(equal > 0);
}

// Two half-open ranges of columns.
struct Ranges { int64_t begin[2], end[2]; };

// The input of an estimator for one query. log_weight = -log count (+ the log of the
// renormalisation factor). score and log_weight are filled only on request (see prepare). adjusted
// = score + log_weight, or -inf if the candidate is left out: a removed hit, one of infinite count,
// or the sample that the target replaces.
template <typename T>
struct Row {
  T target;
  const T* score;
  const T* log_weight;
  const T* adjusted;
  int64_t width;
  // Columns of distinct sets: [0, distinct_private) and
  // [private_width, private_width + distinct_shared).
  int64_t distinct_private, private_width, distinct_shared;
  const int64_t *private_ids, *shared_ids;
  const T *private_log_count, *shared_log_count; // null if absent
  int64_t target_id;
  T target_log_count;
  int64_t draws; // number of drawn columns of finite count

  XS_ROW Ranges distinct_columns() const {
    return {{0, private_width}, {distinct_private, private_width + distinct_shared}};
  }
  XS_ROW Ranges drawn_columns() const {
    return {{distinct_private, private_width + distinct_shared}, {private_width, width}};
  }
  /// Returns whether a distinct set contains the target.
  template <typename Lanes>
  XS_ROW bool covered(const Lanes& lanes) const {
    return holds(lanes, private_ids, private_log_count, distinct_private, target_id) ||
        holds(lanes, shared_ids, shared_log_count, distinct_shared, target_id);
  }
  /// Returns the first drawn column of finite count, or `width`.
  template <typename Lanes>
  XS_ROW int64_t first_draw(const Lanes& lanes) const {
    const int64_t of_query = lanes.find(distinct_private, private_width, [this](int64_t j) {
      return private_log_count == nullptr || private_log_count[j] != kInfinity<T>;
    });
    return of_query < private_width ? of_query
                                    : lanes.find(
                                          private_width + distinct_shared, width,
                                          [this](int64_t j) {
                                            return shared_log_count == nullptr ||
                                                shared_log_count[j - private_width] != kInfinity<T>;
                                          });
  }
};

// The number of candidates that one lane left out: removed hits, and candidates of infinite count.
struct Missing { int64_t hits = 0, absent = 0; };

// Writes out[j] = score[j] - log_count[j], or -inf if candidate j is left out.
template <typename Lanes, typename T>
XS_ROW Missing adjust(const Lanes& lanes, T* __restrict out, const T* __restrict score,
                      const T* __restrict log_count, const int64_t* __restrict ids, int64_t target,
                      bool remove_hits, bool weigh, int64_t n) {
  typename CountOf<T>::type absent = 0;
  int64_t hits = 0;
  if (log_count == nullptr) {
    for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
      out[j] = score[j];
    }
  } else {
    for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
      const bool is_zero = log_count[j] == kInfinity<T>;
      const T value = score[j] - (weigh ? log_count[j] : T(0));
      out[j] = is_zero ? -kInfinity<T> : value;
      absent += is_zero;
    }
  }
  if (remove_hits) {
    for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
      hits += ids[j] == target;
    }
    if (hits > 0) { // rare, so most queries skip the second pass
      for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
        hits -= ids[j] == target && log_count != nullptr && log_count[j] == kInfinity<T>;
        out[j] = ids[j] == target ? -kInfinity<T> : out[j];
      }
    }
  }
  return {hits, int64_t(absent)};
}

// Adjusts the distinct columns, then the drawn columns. Returns how many drawn columns are left
// out.
template <typename Lanes, typename T>
XS_ROW Missing adjust_columns(const Lanes& lanes, T* out, const T* score, const T* log_count,
                              const int64_t* ids, int64_t target, const LossRows<T>& rows,
                              int64_t distinct, int64_t n) {
  adjust(lanes, out, score, log_count, ids, target, rows.remove_distinct_hits, rows.weigh,
         distinct);
  return adjust(lanes, out + distinct, score + distinct, log_count ? log_count + distinct : nullptr,
                ids + distinct, target, rows.remove_drawn_hits, rows.weigh, n - distinct);
}

// Writes log_weight. It is not computed as adjusted - score, which cancels for large scores.
template <typename Lanes, typename T>
XS_ROW void set_log_weight(const Lanes& lanes, T* __restrict out, const T* __restrict adjusted,
                           const T* __restrict log_count, T factor, int64_t distinct, int64_t n) {
  for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
    const T weight = (log_count ? -log_count[j] : T(0)) + (j < distinct ? T(0) : factor);
    out[j] = adjusted[j] == -kInfinity<T> ? -kInfinity<T> : weight;
  }
}

// Renormalising q to the classes other than the target multiplies the weight of each sample by
// (M - c_y) / m: M samples with replacement, m of them not hits, c_y the target's expected count.
// Adds the log of that factor to the drawn columns and returns it. draws: M. live: m.
template <typename Lanes, typename T>
XS_ROW T renormalize(const Lanes& lanes, const LossRows<T>& rows, int64_t q, T* adjusted,
                     int64_t draws, int64_t live) {
  if (!rows.remove_drawn_hits || !rows.renormalize || live <= 0 || !rows.target_log_count) {
    return 0;
  }
  const int64_t p = rows.private_width, s = rows.shared_width;
  const T others = T(draws) - T(widened_exponential(double(rows.target_log_count[q])));
  const T factor = logarithm((others < 0 ? T(0) : others) / T(live)); // NaN propagates
  for (int64_t j = lanes.first(rows.distinct_private); j < p; j += Lanes::kStep) {
    adjusted[j] += factor;
  }
  for (int64_t j = lanes.first(p + rows.distinct_shared); j < p + s; j += Lanes::kStep) {
    adjusted[j] += factor;
  }
  return factor;
}

// Returns the candidates of query q. buffer: rows.buffer_size() elements, which the result points
// to. keeps_scores: whether to fill score and log_weight also.
template <typename Lanes, typename T>
XS_ROW Row<T> prepare(const Lanes& lanes, const LossRows<T>& rows, int64_t q, T* buffer,
                      bool keeps_scores) {
  const int64_t p = rows.private_width, s = rows.shared_width;
  const T* scores = rows.scores + q * rows.stride;
  const T* score = scores + 1;
  const int64_t target = rows.target[q];
  const T* private_log_count = rows.private_log_count ? rows.private_log_count + q * p : nullptr;
  const T* shared_log_count =
      rows.shared_log_count ? rows.shared_log_count + q * rows.shared_count_stride : nullptr;
  const Missing of_query =
      adjust_columns(lanes, buffer, score, private_log_count, rows.private_ids + q * p, target,
                     rows, rows.distinct_private, p);
  const Missing of_all = adjust_columns(lanes, buffer + p, score + p, shared_log_count,
                                        rows.shared_ids, target, rows, rows.distinct_shared, s);

  const int64_t columns = (p - rows.distinct_private) + (s - rows.distinct_shared);
  const int64_t draws = columns - lanes.sum(of_query.absent + of_all.absent),
                live = draws - lanes.sum(of_query.hits + of_all.hits);
  lanes.sync();
  const T factor = renormalize(lanes, rows, q, buffer, draws, live);
  // A target that cannot be sampled (log count -inf) is not corrected.
  const bool corrected = rows.correct_target && rows.target_log_count[q] != -kInfinity<T>;
  const T correction = corrected ? rows.target_log_count[q] : T(0);
  T *log_weight = buffer + (p + s), *score_copy = log_weight + (p + s);
  const Row<T> row{scores[0] - correction,
                   score_copy,
                   log_weight,
                   buffer,
                   p + s,
                   rows.distinct_private,
                   p,
                   rows.distinct_shared,
                   rows.private_ids + q * p,
                   rows.shared_ids,
                   private_log_count,
                   shared_log_count,
                   target,
                   rows.target_log_count ? rows.target_log_count[q] : T(0),
                   draws};
  if (rows.replace_a_sample && draws > 0 && !row.covered(lanes)) {
    const int64_t first = row.first_draw(lanes);
    if (lanes.first(first) == first) { // the lane that owns the column
      buffer[first] = -kInfinity<T>;
    }
  }
  if (keeps_scores) {
    lanes.sync();
    set_log_weight(lanes, log_weight, buffer, private_log_count, factor, rows.distinct_private, p);
    set_log_weight(lanes, log_weight + p, buffer + p, shared_log_count, factor,
                   rows.distinct_shared, s);
    for (int64_t j = lanes.first(0); j < p + s; j += Lanes::kStep) {
      score_copy[j] = score[j]; // because the gradient may overwrite the scores
    }
  }
  lanes.sync();
  return row;
}

} // namespace
} // namespace xsoftmax::XS_ISA
