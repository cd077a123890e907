#pragma once

// The CANE losses of one row of candidates (see Cane in estimators.cpp), with their gradients.

#include "estimator/estimator_losses.h"

namespace xsoftmax::XS_ISA {
namespace {

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
  const T sum = sum_exponentials(lanes, row, in, max_score, first, grad);
  if (grad != nullptr) {
    if (lanes.is_leader()) {
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
    if (lanes.is_leader()) {
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
  if (grad != nullptr && lanes.is_leader()) {
    *grad_target -= grad_loss;
  }
  return normalizer - row.target;
}

} // namespace
} // namespace xsoftmax::XS_ISA
