#pragma once

#include "random/philox.h"
#include "optim/row_update.h"
#include "table/row_terms.h"

#include <functional>
#include <string_view>

namespace xsoftmax {

// row_adagrad_step_, row_adagrad_state, row_adagrad_flush_ (optim/row_step.h; options:
// RowAdagradOptions): Adagrad (Duchi, Hazan and Singer 2011) on the rows that have a gradient. Step
// t, as in torch.optim.Adagrad:
//
//     g += weight_decay param
//     sum += g^2                                     row_wise: sum [N] += mean(g^2), one per row
//     param -= lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps)
//
// maximize: the same with -g instead of the gradient g. Weight decay is applied to a row only in
// steps in which it has a gradient. There are no pending updates.
//
// stochastic_rounding: applies to rows of 16-bit tables, in row steps (optim/random_rounding.h). A
// sum in bfloat16 always uses it: rounded to nearest, it would stop growing at 256 times what a
// step adds.
//
// Row state: step int64 [], sum in param's shape in opmath dtype or bfloat16 (state_dtype), or [N]
// in opmath dtype. Dense state: step float32 [], sum.

/// The tensors of the state, in this order.
struct AdagradState {
  enum { kCount, kSum };
};

/// Interface for the CUDA kernels: argument checks, options as numbers, and the composite.
struct RowAdagradNumbers {
  double lr, lr_decay, weight_decay, eps;
  bool stochastic_rounding, maximize = false;
};
RowAdagradNumbers check_row_adagrad_rows(const at::Tensor& param, at::TensorList state,
                                         const at::Tensor& rows, const at::Tensor& values,
                                         std::string_view options, const OptionalTensor& lr);
void row_adagrad_rows_composite(const at::Tensor& param, at::TensorList state,
                                const at::Tensor& rows, const at::Tensor& values,
                                std::string_view options, const OptionalTensor& lr);
/// Implements row_adagrad_terms_ around a kernel; take_step() launches it.
void row_adagrad_terms(const at::Tensor& param, at::TensorList state, const RowTerms& terms,
                       std::string_view options, const OptionalTensor& lr,
                       const std::function<void(const RowAdagradNumbers&)>& take_step);

/// Returns the learning rate of step t.
XS_HOST_DEVICE inline double row_adagrad_rate(double lr, double lr_decay, int64_t t) {
  return lr / (1 + double(t - 1) * lr_decay);
}

struct RowAdagradUpdate {
  at::Tensor param, sum;
  double lr; ///< of this step
  double weight_decay, eps;
  bool stochastic_rounding;
  int64_t step; ///< this step
};

void row_adagrad_rows_reference(const RowAdagradUpdate& update, const at::Tensor& rows,
                                const at::Tensor& values);
void row_adagrad_rows_cpu(const RowAdagradUpdate& update, const at::Tensor& rows,
                          const at::Tensor& values);

} // namespace xsoftmax
