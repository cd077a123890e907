#pragma once

#include "optim/owed_steps.h"
#include "optim/row_update.h"

namespace xsoftmax {

// row_adam_step_, row_adam_state, row_adam_flush_ (optim/row_step.h; options: RowAdamOptions): Adam (Kingma and Ba 2015) with decoupled
// weight decay (Loshchilov and Hutter 2019) on the rows that have a gradient. In dense terms, at step t:
//
//     param *= 1 - lr weight_decay
//     exp_avg = beta1 exp_avg + (1 - beta1) g                          g = 0 for a row without a gradient
//     exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
//     param -= lr / (1 - beta1^t) exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
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
// State for rows: step int64 [], exp_avg and exp_avg_sq of param's shape in opmath dtype, last_step int32 [N] (the step of a row's last gradient,
// after which its moments were left; 0: it had none), owed. Dense: step float32 [], exp_avg, exp_avg_sq, as torch.optim.AdamW's.

void check_row_adam_state(const char* op, const at::Tensor& param, at::TensorList state);
/// row_adam_flush_ by way of the dispatcher.
void flush_row_adam(const at::Tensor& param, at::TensorList state);

/// What a step does to rows with a gradient, and a flush to all.
struct RowAdamUpdate {
  at::Tensor param, exp_avg, exp_avg_sq, last_step;
  const OwedSteps& owed; ///< before this step
  int64_t step;          ///< to which rows are brought: owed.step() + 1; in a flush owed.step()
  double beta1, beta2, eps;
  double lr = 0, decay = 1; ///< of this step: decay = 1 - lr weight_decay
  bool rebase = false;      ///< of a flush: brings the moments up to date as well, for steps under other betas
};

void row_adam_rows_reference(const RowAdamUpdate& update, const at::Tensor& rows, const at::Tensor& values);
void row_adam_rows_cpu(const RowAdamUpdate& update, const at::Tensor& rows, const at::Tensor& values);
void row_adam_flush_reference(const RowAdamUpdate& update);
void row_adam_flush_cpu(const RowAdamUpdate& update);

} // namespace xsoftmax
