#pragma once

#include "cpu/cpu_dispatch.h"
#include "random/philox.h"

#include <cstdint>

namespace xsoftmax {

/// The loops over the candidates of a query that estimators choose from.
enum class RowLoss { Softmax, Logistic, OneVsEach, BlackOut, Importance, Cane, CaneLogOfMean };

/// Pointers to the scores, candidates and gradients of a batch, for the loop over its queries. Null
/// if absent. candidate_loss.h defines the meaning.
template <typename T>
struct LossRows {
  const T* scores; ///< [Q, 1 + P + S]: target, private, shared; may be grad_scores itself
  int64_t stride; ///< row stride of scores and of grad_scores, in elements
  const int64_t* target; ///< [Q]
  const int64_t* private_ids; ///< [Q, P]
  const int64_t* shared_ids; ///< [S]
  const T* private_log_count; ///< [Q, P]
  const T* shared_log_count; ///< [S], or [Q, S] with row stride shared_count_stride
  const T* target_log_count; ///< [Q]
  int64_t private_width, shared_width, shared_count_stride;
  int64_t distinct_private, distinct_shared;
  bool remove_distinct_hits, remove_drawn_hits; ///< whether to drop hits in distinct, drawn columns
  bool renormalize, correct_target, weigh;
  bool replace_a_sample; ///< a target outside the distinct columns replaces the first drawn column
  T label_smoothing;
  T* loss; ///< [Q] output; not computed if null
  T* grad_scores; ///< [Q, 1 + P + S] output; not computed if null
  const T* grad_loss; ///< [Q] factor of loss and grad_scores; 1 if null

  /// Returns the loss of an ignored query: 0, or NaN if all queries are ignored, because their
  /// weight in the mean is then infinite.
  XS_HOST_DEVICE T ignored_loss(int64_t q) const { return grad_loss ? T(0) * grad_loss[q] : T(0); }
  XS_HOST_DEVICE int64_t candidates() const { return private_width + shared_width; }
  /// Whether the loop needs scores and log weights separately, in addition to their sum.
  XS_HOST_DEVICE bool keeps_scores(RowLoss row_loss) const {
    return row_loss == RowLoss::OneVsEach || label_smoothing != 0;
  }
  /// Returns the number of elements of the buffer that one row needs.
  int64_t buffer_size(RowLoss row_loss) const {
    return (keeps_scores(row_loss) ? 3 : 1) * candidates();
  }
};

/// One function per RowLoss. Each computes the loss, the gradient of the scores, or both, for
/// queries [first, last).
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
