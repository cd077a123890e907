#include "loss/softmax_rows.h"

namespace xsoftmax::XS_ISA {
namespace {

template <bool kBias, typename A>
inline A logit(const A* logits, const A* bias, int64_t j) {
  if constexpr (kBias) {
    return logits[j] + bias[j];
  }
  return logits[j];
}

// Bounds logit - max from below, so that a logit of -inf contributes 0 times a finite number, not
// NaN.
template <typename A>
inline A bounded(A difference) {
  return difference < kMinDifference<A> ? kMinDifference<A> : difference;
}

// Implements fold and fold_weighted. weighted: nullptr unless kWeighted.
template <bool kBias, bool kWeighted, typename A>
A fold_row(A* max, A* sum, A* weighted, const A* __restrict logits, const A* __restrict bias,
           int64_t n) {
  constexpr A kInfinity = A(__builtin_inf());
  auto key = ordered(-kInfinity);
  for (int64_t j = 0; j < n; ++j) {
    const auto k = ordered(logit<kBias>(logits, bias, j));
    key = k > key ? k : key;
  }
  const A top = from_ordered(key);
  const A new_max = *max > top ? *max : top;
  const A shift = new_max == -kInfinity ? A(0) : new_max; // avoids -inf - -inf, which is NaN
  A total = 0, total_weighted = 0;
#pragma omp simd reduction(+ : total, total_weighted)
  for (int64_t j = 0; j < n; ++j) {
    const A difference = logit<kBias>(logits, bias, j) - shift, e = exponential(difference);
    total += e;
    if constexpr (kWeighted) {
      total_weighted += e * bounded(difference);
    }
  }
  const A moved = *max - shift, scale = exponential(moved);
  if constexpr (kWeighted) {
    *weighted = scale * (*weighted + bounded(moved) * *sum) + total_weighted;
  }
  *sum = *sum * scale + total;
  *max = new_max;
  return top;
}

template <typename A>
A fold(A* max, A* sum, const A* logits, const A* bias, int64_t n) {
  constexpr A* weighted = nullptr;
  return bias == nullptr ? fold_row<false, false>(max, sum, weighted, logits, bias, n)
                         : fold_row<true, false>(max, sum, weighted, logits, bias, n);
}

template <typename A>
void fold_weighted(A* max, A* sum, A* weighted, const A* logits, const A* bias, int64_t n) {
  bias == nullptr ? fold_row<false, true>(max, sum, weighted, logits, bias, n)
                  : fold_row<true, true>(max, sum, weighted, logits, bias, n);
}

template <bool kBias, typename A>
void gradient_of_entropy_row(A* grad, const A* logits, const A* __restrict bias, A max, A constant,
                             A slope, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const A difference = logit<kBias>(logits, bias, j) - max;
    grad[j] = exponential(difference) * (constant + slope * bounded(difference));
  }
}

template <typename A>
void gradient_of_entropy(A* grad, const A* logits, const A* bias, A max, A constant, A slope,
                         int64_t n) {
  bias == nullptr ? gradient_of_entropy_row<false>(grad, logits, bias, max, constant, slope, n)
                  : gradient_of_entropy_row<true>(grad, logits, bias, max, constant, slope, n);
}

template <bool kBias, bool kWeight, typename A>
A weighted_sum_row(const A* __restrict logits, const A* __restrict bias,
                   const A* __restrict class_weight, A shift, int64_t n) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) {
    const A term = logit<kBias>(logits, bias, j) - shift;
    sum += kWeight ? class_weight[j] * term : term;
  }
  return sum;
}

template <typename A>
A weighted_sum(const A* logits, const A* bias, const A* class_weight, A shift, int64_t n) {
  if (bias == nullptr) {
    return class_weight == nullptr
        ? weighted_sum_row<false, false>(logits, bias, class_weight, shift, n)
        : weighted_sum_row<false, true>(logits, bias, class_weight, shift, n);
  }
  return class_weight == nullptr
      ? weighted_sum_row<true, false>(logits, bias, class_weight, shift, n)
      : weighted_sum_row<true, true>(logits, bias, class_weight, shift, n);
}

// grad and logits are the same row or do not overlap, so no iteration reads what an earlier one
// wrote (ivdep).
template <bool kBias, bool kWeight, typename A>
void gradient_row(A* grad, const A* logits, const A* __restrict bias,
                  const A* __restrict class_weight, A max, A scale, A smoothing, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const A p = exponential(logit<kBias>(logits, bias, j) - max);
    grad[j] = scale * p - (kWeight ? smoothing * class_weight[j] : smoothing);
  }
}

template <typename A>
void gradient(A* grad, const A* logits, const A* bias, const A* class_weight, A max, A scale,
              A smoothing, int64_t n) {
  if (bias == nullptr) {
    return class_weight == nullptr
        ? gradient_row<false, false>(grad, logits, bias, class_weight, max, scale, smoothing, n)
        : gradient_row<false, true>(grad, logits, bias, class_weight, max, scale, smoothing, n);
  }
  return class_weight == nullptr
      ? gradient_row<true, false>(grad, logits, bias, class_weight, max, scale, smoothing, n)
      : gradient_row<true, true>(grad, logits, bias, class_weight, max, scale, smoothing, n);
}

// Returns tanh(x) to a few ulp, without branches. Below 1/2 uses a convergent of Lambert's
// continued fraction, whose error there is below float64 precision; above, a formula in e^-2|x|.
template <typename A>
inline A hyperbolic_tangent(A x) {
  const A size = x < 0 ? -x : x, square = x * x;
  const A numerator = ((square + A(378)) * square + A(17325)) * square + A(135135);
  const A denominator = ((A(28) * square + A(3150)) * square + A(62370)) * square + A(135135);
  const A decay = exponential(A(-2) * size), large = (1 - decay) / (1 + decay);
  return size < A(0.5) ? x * numerator / denominator : (x < 0 ? -large : large);
}

template <bool kBias, typename A>
void transform_row(A* scores, const A* __restrict bias, RowTransform<A> transform, int64_t n) {
  const A cap = transform.cap, scale = cap == 0 ? transform.scale : transform.scale / cap;
  if (cap == 0) {
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      scores[j] = scale * logit<kBias>(scores, bias, j);
    }
  } else {
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      scores[j] = cap * hyperbolic_tangent(scale * logit<kBias>(scores, bias, j));
    }
  }
}

template <typename A>
void transform(A* scores, const A* bias, RowTransform<A> transform, int64_t n) {
  bias == nullptr ? transform_row<false>(scores, bias, transform, n)
                  : transform_row<true>(scores, bias, transform, n);
}

// grad and logits may alias as in gradient_row.
template <bool kWeight, typename A>
void transformed_gradient_row(A* grad, const A* logits, const A* __restrict class_weight, A max,
                              A scale, A smoothing, int64_t n, RowTransform<A> transform) {
  const A inverse = transform.cap == 0 ? A(0) : 1 / transform.cap;
  const bool capped = transform.cap != 0;
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const A x = logits[j], ratio = capped ? x * inverse : A(0); // avoids -inf * 0
    const A slope =
        scale * exponential(x - max) - (kWeight ? smoothing * class_weight[j] : smoothing);
    grad[j] = slope * (transform.scale * (1 - ratio * ratio));
  }
}

template <typename A>
void transformed_gradient(A* grad, const A* logits, const A* class_weight, A max, A scale,
                          A smoothing, int64_t n, RowTransform<A> transform) {
  class_weight == nullptr ? transformed_gradient_row<false>(grad, logits, class_weight, max, scale,
                                                            smoothing, n, transform)
                          : transformed_gradient_row<true>(grad, logits, class_weight, max, scale,
                                                           smoothing, n, transform);
}

template <bool kBias, typename A>
int64_t find_above_row(const A* __restrict logits, const A* __restrict bias, int64_t from,
                       int64_t n, A threshold) {
  // Searches in runs: testing a whole run is a reduction without an early exit, which vectorises,
  // and hits are rare.
  constexpr int64_t kRun = 64;
  while (from + kRun <= n) {
    int32_t hits = 0;
    for (int64_t j = from; j < from + kRun; ++j) {
      hits |= logit<kBias>(logits, bias, j) > threshold ? 1 : 0;
    }
    if (hits != 0) {
      break;
    }
    from += kRun;
  }
  while (from < n && !(logit<kBias>(logits, bias, from) > threshold)) {
    ++from;
  }
  return from;
}

template <typename A>
int64_t find_above(const A* logits, const A* bias, int64_t from, int64_t n, A threshold) {
  return bias == nullptr ? find_above_row<false>(logits, bias, from, n, threshold)
                         : find_above_row<true>(logits, bias, from, n, threshold);
}

template <typename A>
constexpr SoftmaxRows<A> rows() {
  return {
      fold<A>,      fold_weighted<A>,        weighted_sum<A>, gradient<A>, gradient_of_entropy<A>,
      transform<A>, transformed_gradient<A>, find_above<A>};
}

} // namespace

extern const SoftmaxRowsTable softmax_rows{rows<float>(), rows<double>()};

} // namespace xsoftmax::XS_ISA
