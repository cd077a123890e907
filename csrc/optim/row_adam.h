#pragma once

#include "table/updates/pending_steps.h"
#include "optim/row_update.h"
#include "optim/row_updates.h"
#include "table/row_terms.h"

#include <cmath>
#include <functional>
#include <string_view>

namespace xsoftmax {

// row_adam_step_, row_adam_state, row_adam_flush_ (optim/row_step.h; options: RowAdamOptions): Adam
// (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019) on the rows that
// have a gradient. Equivalent dense update at step t (g = 0 for a row without a gradient):
//
//     param *= 1 - lr weight_decay
//     exp_avg = beta1 exp_avg + (1 - beta1) g
//     exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
//     param -= lr / (1 - beta1^t) exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
//
// maximize: the same with -g instead of g.
//
// row_wise (partial row-wise Adam, as in FBGEMM): one second moment per row, exp_avg_sq [N] = beta2
// exp_avg_sq + (1 - beta2) mean(g^2).
//
// A row without a gradient gets a pending update (table/updates/pending_steps.h). With m, v its
// moments after step s, its movement in step i > s is
//
//     lr_i sqrt(1 - beta2^i) / (1 - beta1^i)  r^(i-s)  m / (sqrt(v) + eps sqrt(1 - beta2^s)),
//     r = beta1 / sqrt(beta2) < 1.
//
// This is exact except for eps: dense Adam adds it to a root that shrinks, so its divisor has eps
// sqrt(1 - beta2^i) beta2^(-(i-s)/2) instead of eps sqrt(1 - beta2^s). A pending movement is
// therefore larger than the dense one by a factor of at most 1 + eps / root_i, where root_i is
// sqrt(exp_avg_sq / (1 - beta2^i)) in that step. If lr or weight decay change or parameters change
// groups, each pending step keeps the values it was taken with. If beta1, beta2 or eps change, all
// rows and their moments catch up first.
//
// stochastic_rounding: applies to rows of 16-bit tables, in row steps and in flushes
// (optim/random_rounding.h). Moments in bfloat16 always use it: if they were rounded to nearest, a
// second moment with beta2 = .999 would lose every gradient that changes it by less than 1/256.
//
// Row state, in this order:
//
//     step         int64 []
//     exp_avg      param's shape, in opmath dtype or bfloat16 (state_dtype)
//     exp_avg_sq   the same; row_wise: [N] in opmath dtype
//     last_step    int32 [N], the step of a row's last gradient (0: none yet). The row's moments
//                  are those after that step
//     pending      table/updates/pending_steps.h
//
// Dense state: step float32 [], exp_avg, exp_avg_sq, as in torch.optim.AdamW.

/// Returns whether each row has a single second moment. For a [N] table both forms are possible.
inline bool one_second_moment(const at::Tensor& param, const at::Tensor& exp_avg,
                              const at::Tensor& exp_avg_sq) {
  return exp_avg_sq.dim() < param.dim() || exp_avg_sq.scalar_type() != exp_avg.scalar_type();
}

void check_row_adam_state(const char* op, const at::Tensor& param, at::TensorList state);
/// Calls row_adam_flush_ through the dispatcher.
void flush_row_adam(const at::Tensor& param, at::TensorList state);

/// The tensors of the state, in this order.
struct AdamState {
  enum { kCount, kExpAvg, kExpAvgSq, kLastStep, kPending };
};

/// Interface for the CUDA kernels: argument checks, options as numbers, and the composites.
struct RowAdamNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  bool stochastic_rounding, maximize = false;
};
RowAdamNumbers check_row_adam_rows(const at::Tensor& param, at::TensorList state,
                                   const at::Tensor& rows, const at::Tensor& values,
                                   std::string_view options, const OptionalTensor& lr);
void row_adam_rows_composite(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                             const at::Tensor& values, std::string_view options,
                             const OptionalTensor& lr);
/// Implements row_adam_terms_ around a kernel; take_step() launches it.
void row_adam_terms(const at::Tensor& param, at::TensorList state, const RowTerms& terms,
                    std::string_view options, const OptionalTensor& lr,
                    const std::function<void(const RowAdamNumbers&)>& take_step);
/// Checks the arguments of a flush. Returns whether the state is row state.
bool check_row_adam_flush(const at::Tensor& param, at::TensorList state);
void row_adam_flush_composite(const at::Tensor& param, at::TensorList state);

/// Returns r of table/updates/pending_steps.h.
XS_HOST_DEVICE inline double row_adam_ratio(double beta1, double beta2) {
  return beta1 == 0 ? 0.0 : beta1 / std::sqrt(beta2);
}
/// Returns AdamStep::step_size for a step t, given beta1^t.
XS_HOST_DEVICE inline double row_adam_step_size(double lr, double beta1_power) {
  return lr / (1 - beta1_power);
}
XS_HOST_DEVICE inline double row_adam_scale(double beta2_power) {
  return 1 / std::sqrt(1 - beta2_power);
}
/// Returns the movement per unit of direction in a step that becomes a pending update.
XS_HOST_DEVICE inline double row_adam_pending_rate(double lr, double beta1_power,
                                                   double beta2_power) {
  return lr * std::sqrt(1 - beta2_power) / (1 - beta1_power);
}

/// Returns the coefficients of a row whose last gradient was in step s. first_factor and
/// second_factor are beta1 and beta2 to the power of the number of steps since (exponent 0 if the
/// moments stay unchanged); before is beta2^s; `decay` is that of the current step.
template <typename M>
XS_HOST_DEVICE AdamStep<M> row_adam_coefficients(const RowAdamNumbers& n,
                                                 const PendingEntry& pending, double decay,
                                                 double step_size, double scale,
                                                 double first_factor, double second_factor,
                                                 double before) {
  return {M(pending.decay * decay),
          M(step_size),
          M(scale),
          M(first_factor),
          M(1 - n.beta1),
          M(second_factor),
          M(1 - n.beta2),
          M(n.eps),
          M(pending.movement * decay),
          M(n.eps * std::sqrt(1 - before))};
}

/// Arguments of a step, which updates rows with a gradient, and of a flush, which updates all rows.
struct RowAdamUpdate {
  at::Tensor param, exp_avg, exp_avg_sq, last_step;
  const PendingSteps& pending; ///< before this step
  int64_t step; ///< the step after the update: pending.step() + 1; in a flush pending.step()
  double beta1, beta2, eps;
  double lr = 0, decay = 1; ///< of this step: decay = 1 - lr weight_decay
  bool stochastic_rounding = false;
  /// In a flush: also brings the moments up to date, before steps with other betas.
  bool rebase = false;
};

void row_adam_rows_reference(const RowAdamUpdate& update, const at::Tensor& rows,
                             const at::Tensor& values);
void row_adam_rows_cpu(const RowAdamUpdate& update, const at::Tensor& rows,
                       const at::Tensor& values);
void row_adam_flush_reference(const RowAdamUpdate& update);
void row_adam_flush_cpu(const RowAdamUpdate& update);

} // namespace xsoftmax
