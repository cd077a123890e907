#pragma once

#include "optim/row_update.h"

namespace xsoftmax {

// row_adagrad_: Adagrad (Duchi, Hazan and Singer 2011) on the rows that have a gradient (optim/row_update.h), as
// torch.optim.Adagrad:
//
//     g += weight_decay param
//     sum += g^2                     sum of param's shape; or, one number a row: sum [N] += mean(g^2)
//     param -= lr g / (sqrt(sum) + eps)
//
// `sum` is in opmath dtype. Its shape says which form is meant ([N] parameters have one). lr is that of the step: a decay of it
// over the steps, lr / (1 + (t - 1) lr_decay), is the caller's. Weight decay acts in the steps in which a row has a gradient.

void check_row_adagrad(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& sum);

void row_adagrad_reference(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& sum,
                           double lr, double weight_decay, double eps);

} // namespace xsoftmax
