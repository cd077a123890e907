#pragma once

#include "core/cpu_dispatch.h"
#include "core/simd.h"

#include <cstdint>

namespace xsoftmax {

/// How scores become logits: cap tanh(scale score / cap), or scale score where cap is 0.
template <typename A>
struct RowTransform {
  A scale, cap;
};

/// The loops over a row of logits of one query behind the exact losses. T is the dtype of the products that made the logits;
/// `bias` [n], where not null, is added to them on the fly, so that no pass over the logits does only that. Sums are in opmath<T>.
template <typename T>
struct SoftmaxRows {
  /// Folds n logits into a running (max, sum of e^(logit - max)), which starts as (-inf, 0), and returns the largest of them.
  /// A NaN or +inf leaves a sum of NaN; logits of -inf add 0.
  opmath<T> (*fold)(opmath<T>* max, opmath<T>* sum, const T* logits, const opmath<T>* bias, int64_t n);
  /// fold, and with weighted, which starts as 0, the sum of e^(logit - max) (logit - max).
  void (*fold_weighted)(opmath<T>* max, opmath<T>* sum, opmath<T>* weighted, const T* logits, const opmath<T>* bias, int64_t n);
  /// sum_j class_weight[j] (logit[j] - shift); class_weight may be null: ones
  opmath<T> (*weighted_sum)(const T* logits, const opmath<T>* bias, const opmath<T>* class_weight, opmath<T> shift, int64_t n);
  /// grad[j] = scale e^(logit[j] - max) - smoothing class_weight[j]; no logit is above max; class_weight may be null: ones. grad may
  /// be logits. The sum of the softmax belongs into scale: a second difference in the exponent would cost digits.
  void (*gradient)(T* grad, const T* logits, const opmath<T>* bias, const opmath<T>* class_weight, opmath<T> max, opmath<T> scale, opmath<T> smoothing,
                   int64_t n);
  /// The same from logits that were widened when they were saved.
  void (*gradient_of_saved)(T* grad, const opmath<T>* logits, const opmath<T>* bias, const opmath<T>* class_weight, opmath<T> max, opmath<T> scale,
                            opmath<T> smoothing, int64_t n);
  /// grad[j] = e^(logit[j] - max) (constant + slope (logit[j] - max)); no logit is above max. grad may
  /// be logits.
  void (*gradient_of_entropy)(T* grad, const T* logits, const opmath<T>* bias, opmath<T> max, opmath<T> constant, opmath<T> slope, int64_t n);
  /// Turns scores into logits, in place; bias [n], where not null, is added to the scores first.
  void (*transform)(T* scores, const opmath<T>* bias, RowTransform<opmath<T>> transform, int64_t n);
  /// `gradient` and `gradient_of_saved` for the scores behind transformed logits: times the derivative of each logit.
  void (*transformed_gradient)(T* grad, const T* logits, const opmath<T>* class_weight, opmath<T> max, opmath<T> scale, opmath<T> smoothing, int64_t n,
                               RowTransform<opmath<T>> transform);
  void (*transformed_gradient_of_saved)(T* grad, const opmath<T>* logits, const opmath<T>* class_weight, opmath<T> max, opmath<T> scale, opmath<T> smoothing,
                                        int64_t n, RowTransform<opmath<T>> transform);
  /// The first j >= from with logit[j] > threshold, or n.
  int64_t (*find_above)(const T* logits, const opmath<T>* bias, int64_t from, int64_t n, opmath<T> threshold);
};

struct SoftmaxRowsTable {
  SoftmaxRows<float> f32;
  SoftmaxRows<double> f64;
  SoftmaxRows<Bf16> bf16;
  SoftmaxRows<F16> f16;

  const SoftmaxRows<float>& of(const float*) const { return f32; }
  const SoftmaxRows<double>& of(const double*) const { return f64; }
  const SoftmaxRows<Bf16>& of(const Bf16*) const { return bf16; }
  const SoftmaxRows<F16>& of(const F16*) const { return f16; }
};

XS_DECLARE_ISA_TABLE(SoftmaxRowsTable, softmax_rows)

} // namespace xsoftmax
