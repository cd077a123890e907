#pragma once

// The losses of one row of candidates, with their gradients (candidate_row.h explains lanes).

#include "estimator/candidate_row.h"

namespace xsoftmax::XS_ISA {
namespace {

template <typename Lanes, typename T>
XS_ROW T largest(const Lanes& lanes, const T* __restrict x, int64_t n, T start) {
  auto key = ordered(start);
  for (int64_t j = lanes.first(0); j < n; j += Lanes::kStep) {
    const auto k = ordered(x[j]);
    key = k > key ? k : key;
  }
  return from_ordered(lanes.largest(key));
}

// Adds e^(adjusted - max_score) of the columns in the ranges to `start`, and writes these terms to
// grad if it is not null.
template <typename Lanes, typename T>
XS_ROW T sum_exponentials(const Lanes& lanes, const Row<T>& row, const Ranges& in, T max_score,
                          T start, T* __restrict grad) {
  T sum = lanes.once(start);
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
  return lanes.sum(sum);
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
    if (lanes.is_leader()) {
      *grad_target -= scale / total;
    }
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      grad[j] -= scale / total * exponential(row.log_weight[j]);
    }
  }
};

// Returns the loss to every lane. Writes the gradient times grad_loss if grad is not null. The same
// contract holds for all functions *_row.
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
    if (lanes.is_leader()) {
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
  T loss = softplus_sum(SingleLane{}, &opposite, 1, &slope);
  loss += softplus_sum(lanes, row.adjusted, row.width, grad);
  if (grad != nullptr) {
    if (lanes.is_leader()) {
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
    if (lanes.is_leader()) {
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
  const T best_probability = exists ? 1 / sum : T(0);
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
    if (lanes.is_leader()) {
      *grad_target =
          grad_loss * (target_term * (scale * left / sum - best_probability / others) - 1);
    }
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      const T share = exponential(adjusted[j] - second), value = scale * share;
      const T other_grad =
          value * left / sum + value / (sum - value) - best_probability * share / others;
      grad[j] = grad_loss * (j == best ? best_probability * (left + 1) : other_grad);
    }
  }
  return lanes.sum(loss);
}

template <typename Lanes, typename T>
XS_ROW T importance_row(const Lanes& lanes, const Row<T>& row, T, T grad_loss, T* grad_target,
                        T* __restrict grad) {
  const T max_score = largest(lanes, row.adjusted, row.width, -kInfinity<T>);
  const bool empty = max_score == -kInfinity<T>; // no candidate counts, and the loss is 0
  const T sum = empty
      ? T(1)
      : sum_exponentials(lanes, row, Ranges{{0, 0}, {row.width, 0}}, max_score, T(0), grad);
  if (grad != nullptr) {
    if (lanes.is_leader()) {
      *grad_target = empty ? T(0) : -grad_loss;
    }
    const T scale = grad_loss / sum;
    for (int64_t j = lanes.first(0); j < row.width; j += Lanes::kStep) {
      grad[j] = empty ? T(0) : grad[j] * scale;
    }
  }
  return empty ? T(0) : max_score + logarithm(sum) - row.target;
}

} // namespace
} // namespace xsoftmax::XS_ISA
