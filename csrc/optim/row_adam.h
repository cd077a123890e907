#pragma once

#include "optim/row_update.h"

namespace xsoftmax {

// row_adam_: Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019) on the rows that have a gradient
// (optim/row_update.h). Each row runs Adam on its own steps, with t = ++row_step[row] updates so far:
//
//     param *= exp(decay - last_decay)              where last_decay is given: the decay of the steps since the last update
//     exp_avg += (1 - beta1) (g - exp_avg)
//     exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
//     param -= lr / (1 - beta1^t) exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
//
// A row with a gradient at every step goes the way of torch.optim.AdamW. exp_avg and exp_avg_sq: of param's shape, in opmath dtype;
// row_step int32 [N].
//
// row_decay_: the decay that every row owes, for use before the table is read as a whole. O(N).

void check_row_adam(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& exp_avg,
                    const at::Tensor& exp_avg_sq, const at::Tensor& row_step, const std::optional<at::Tensor>& last_decay);
void check_row_decay(const at::Tensor& param, const at::Tensor& last_decay);

void row_adam_reference(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& exp_avg,
                        const at::Tensor& exp_avg_sq, const at::Tensor& row_step, const std::optional<at::Tensor>& last_decay,
                        double lr, double beta1, double beta2, double eps, double decay);
void row_decay_reference(const at::Tensor& param, const at::Tensor& last_decay, double decay);

} // namespace xsoftmax
