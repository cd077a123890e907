#pragma once

#include "optim/owed_steps.h"
#include "optim/row_update.h"
#include "optim/row_updates.h"
#include "scores/row_terms.h"

#include <functional>
#include <string_view>

namespace xsoftmax {

// row_sgd_step_, row_sgd_state, row_sgd_flush_ (optim/row_step.h; options: RowSGDOptions): stochastic gradient descent on the rows that have
// a gradient. In dense terms, at step t:
//
//     param *= 1 - lr weight_decay
//     buffer = momentum buffer + (1 - dampening) g                     no dampening at a parameter's first step
//     param -= lr (nesterov ? g + momentum buffer : buffer)
//
// Without momentum: param -= lr g. maximize: g is negated. A row without a gradient owes its steps (optim/owed_steps.h): with the buffer b
// after step s, its movement in step i > s is lr_i momentum^(i-s) b (times momentum once more with nesterov). Where momentum or nesterov
// change, all rows and their buffers are brought up to date first. Weight decay is decoupled; for dense gradients it is a term of the gradient, as in
// torch.optim.SGD.
//
// State for rows: step int64 [], momentum_buffer of param's shape in opmath dtype or bfloat16 ([0] without momentum; a momentum that is set later
// makes it), last_step int32 [N] (the step of a row's last gradient, after which its buffer was left; 0: it had none), owed. Dense: step float32 [],
// momentum_buffer.

void check_row_sgd_state(const char* op, const at::Tensor& param, at::TensorList state);
/// row_sgd_flush_ by way of the dispatcher.
void flush_row_sgd(const at::Tensor& param, at::TensorList state);

/// What CUDA kernels ask of this file: the checks, the options as numbers, the buffer of a first step with a momentum (true: it was not there),
/// and the composites.
struct RowSGDNumbers {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, maximize, stochastic_rounding;
};
RowSGDNumbers check_row_sgd_rows(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, std::string_view options,
                                 const OptionalTensor& lr);
bool make_row_sgd_buffer(const at::Tensor& param, at::TensorList state);
void row_sgd_rows_composite(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, std::string_view options,
                            const OptionalTensor& lr);
/// row_sgd_terms_ around a kernel, which takes the step.
void row_sgd_terms(const at::Tensor& param, at::TensorList state, const RowTerms& terms, std::string_view options, const OptionalTensor& lr,
                   const std::function<void()>& take_step);
/// Whether the state is of rows.
bool check_row_sgd_flush(const at::Tensor& param, at::TensorList state);
void row_sgd_flush_composite(const at::Tensor& param, at::TensorList state);

/// Of a row whose buffer is to be kept by the factor `kept`; `decay` and `take` of the step.
template <typename M>
XS_HOST_DEVICE MomentumStep<M> row_sgd_coefficients(const RowSGDNumbers& n, const OwedDebt& debt, double decay, double take, double kept) {
  return {M(debt.decay * decay), M(debt.movement * decay), M(kept), M(take), M(n.momentum), M(n.lr), n.nesterov};
}

/// What a step does to rows with a gradient, and a flush to all.
struct RowSGDUpdate {
  at::Tensor param;
  OptionalTensor momentum_buffer;
  OptionalTensor last_step; ///< none: nothing is owed, nor will be by this step
  const OwedSteps& owed;    ///< before this step
  int64_t step;             ///< to which rows are brought: owed.step() + 1; in a flush owed.step()
  double momentum;
  double lr = 0, decay = 1; ///< of this step: decay = 1 - lr weight_decay
  double take = 1;          ///< 1 - dampening
  bool nesterov = false, maximize = false;
  bool stochastic_rounding = false;
  bool rebase = false;      ///< of a flush: brings the buffer up to date as well, for steps under another momentum
};

void row_sgd_rows_reference(const RowSGDUpdate& update, const at::Tensor& rows, const at::Tensor& values);
void row_sgd_rows_cpu(const RowSGDUpdate& update, const at::Tensor& rows, const at::Tensor& values);
void row_sgd_flush_reference(const RowSGDUpdate& update);
void row_sgd_flush_cpu(const RowSGDUpdate& update);

} // namespace xsoftmax
