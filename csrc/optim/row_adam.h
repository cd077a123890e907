#pragma once

#include "optim/row_update.h"

#include <vector>

namespace xsoftmax {

// row_adam_: Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019) on the rows that have a gradient
// (optim/row_update.h). In a step without a gradient, dense Adam decays a row's moments and moves it by what they remember:
//
//     exp_avg = beta1 exp_avg + (1 - beta1) g                          g = 0 in such a step
//     exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
//     param -= lr / (1 - beta1^t) exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
//
// That is owed and made up, with the current lr, when the row is next touched or by row_adam_flush_. last_step int32 [N] holds the step
// up to which a row is made up (0: it never had a gradient), `step` the number of this step, from 1. The n steps after step s owe, with
// r = beta1 / sqrt(beta2) < 1 and m, v the moments after step s,
//
//     lr owed(s, n) m / (sqrt(v) + eps sqrt(1 - beta2^s)),     owed(s, n) = sum_{i=1..n} r^i sqrt(1 - beta2^{s+i}) / (1 - beta1^{s+i})
//
// exactly but for eps, which dense Adam weighs against a root that shrinks. So after row_adam_flush_ every row is where dense AdamW would
// have it, provided that gradients did not depend on parameters and lr was constant. Weight decay, where last_decay is given, is owed
// as well: param *= exp(decay - last_decay), of every step under the lr of that step.
//
// exp_avg and exp_avg_sq: of param's shape, in opmath dtype.
//
// row_adam_flush_: makes up what every row owes after `step` steps. O(N). row_decay_: the same for weight decay alone.

void check_row_adam(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& exp_avg,
                    const at::Tensor& exp_avg_sq, const at::Tensor& last_step, const std::optional<at::Tensor>& last_decay, double beta1,
                    double beta2);
void check_row_adam_flush(const at::Tensor& param, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& last_step,
                          const std::optional<at::Tensor>& last_decay, double beta1, double beta2);
void check_row_decay(const at::Tensor& param, const at::Tensor& last_decay);

/// owed(s, n) above, for rows that are made up to step `now`: n = now - s.
class AdamMovementOwed {
 public:
  AdamMovementOwed(int64_t now, double beta1, double beta2);

  double operator()(int64_t s) const;
  /// The same, float64 on s's device.
  at::Tensor operator()(const at::Tensor& s) const;

 private:
  double correction(double step) const; // sqrt(1 - beta2^step) / (1 - beta1^step)

  int64_t now_;
  double beta1_, beta2_, r_;
  std::vector<double> early_; // by s, while the corrections change fast; past that they are linear over the sum
};

void row_adam_reference(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& exp_avg,
                        const at::Tensor& exp_avg_sq, const at::Tensor& last_step, const std::optional<at::Tensor>& last_decay,
                        int64_t step, double lr, double beta1, double beta2, double eps, double decay);
void row_adam_flush_reference(const at::Tensor& param, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                              const at::Tensor& last_step, const std::optional<at::Tensor>& last_decay, int64_t step, double lr,
                              double beta1, double beta2, double eps, double decay);
void row_decay_reference(const at::Tensor& param, const at::Tensor& last_decay, double decay);

} // namespace xsoftmax
