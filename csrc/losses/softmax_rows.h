#pragma once

#include "core/cpu_dispatch.h"
#include "core/simd.h"

#include <cstdint>

namespace xsoftmax {

/// The least difference of a logit to the largest one in the entropy: e^x times a lower one would be
/// 0 times infinity, which is no number.
template <typename A>
inline constexpr A kLeastDifference = A(-1e30);

/// How scores become logits: cap tanh(scale score / cap), or scale score where cap is 0.
template <typename A>
struct RowTransform {
  A scale, cap;
};

/// The loops over a row of logits of one query behind the exact losses, in A, float or double. `bias` [n], where not null, is
/// added to the logits on the fly, so that no pass over them does only that.
template <typename A>
struct SoftmaxRows {
  /// Folds n logits into a running (max, sum of e^(logit - max)), which starts as (-inf, 0), and returns the largest of them.
  /// A NaN or +inf leaves a sum of NaN; logits of -inf add 0.
  A (*fold)(A* max, A* sum, const A* logits, const A* bias, int64_t n);
  /// fold, and with weighted, which starts as 0, the sum of e^(logit - max) (logit - max).
  void (*fold_weighted)(A* max, A* sum, A* weighted, const A* logits, const A* bias, int64_t n);
  /// sum_j class_weight[j] (logit[j] - shift); class_weight may be null: ones
  A (*weighted_sum)(const A* logits, const A* bias, const A* class_weight, A shift, int64_t n);
  /// grad[j] = scale e^(logit[j] - max) - smoothing class_weight[j]; no logit is above max; class_weight may be null: ones. grad may
  /// be logits. The sum of the softmax belongs into scale: a second difference in the exponent would cost digits.
  void (*gradient)(A* grad, const A* logits, const A* bias, const A* class_weight, A max, A scale, A smoothing, int64_t n);
  /// grad[j] = e^(logit[j] - max) (constant + slope (logit[j] - max)); no logit is above max. grad may
  /// be logits.
  void (*gradient_of_entropy)(A* grad, const A* logits, const A* bias, A max, A constant, A slope, int64_t n);
  /// Turns scores into logits, in place; bias [n], where not null, is added to the scores first.
  void (*transform)(A* scores, const A* bias, RowTransform<A> transform, int64_t n);
  /// `gradient` for the scores behind transformed logits: times the derivative of each logit.
  void (*transformed_gradient)(A* grad, const A* logits, const A* class_weight, A max, A scale, A smoothing, int64_t n, RowTransform<A> transform);
  /// The first j >= from with logit[j] > threshold, or n.
  int64_t (*find_above)(const A* logits, const A* bias, int64_t from, int64_t n, A threshold);
};

struct SoftmaxRowsTable {
  SoftmaxRows<float> f32;
  SoftmaxRows<double> f64;

  const SoftmaxRows<float>& of(const float*) const { return f32; }
  const SoftmaxRows<double>& of(const double*) const { return f64; }
};

XS_DECLARE_ISA_TABLE(SoftmaxRowsTable, softmax_rows)

} // namespace xsoftmax
