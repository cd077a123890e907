#pragma once

// The arithmetic of estimators, one row of candidates at a time: inline functions for host and CUDA
// code, in the namespace XS_ISA of the file that includes them (cpu/cpu_dispatch.h explains why
// each instruction set has its own copy).
//
// `lanes` is the group of threads that works on a row: one thread (Alone), or on a CUDA device a
// warp or a block (estimator_lanes.cuh). Each lane handles a subset of the columns:
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
#error "estimator_arithmetic.h: expected XS_ISA, the namespace of an instruction set"
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
struct Alone {
  static constexpr int64_t kStep = 1;
  static XS_ROW int64_t first(int64_t begin) { return begin; }
  static XS_ROW bool leads() { return true; }
  static XS_ROW void sync() {}
  template <typename T> static XS_ROW T once(T value) { return value; }
  template <typename T> static XS_ROW T sum(T value) { return value; }
  template <typename T> static XS_ROW T largest(T value) { return value; }
  static XS_ROW bool any(bool value) { return value; }
  // Returns the first column in [begin, end) for which `found` is true, or `end`.
  template <typename Found>
  static XS_ROW int64_t find(int64_t begin, int64_t end, const Found& found) {
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
      const bool gone = log_count[j] == kInfinity<T>;
      const T value = score[j] - (weigh ? log_count[j] : T(0));
      out[j] = gone ? -kInfinity<T> : value;
      absent += gone;
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

template <typename Lanes, typename T>
XS_ROW Row<T> prepare(const Lanes& lanes, const LossRows<T>& rows, int64_t q, T* buffer,
                      bool apart) { // apart: also fill score and log_weight
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

  // Renormalising q to the classes other than the target multiplies the weight of each sample by
  // (M - c_y) / m: M samples with replacement, m of them not hits, c_y the target's expected count.
  T factor = 0;
  const int64_t columns = (p - rows.distinct_private) + (s - rows.distinct_shared);
  const int64_t draws = columns - lanes.sum(of_query.absent + of_all.absent),
                live = draws - lanes.sum(of_query.hits + of_all.hits);
  lanes.sync();
  if (rows.remove_drawn_hits && rows.renormalize && live > 0 && rows.target_log_count) {
    const T others = T(draws) - T(widened_exponential(double(rows.target_log_count[q])));
    factor = logarithm((others < 0 ? T(0) : others) / T(live)); // NaN propagates
    for (int64_t j = lanes.first(rows.distinct_private); j < p; j += Lanes::kStep) {
      buffer[j] += factor;
    }
    for (int64_t j = lanes.first(p + rows.distinct_shared); j < p + s; j += Lanes::kStep) {
      buffer[j] += factor;
    }
  }
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
  if (apart) {
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

template <typename Lanes, typename T>
XS_ROW T largest(const Lanes& lanes, const T* __restrict x, int64_t n, T start) {
  auto key = ordered(start);
  for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
    const auto k = ordered(x[j]);
    key = k > key ? k : key;
  }
  return from_ordered(lanes.largest(key));
}

// The estimated mean score of all classes, for label smoothing: a weighted mean with weight 1 for
// the target and e^log_weight for a candidate.
template <typename T>
struct SmoothingMean {
  T value;
  T total; // sum of the weights

  template <typename Lanes>
  XS_ROW SmoothingMean(const Lanes& lanes, const Row<T>& row) {
    T weights = lanes.once(T(1)), sum = lanes.once(row.target);
#pragma omp simd reduction(+ : weights, sum)
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      const T weight = exponential(row.log_weight[j]);
      weights += weight;
      sum += weight == 0 ? T(0) : weight * row.score[j];
    }
    total = lanes.sum(weights);
    value = lanes.sum(sum) / total;
  }

  // Subtracts `scale` times the gradient of the mean from grad.
  template <typename Lanes>
  XS_ROW void subtract_gradient(const Lanes& lanes, const Row<T>& row, T scale, T* grad_target,
                                T* __restrict grad) const {
    if (lanes.leads()) {
      *grad_target -= scale / total;
    }
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      grad[j] -= scale / total * exponential(row.log_weight[j]);
    }
  }
};

// Returns the loss to every lane. Writes the gradient times grad_loss if grad is not null. The same
// contract holds for all functions *_row below.
template <typename Lanes, typename T>
XS_ROW T softmax_row(const Lanes& lanes, const Row<T>& row, T smoothing, T grad_loss,
                     T* grad_target, T* __restrict grad) {
  const T* __restrict adjusted = row.adjusted;
  const T max_score = largest(lanes, adjusted, row.width, row.target);
  const T target_term = exponential(row.target - max_score);
  T sum = lanes.once(target_term);
  if (grad == nullptr) {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      sum += exponential(adjusted[j] - max_score);
    }
    sum = lanes.sum(sum);
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      const T value = exponential(adjusted[j] - max_score);
      grad[j] = value;
      sum += value;
    }
    sum = lanes.sum(sum);
    const T scale = grad_loss / sum;
    if (lanes.leads()) {
      *grad_target = target_term * scale - (1 - smoothing) * grad_loss;
    }
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      grad[j] *= scale;
    }
  }
  const T normalizer = max_score + logarithm(sum);
  if (smoothing == 0) {
    return normalizer - row.target;
  }
  const SmoothingMean<T> mean(lanes, row);
  if (grad != nullptr) {
    mean.subtract_gradient(lanes, row, smoothing * grad_loss, grad_target, grad);
  }
  return normalizer - (1 - smoothing) * row.target - smoothing * mean.value;
}

// Returns sum_j log(1 + e^x_j). Multiplies factors between 1 and 2 and takes the logarithm once per
// 64 of them, a product that a float can hold. Writes sigmoid(x_j) to grad if it is not null.
template <typename Lanes, typename T>
XS_ROW T softplus_sum(const Lanes& lanes, const T* __restrict x, int64_t n, T* __restrict grad) {
  T sum = 0;
  constexpr int64_t kFactors = 64 * Lanes::kStep; // 64 per lane
  for (int64_t begin = 0; begin < n; begin += kFactors) {
    const int64_t end = begin + kFactors < n ? begin + kFactors : n;
    T product = 1, linear = 0;
#pragma omp simd reduction(* : product) reduction(+ : linear)
    for (int64_t j = lanes.first(begin); j < end; j += Lanes::kStep) {
      const T small = exponential(-magnitude(x[j]));
      product *= 1 + small;
      linear += x[j] > 0 ? x[j] : T(0);
      if (grad != nullptr) {
        grad[j] = (x[j] > 0 ? T(1) : small) / (1 + small);
      }
    }
    sum += linear + logarithm(product);
  }
  return lanes.sum(sum);
}

template <typename Lanes, typename T>
XS_ROW T logistic_row(const Lanes& lanes, const Row<T>& row, T, T grad_loss, T* grad_target,
                      T* __restrict grad) {
  const T opposite = -row.target;
  T slope;
  T loss = softplus_sum(Alone{}, &opposite, 1, &slope);
  loss += softplus_sum(lanes, row.adjusted, row.width, grad);
  if (grad != nullptr) {
    if (lanes.leads()) {
      *grad_target = -slope * grad_loss;
    }
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      grad[j] *= grad_loss;
    }
  }
  return loss;
}

template <typename Lanes, typename T>
XS_ROW T one_vs_each_row(const Lanes& lanes, const Row<T>& row, T, T grad_loss, T* grad_target,
                         T* __restrict grad) {
  T loss = 0, total = 0;
#pragma omp simd reduction(+ : loss, total)
  for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
    const T weight = exponential(row.log_weight[j]), x = row.score[j] - row.target;
    const T small = exponential(-magnitude(x)), slope = (x > 0 ? T(1) : small) / (1 + small);
    const T value = weight * ((x > 0 ? x : T(0)) + logarithm(1 + small));
    loss += weight == 0 ? T(0) : value;
    if (grad != nullptr) {
      grad[j] = weight == 0 ? T(0) : grad_loss * weight * slope;
      total += grad[j];
    }
  }
  if (grad != nullptr) {
    total = lanes.sum(total);
    if (lanes.leads()) {
      *grad_target = -total;
    }
  }
  return lanes.sum(loss);
}

// Computes -log p_y - sum_j log(1 - p_j), p the softmax over {target} and candidates. A best
// candidate b that scores above the target is handled separately: see BlackOut in estimators.cpp.
template <typename Lanes, typename T>
XS_ROW T blackout_row(const Lanes& lanes, const Row<T>& row, T, T grad_loss, T* grad_target,
                      T* __restrict grad) {
  const T* __restrict adjusted = row.adjusted;
  const T max_score = largest(lanes, adjusted, row.width, row.target);
  const int64_t best = row.target < max_score
      ? lanes.find(
            0, row.width, [=](int64_t j) { return adjusted[j] == max_score; })
      : row.width;
  const bool exists = best < row.width;
  const T second = exists ? largest(lanes, adjusted + best + 1, row.width - best - 1,
                                    largest(lanes, adjusted, best, row.target))
                          : max_score;
  const T target_term = exponential(row.target - second);
  T others = lanes.once(target_term); // the sum without b, divided by e^second
#pragma omp simd reduction(+ : others)
  for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
    const T value = exponential(adjusted[j] - second);
    others += j == best ? T(0) : value;
  }
  others = lanes.sum(others);
  const T scale = exponential(second - max_score),
          sum = scale * others + (exists ? T(1) : T(0)); // divided by e^max_score
  const T of_best = exists ? 1 / sum : T(0);
  T loss = max_score + logarithm(sum) - row.target;
  loss += exists ? max_score + logarithm(sum) - second - logarithm(others) : T(0);
  loss = lanes.once(loss);
  T odds_sum = 0;
#pragma omp simd reduction(+ : loss, odds_sum)
  for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
    const T value = scale * exponential(adjusted[j] - second),
            odds = j == best ? T(0) : value / (sum - value);
    loss += logarithm(1 + odds);
    odds_sum += odds;
  }
  if (grad != nullptr) {
    const T left = 1 - lanes.sum(odds_sum);
    if (lanes.leads()) {
      *grad_target = grad_loss * (target_term * (scale * left / sum - of_best / others) - 1);
    }
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      const T share = exponential(adjusted[j] - second), value = scale * share;
      const T of_other = value * left / sum + value / (sum - value) - of_best * share / others;
      grad[j] = grad_loss * (j == best ? of_best * (left + 1) : of_other);
    }
  }
  return lanes.sum(loss);
}

template <typename Lanes, typename T>
XS_ROW T importance_row(const Lanes& lanes, const Row<T>& row, T, T grad_loss, T* grad_target,
                        T* __restrict grad) {
  const T max_score = largest(lanes, row.adjusted, row.width, -kInfinity<T>);
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
    const T value = max_score == -kInfinity<T> ? T(0) : exponential(row.adjusted[j] - max_score);
    sum += value;
    if (grad != nullptr) {
      grad[j] = value;
    }
  }
  sum = lanes.sum(sum);
  if (grad != nullptr) {
    if (lanes.leads()) {
      *grad_target = sum == 0 ? T(0) : -grad_loss;
    }
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      grad[j] *= sum == 0 ? T(0) : grad_loss / sum;
    }
  }
  return sum == 0 ? T(0) : max_score + logarithm(sum) - row.target;
}

// Returns log(e^target_score + sum of e^adjusted over the ranges); see Cane in estimators.cpp. If
// grad is not null, writes each term's share of that sum times scale, and 0 outside the ranges.
template <typename Lanes, typename T>
XS_ROW T log_sum(const Lanes& lanes, const Row<T>& row, T target_score, const Ranges& in, T scale,
                 T* grad_target, T* __restrict grad) {
  auto key = ordered(target_score);
  for (int r = 0; r < 2; ++r) {
    for (int64_t j = lanes.first(in.begin[r]); j < in.end[r]; j += Lanes::kStep) {
      const auto k = ordered(row.adjusted[j]);
      key = k > key ? k : key;
    }
  }
  const T max_score = from_ordered(lanes.largest(key)),
          first = exponential(target_score - max_score);
  if (grad != nullptr) {
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      grad[j] = 0;
    }
  }
  T sum = lanes.once(first);
  for (int r = 0; r < 2; ++r) {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = lanes.first(in.begin[r]); j < in.end[r]; j += Lanes::kStep) {
      const T value = exponential(row.adjusted[j] - max_score);
      sum += value;
      if (grad != nullptr) {
        grad[j] = value;
      }
    }
  }
  sum = lanes.sum(sum);
  if (grad != nullptr) {
    if (lanes.leads()) {
      *grad_target = scale * first / sum;
    }
    for (int r = 0; r < 2; ++r) {
      for (int64_t j = lanes.first(in.begin[r]); j < in.end[r]; j += Lanes::kStep) {
        grad[j] *= scale / sum;
      }
    }
  }
  return max_score + logarithm(sum);
}

// Returns the mean of log(e^log_a + e^m) over the drawn columns, minus log_a. If grad is not null,
// it holds on entry the shares of the target and of the distinct columns in e^log_a; they are
// scaled to gradients, and the gradients of the drawn columns are written.
template <typename Lanes, typename T>
XS_ROW T mean_above(const Lanes& lanes, const Row<T>& row, T log_a, T grad_loss, T* grad_target,
                    T* __restrict grad) {
  const T n = T(row.draws > 0 ? row.draws : 1), log_draws = logarithm(n);
  const Ranges drawn = row.drawn_columns(), distinct = row.distinct_columns();
  T above = 0, share_of_draws = 0;
  for (int r = 0; r < 2; ++r) {
    for (int64_t j = lanes.first(drawn.begin[r]); j < drawn.end[r]; j += Lanes::kStep) {
      const T x = row.adjusted[j] + log_draws - log_a, small = exponential(-magnitude(x));
      const T share = (x > 0 ? T(1) : small) / (1 + small) / n;
      above += ((x > 0 ? x : T(0)) + logarithm(1 + small)) / n;
      share_of_draws += share;
      if (grad != nullptr) {
        grad[j] = grad_loss * share;
      }
    }
  }
  if (grad != nullptr) {
    const T left = grad_loss * (1 - lanes.sum(share_of_draws));
    if (lanes.leads()) {
      *grad_target *= left;
    }
    for (int r = 0; r < 2; ++r) {
      for (int64_t j = lanes.first(distinct.begin[r]); j < distinct.end[r]; j += Lanes::kStep) {
        grad[j] *= left;
      }
    }
  }
  return lanes.sum(above);
}

template <bool kMeanOfLogs, typename Lanes, typename T>
XS_ROW T cane_row(const Lanes& lanes, const Row<T>& row, T smoothing, T grad_loss, T* grad_target,
                  T* __restrict grad) {
  const bool covered = row.covered(lanes);
  if (covered && !kMeanOfLogs) {
    return softmax_row(lanes, row, smoothing, grad_loss, grad_target, grad);
  }
  T normalizer;
  if (covered) {
    normalizer = log_sum(lanes, row, row.target, row.distinct_columns(), T(1), grad_target, grad);
    normalizer += mean_above(lanes, row, normalizer, grad_loss, grad_target, grad);
  } else {
    const int64_t n = row.draws, first = row.first_draw(lanes);
    const T count = row.target_log_count - (kMeanOfLogs && n > 0 ? logarithm(T(n)) : T(0));
    const T corrected_target = row.target - (row.target_log_count == -kInfinity<T> ? T(0) : count);
    const Ranges others = first < row.width ? Ranges{{0, first + 1}, {first, row.width}}
                                            : Ranges{{0, 0}, {row.width, 0}};
    normalizer =
        log_sum(lanes, row, corrected_target, kMeanOfLogs ? row.distinct_columns() : others,
                grad_loss, grad_target, grad);
  }
  if (grad != nullptr && lanes.leads()) {
    *grad_target -= grad_loss;
  }
  return normalizer - row.target;
}

template <RowLoss kLoss, typename Lanes, typename T>
XS_ROW T row_loss(const Lanes& lanes, const Row<T>& row, T smoothing, T grad_loss, T* grad_target,
                  T* __restrict grad) {
  switch (kLoss) {
    case RowLoss::Softmax: return softmax_row(lanes, row, smoothing, grad_loss, grad_target, grad);
    case RowLoss::Logistic:
      return logistic_row(lanes, row, smoothing, grad_loss, grad_target, grad);
    case RowLoss::OneVsEach:
      return one_vs_each_row(lanes, row, smoothing, grad_loss, grad_target, grad);
    case RowLoss::BlackOut:
      return blackout_row(lanes, row, smoothing, grad_loss, grad_target, grad);
    case RowLoss::Importance:
      return importance_row(lanes, row, smoothing, grad_loss, grad_target, grad);
    case RowLoss::Cane: return cane_row<true>(lanes, row, smoothing, grad_loss, grad_target, grad);
    case RowLoss::CaneLogOfMean:
      return cane_row<false>(lanes, row, smoothing, grad_loss, grad_target, grad);
  }
  __builtin_unreachable();
}

// Writes the loss of a query, the gradient of its scores, or both.
template <RowLoss kLoss, typename Lanes, typename T>
XS_ROW void run_query(const Lanes& lanes, const LossRows<T>& rows, int64_t q, T* buffer) {
  const int64_t width = 1 + rows.candidates();
  T* grad = rows.grad_scores ? rows.grad_scores + q * rows.stride : nullptr;
  const T grad_loss = rows.grad_loss ? rows.grad_loss[q] : T(1);
  // A query that is ignored or has weight 0: writes 0 even if its scores are not finite.
  if (grad_loss == 0) {
    for (int64_t j = lanes.first(0); grad != nullptr && j < width; j += Lanes::kStep) {
      grad[j] = 0;
    }
    if (rows.loss && lanes.leads()) {
      rows.loss[q] = 0;
    }
    return;
  }
  const Row<T> row = prepare(lanes, rows, q, buffer, rows.apart(kLoss));
  const T loss =
      row_loss<kLoss>(lanes, row, rows.label_smoothing, grad_loss, grad, grad ? grad + 1 : nullptr);
  if (rows.loss && lanes.leads()) {
    rows.loss[q] = grad_loss * loss;
  }
}

} // namespace
} // namespace xsoftmax::XS_ISA
