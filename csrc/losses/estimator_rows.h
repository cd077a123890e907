#pragma once

#include "core/cpu_dispatch.h"
#include "core/philox.h"

#include <cstdint>

namespace xsoftmax {

/// The loops that estimators choose from.
enum class RowLoss { Softmax, Logistic, OneVsEach, BlackOut, Importance, Cane, CaneLogOfMean };

/// Scores, candidates and gradients of a batch for the loop over its queries; see candidate_loss.h for the meaning. Null where absent.
template <typename T>
struct LossRows {
  const T* scores;                 ///< [Q, 1 + P + S]: target, private, shared; may be grad_scores itself
  int64_t stride;                  ///< from a query's scores to the next one's, and of their gradients
  const int64_t* target;           ///< [Q]
  const int64_t* private_ids;      ///< [Q, P]
  const int64_t* shared_ids;       ///< [S]
  const T* private_log_count;      ///< [Q, P]
  const T* shared_log_count;       ///< [S], or [Q, S]: shared_count_stride from query to query
  const T* target_log_count;       ///< [Q]
  int64_t private_width, shared_width, shared_count_stride;
  int64_t distinct_private, distinct_shared;
  bool remove_distinct_hits, remove_drawn_hits; ///< among the fixed columns, and among the others
  bool renormalize, correct_target, weigh;
  bool take_a_draw; ///< a target that is no fixed column takes the place of the first other one
  T label_smoothing;
  T* loss;                         ///< [Q]: wanted where it is there
  T* grad_scores;                  ///< [Q, 1 + P + S]: likewise
  const T* grad_loss;              ///< [Q]: what loss and grad_scores are times; ones where absent

  /// The loss of a query that is ignored. A mean over no query at all is no number: its share is infinite.
  XS_HOST_DEVICE T ignored_loss(int64_t q) const { return grad_loss ? T(0) * grad_loss[q] : T(0); }
  XS_HOST_DEVICE int64_t candidates() const { return private_width + shared_width; }
  /// Whether an estimator wants scores and weights apart, beside their sums.
  XS_HOST_DEVICE bool apart(RowLoss of) const { return of == RowLoss::OneVsEach || label_smoothing != 0; }
  /// Elements of the buffer of whoever works on a row.
  int64_t buffer_size(RowLoss of) const { return (apart(of) ? 3 : 1) * candidates(); }
};

/// A function for each RowLoss, over queries first .. last - 1: loss, gradient of the scores, or both.
template <typename T>
struct EstimatorRows {
  using Function = void (*)(const LossRows<T>& rows, int64_t first, int64_t last, T* buffer);
  Function softmax, logistic, one_vs_each, blackout, importance, cane, cane_log_of_mean;

  Function of(RowLoss loss) const {
    switch (loss) {
      case RowLoss::Softmax: return softmax;
      case RowLoss::Logistic: return logistic;
      case RowLoss::OneVsEach: return one_vs_each;
      case RowLoss::BlackOut: return blackout;
      case RowLoss::Importance: return importance;
      case RowLoss::Cane: return cane;
      case RowLoss::CaneLogOfMean: return cane_log_of_mean;
    }
    return nullptr;
  }
};

struct EstimatorRowTable {
  EstimatorRows<float> f32;
  EstimatorRows<double> f64;
  const EstimatorRows<float>& of(float) const { return f32; }
  const EstimatorRows<double>& of(double) const { return f64; }
};

XS_DECLARE_ISA_TABLE(EstimatorRowTable, estimator_rows)

} // namespace xsoftmax
