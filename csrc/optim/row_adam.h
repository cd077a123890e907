#pragma once

#include "optim/owed_steps.h"
#include "optim/row_update.h"
#include "optim/row_updates.h"
#include "scores/row_terms.h"

#include <cmath>
#include <functional>
#include <string_view>

namespace xsoftmax {

// row_adam_step_, row_adam_state, row_adam_flush_ (optim/row_step.h; options: RowAdamOptions): Adam (Kingma and Ba 2015) with decoupled
// weight decay (Loshchilov and Hutter 2019) on the rows that have a gradient. In dense terms, at step t:
//
//     param *= 1 - lr weight_decay
//     exp_avg = beta1 exp_avg + (1 - beta1) g                          g = 0 for a row without a gradient
//     exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
//     param -= lr / (1 - beta1^t) exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
//
// maximize: the same with -g in the place of g.
//
// row_wise (partial row-wise Adam, as FBGEMM has it): one second moment a row, exp_avg_sq [N] = beta2 exp_avg_sq + (1 - beta2) mean(g^2).
//
// A row without a gradient owes its steps (optim/owed_steps.h). With m, v its moments after step s, its movement in step i > s is
//
//     lr_i sqrt(1 - beta2^i) / (1 - beta1^i)  r^(i-s)  m / (sqrt(v) + eps sqrt(1 - beta2^s)),      r = beta1 / sqrt(beta2) < 1,
//
// exactly but for eps, which dense Adam weighs against a root that shrinks: its divisor has eps sqrt(1 - beta2^i) beta2^(-(i-s)/2) in the
// place of eps sqrt(1 - beta2^s). So a movement that is owed is larger than the dense one by the factor 1 + eps / root_i at most, root_i being
// sqrt(exp_avg_sq / (1 - beta2^i)) in that step. Where lr, weight decay or the parameter groups change, rows owe each step at its rate.
// Where beta1, beta2 or eps change, all rows and their moments are brought up to date first.
//
// stochastic_rounding: rows of 16-bit tables, in steps of rows and in what a flush makes up (optim/random_rounding.h). Moments in bfloat16 always round so: to
// nearest, a second moment of beta2 = .999 would not see a gradient that changes it by less than a 256th.
//
// State for rows, in this order:
//
//     step         int64 []
//     exp_avg      of param's shape, in opmath dtype or bfloat16 (state_dtype)
//     exp_avg_sq   likewise; row_wise: [N] in opmath dtype
//     last_step    int32 [N], the step of a row's last gradient, since when its moments stay as they are; 0: it had none
//     owed         optim/owed_steps.h
//
// Dense state: step float32 [], exp_avg, exp_avg_sq, as torch.optim.AdamW's.

/// Whether a row has one second moment. Of a [N] table it may be either.
inline bool one_second_moment(const at::Tensor& param, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq) {
  return exp_avg_sq.dim() < param.dim() || exp_avg_sq.scalar_type() != exp_avg.scalar_type();
}

void check_row_adam_state(const char* op, const at::Tensor& param, at::TensorList state);
/// row_adam_flush_ by way of the dispatcher.
void flush_row_adam(const at::Tensor& param, at::TensorList state);

/// What CUDA kernels ask of this file: the checks, the options as numbers, and the composites.
struct RowAdamNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  bool stochastic_rounding, maximize = false;
};
RowAdamNumbers check_row_adam_rows(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, std::string_view options,
                                   const OptionalTensor& lr);
void row_adam_rows_composite(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, std::string_view options,
                             const OptionalTensor& lr);
/// row_adam_terms_ around a kernel, which takes the step.
void row_adam_terms(const at::Tensor& param, at::TensorList state, const RowTerms& terms, std::string_view options, const OptionalTensor& lr,
                    const std::function<void()>& take_step);
/// Whether the state is of rows.
bool check_row_adam_flush(const at::Tensor& param, at::TensorList state);
void row_adam_flush_composite(const at::Tensor& param, at::TensorList state);

/// r of optim/owed_steps.h.
XS_HOST_DEVICE inline double row_adam_ratio(double beta1, double beta2) { return beta1 == 0 ? 0.0 : beta1 / std::sqrt(beta2); }
/// Of the step whose betas have come to these powers.
XS_HOST_DEVICE inline double row_adam_step_size(double lr, double beta1_power) { return lr / (1 - beta1_power); }
XS_HOST_DEVICE inline double row_adam_scale(double beta2_power) { return 1 / std::sqrt(1 - beta2_power); }
/// What rows move by in that step that owe it.
XS_HOST_DEVICE inline double row_adam_owed_rate(double lr, double beta1_power, double beta2_power) {
  return lr * std::sqrt(1 - beta2_power) / (1 - beta1_power);
}

/// Of a row whose last gradient was in step s: kept1, kept2 are the betas to the power of the steps since (0 of them where moments stay as they
/// are), before is beta2^s. `decay` of the step.
template <typename M>
XS_HOST_DEVICE AdamStep<M> row_adam_coefficients(const RowAdamNumbers& n, const OwedDebt& debt, double decay, double step_size, double scale, double kept1,
                                                 double kept2, double before) {
  return {M(debt.decay * decay),           M(step_size), M(scale), M(kept1), M(1 - n.beta1), M(kept2), M(1 - n.beta2), M(n.eps), M(debt.movement * decay),
          M(n.eps * std::sqrt(1 - before))};
}

/// What a step does to rows with a gradient, and a flush to all.
struct RowAdamUpdate {
  at::Tensor param, exp_avg, exp_avg_sq, last_step;
  const OwedSteps& owed; ///< before this step
  int64_t step;          ///< to which rows are brought: owed.step() + 1; in a flush owed.step()
  double beta1, beta2, eps;
  double lr = 0, decay = 1; ///< of this step: decay = 1 - lr weight_decay
  bool stochastic_rounding = false;
  bool rebase = false;      ///< of a flush: brings the moments up to date as well, for steps under other betas
};

void row_adam_rows_reference(const RowAdamUpdate& update, const at::Tensor& rows, const at::Tensor& values);
void row_adam_rows_cpu(const RowAdamUpdate& update, const at::Tensor& rows, const at::Tensor& values);
void row_adam_flush_reference(const RowAdamUpdate& update);
void row_adam_flush_cpu(const RowAdamUpdate& update);

} // namespace xsoftmax
