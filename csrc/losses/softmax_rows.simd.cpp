#include "losses/softmax_rows.h"

namespace xsoftmax::XS_ISA {
namespace {

template <bool kBias, typename T>
inline opmath<T> logit(const T* logits, const opmath<T>* bias, int64_t j) {
  if constexpr (kBias) {
    return load(logits[j]) + bias[j];
  }
  return load(logits[j]);
}

template <bool kBias, typename T>
opmath<T> fold_row(opmath<T>* max, opmath<T>* sum, const T* __restrict logits, const opmath<T>* __restrict bias, int64_t n) {
  using A = opmath<T>;
  constexpr A kInfinity = A(__builtin_inf());
  auto key = ordered(-kInfinity);
  for (int64_t j = 0; j < n; ++j) {
    const auto k = ordered(logit<kBias>(logits, bias, j));
    key = k > key ? k : key;
  }
  const A top = from_ordered(key);
  const A new_max = *max > top ? *max : top;
  const A shift = new_max == -kInfinity ? A(0) : new_max; // -inf - -inf is no number
  A total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) {
    total += exponential(logit<kBias>(logits, bias, j) - shift);
  }
  *sum = *sum * exponential(*max - shift) + total;
  *max = new_max;
  return top;
}

template <typename T>
opmath<T> fold(opmath<T>* max, opmath<T>* sum, const T* logits, const opmath<T>* bias, int64_t n) {
  return bias == nullptr ? fold_row<false>(max, sum, logits, bias, n) : fold_row<true>(max, sum, logits, bias, n);
}

// A logit that lies below all others without end counts for nothing: 0 times a number, not infinity.
template <typename A>
inline A bounded(A difference) {
  constexpr A kLeast = A(-1e30);
  return difference < kLeast ? kLeast : difference;
}

template <bool kBias, typename T>
void fold_weighted_row(opmath<T>* max, opmath<T>* sum, opmath<T>* weighted,
                       const T* __restrict logits, const opmath<T>* __restrict bias, int64_t n) {
  using A = opmath<T>;
  constexpr A kInfinity = A(__builtin_inf());
  auto key = ordered(-kInfinity);
  for (int64_t j = 0; j < n; ++j) {
    const auto k = ordered(logit<kBias>(logits, bias, j));
    key = k > key ? k : key;
  }
  const A top = from_ordered(key);
  const A new_max = *max > top ? *max : top;
  const A shift = new_max == -kInfinity ? A(0) : new_max;
  A total = 0, total_weighted = 0;
#pragma omp simd reduction(+ : total, total_weighted)
  for (int64_t j = 0; j < n; ++j) {
    const A difference = logit<kBias>(logits, bias, j) - shift, e = exponential(difference);
    total += e;
    total_weighted += e * bounded(difference);
  }
  const A moved = *max - shift, scale = exponential(moved);
  *weighted = scale * (*weighted + bounded(moved) * *sum) + total_weighted;
  *sum = *sum * scale + total;
  *max = new_max;
}

template <typename T>
void fold_weighted(opmath<T>* max, opmath<T>* sum, opmath<T>* weighted, const T* logits,
                   const opmath<T>* bias, int64_t n) {
  bias == nullptr ? fold_weighted_row<false>(max, sum, weighted, logits, bias, n)
                  : fold_weighted_row<true>(max, sum, weighted, logits, bias, n);
}

template <bool kBias, typename T>
void gradient_of_entropy_row(T* grad, const T* logits, const opmath<T>* __restrict bias,
                             opmath<T> max, opmath<T> constant, opmath<T> slope, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const opmath<T> difference = logit<kBias>(logits, bias, j) - max;
    store(grad + j, exponential(difference) * (constant + slope * bounded(difference)));
  }
}

template <typename T>
void gradient_of_entropy(T* grad, const T* logits, const opmath<T>* bias, opmath<T> max,
                         opmath<T> constant, opmath<T> slope, int64_t n) {
  bias == nullptr ? gradient_of_entropy_row<false>(grad, logits, bias, max, constant, slope, n)
                  : gradient_of_entropy_row<true>(grad, logits, bias, max, constant, slope, n);
}

template <bool kBias, bool kWeight, typename T>
opmath<T> weighted_sum_row(const T* __restrict logits, const opmath<T>* __restrict bias, const opmath<T>* __restrict class_weight, opmath<T> shift, int64_t n) {
  opmath<T> sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) {
    const opmath<T> term = logit<kBias>(logits, bias, j) - shift;
    sum += kWeight ? class_weight[j] * term : term;
  }
  return sum;
}

template <typename T>
opmath<T> weighted_sum(const T* logits, const opmath<T>* bias, const opmath<T>* class_weight, opmath<T> shift, int64_t n) {
  if (bias == nullptr) {
    return class_weight == nullptr ? weighted_sum_row<false, false>(logits, bias, class_weight, shift, n)
                                   : weighted_sum_row<false, true>(logits, bias, class_weight, shift, n);
  }
  return class_weight == nullptr ? weighted_sum_row<true, false>(logits, bias, class_weight, shift, n)
                                 : weighted_sum_row<true, true>(logits, bias, class_weight, shift, n);
}

// grad and logits are the same row or apart, never shifted against each other: no iteration reads what an earlier one wrote.
template <bool kBias, bool kWeight, typename T, typename In>
void gradient_row(T* grad, const In* logits, const opmath<T>* __restrict bias, const opmath<T>* __restrict class_weight, opmath<T> max, opmath<T> scale,
                  opmath<T> smoothing, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const opmath<T> p = exponential(logit<kBias>(logits, bias, j) - max);
    store(grad + j, scale * p - (kWeight ? smoothing * class_weight[j] : smoothing));
  }
}

template <typename T, typename In>
void gradient(T* grad, const In* logits, const opmath<T>* bias, const opmath<T>* class_weight, opmath<T> max, opmath<T> scale, opmath<T> smoothing, int64_t n) {
  if (bias == nullptr) {
    return class_weight == nullptr ? gradient_row<false, false>(grad, logits, bias, class_weight, max, scale, smoothing, n)
                                   : gradient_row<false, true>(grad, logits, bias, class_weight, max, scale, smoothing, n);
  }
  return class_weight == nullptr ? gradient_row<true, false>(grad, logits, bias, class_weight, max, scale, smoothing, n)
                                 : gradient_row<true, true>(grad, logits, bias, class_weight, max, scale, smoothing, n);
}

template <bool kBias, typename T>
int64_t find_above_row(const T* __restrict logits, const opmath<T>* __restrict bias, int64_t from, int64_t n, opmath<T> threshold) {
  // Whether a run of logits has one is a reduction without an exit, which vectorises; hits are rare.
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

template <typename T>
int64_t find_above(const T* logits, const opmath<T>* bias, int64_t from, int64_t n, opmath<T> threshold) {
  return bias == nullptr ? find_above_row<false>(logits, bias, from, n, threshold) : find_above_row<true>(logits, bias, from, n, threshold);
}

template <typename T>
constexpr SoftmaxRows<T> rows() {
  return {fold<T>, fold_weighted<T>, weighted_sum<T>, gradient<T, T>, gradient<T, opmath<T>>, gradient_of_entropy<T>, find_above<T>};
}

} // namespace

extern const SoftmaxRowsTable softmax_rows{rows<float>(), rows<double>(), rows<Bf16>(), rows<F16>()};

} // namespace xsoftmax::XS_ISA
