#pragma once

// The loss of one query and the gradient of its scores, for the estimator that a kernel runs: for
// host and CUDA code (candidate_row.h).

#include "estimator/cane_losses.h"
#include "estimator/estimator_losses.h"

namespace xsoftmax::XS_ISA {
namespace {

// Returns the loss that kLoss names, under the contract of the functions *_row.
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
    if (rows.loss && lanes.is_leader()) {
      rows.loss[q] = 0;
    }
    return;
  }
  const Row<T> row = prepare(lanes, rows, q, buffer, rows.keeps_scores(kLoss));
  const T loss =
      row_loss<kLoss>(lanes, row, rows.label_smoothing, grad_loss, grad, grad ? grad + 1 : nullptr);
  if (rows.loss && lanes.is_leader()) {
    rows.loss[q] = grad_loss * loss;
  }
}

} // namespace
} // namespace xsoftmax::XS_ISA
