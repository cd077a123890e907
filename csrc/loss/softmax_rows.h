#pragma once

#include "cpu/cpu_dispatch.h"
#include "cpu/simd.h"

#include <cstdint>

namespace xsoftmax {

/// Lower bound of logit - max in the entropy, because for -inf the product e^x * x would be NaN.
template <typename A>
inline constexpr A kMinDifference = A(-1e30);

/// The transform of scores into logits: cap tanh(scale score / cap), or scale score if cap is 0.
template <typename A>
struct RowTransform {
  A scale, cap;
};

/// Loops over the logits of one query, for the exact losses. A: float or double. If `bias` [n] is
/// not null, it is added to the logits on the fly, which saves a separate pass.
template <typename A>
struct SoftmaxRows {
  /// Folds n logits into the running (max, sum of e^(logit - max)), which starts as (-inf, 0).
  /// Returns the largest of the n logits. A NaN or +inf makes the sum NaN; logits of -inf add 0.
  A (*fold)(A* max, A* sum, const A* logits, const A* bias, int64_t n);
  /// Like fold, and also updates `weighted`, the sum of e^(logit - max) (logit - max), which starts
  /// as 0.
  void (*fold_weighted)(A* max, A* sum, A* weighted, const A* logits, const A* bias, int64_t n);
  /// Returns sum_j class_weight[j] (logit[j] - shift). class_weight may be null (ones).
  A (*weighted_sum)(const A* logits, const A* bias, const A* class_weight, A shift, int64_t n);
  /// Writes grad[j] = scale e^(logit[j] - max) - smoothing class_weight[j]. No logit may exceed
  /// max. class_weight may be null (ones), and grad may be logits. `scale` must include the
  /// division by the softmax sum: subtracting its log in the exponent would lose precision.
  void (*gradient)(A* grad, const A* logits, const A* bias, const A* class_weight, A max, A scale,
                   A smoothing, int64_t n);
  /// Writes grad[j] = e^(logit[j] - max) (constant + slope (logit[j] - max)). No logit may exceed
  /// max; grad may be logits.
  void (*gradient_of_entropy)(A* grad, const A* logits, const A* bias, A max, A constant, A slope,
                              int64_t n);
  /// Turns scores into logits, in place. bias [n] is added to the scores first if it is not null.
  void (*transform)(A* scores, const A* bias, RowTransform<A> transform, int64_t n);
  /// Like `gradient`, but with respect to the scores: multiplies by the derivative of each logit.
  void (*transformed_gradient)(A* grad, const A* logits, const A* class_weight, A max, A scale,
                               A smoothing, int64_t n, RowTransform<A> transform);
  /// Returns the first j >= from with logit[j] > threshold, or n.
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
