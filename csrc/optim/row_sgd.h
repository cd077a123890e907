#pragma once

#include "table/updates/pending_steps.h"
#include "optim/row_update.h"
#include "optim/row_updates.h"
#include "table/row_terms.h"

#include <functional>
#include <string_view>

namespace xsoftmax {

// row_sgd_step_, row_sgd_state, row_sgd_flush_ (optim/row_step.h; options: RowSGDOptions):
// stochastic gradient descent on the rows that have a gradient. Equivalent dense update at step t:
//
//     param *= 1 - lr weight_decay
//     buffer = momentum buffer + (1 - dampening) g    no dampening at a parameter's first step
//     param -= lr (nesterov ? g + momentum buffer : buffer)
//
// Without momentum: param -= lr g. maximize: g is negated. A row without a gradient gets a pending
// update (table/updates/pending_steps.h): with the buffer b after step s, its movement in step i >
// s is lr_i momentum^(i-s) b (times momentum once more with nesterov). If momentum or nesterov
// change, all rows and their buffers catch up first. Weight decay is decoupled; for dense gradients
// it is a term of the gradient, as in torch.optim.SGD.
//
// Row state, in this order:
//
//     step              int64 []
//     momentum_buffer   param's shape, in opmath dtype or bfloat16; [0] without momentum, allocated
//                       when momentum is enabled later
//     last_step         int32 [N], the step of a row's last gradient (0: none yet). The row's
//                       buffer is that after that step
//     pending           table/updates/pending_steps.h
//
// Dense state: step float32 [], momentum_buffer.

void check_row_sgd_state(const char* op, const at::Tensor& param, at::TensorList state);
/// Calls row_sgd_flush_ through the dispatcher.
void flush_row_sgd(const at::Tensor& param, at::TensorList state);

/// The tensors of the state, in this order.
struct SgdState {
  enum { kCount, kBuffer, kLastStep, kPending };
};

/// Interface for the CUDA kernels: argument checks, options as numbers, the composites, and
/// make_row_sgd_buffer, which allocates the buffer before the first step with momentum and returns
/// true if it did.
struct RowSGDNumbers {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, maximize, stochastic_rounding;
};
RowSGDNumbers check_row_sgd_rows(const at::Tensor& param, at::TensorList state,
                                 const at::Tensor& rows, const at::Tensor& values,
                                 std::string_view options, const OptionalTensor& lr);
bool make_row_sgd_buffer(const at::Tensor& param, at::TensorList state);
void row_sgd_rows_composite(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                            const at::Tensor& values, std::string_view options,
                            const OptionalTensor& lr);
/// Implements row_sgd_terms_ around a kernel; take_step() launches it.
void row_sgd_terms(const at::Tensor& param, at::TensorList state, const RowTerms& terms,
                   std::string_view options, const OptionalTensor& lr,
                   const std::function<void(const RowSGDNumbers&)>& take_step);
/// Checks the arguments of a flush. Returns whether the state is row state.
bool check_row_sgd_flush(const at::Tensor& param, at::TensorList state);
void row_sgd_flush_composite(const at::Tensor& param, at::TensorList state);

/// Returns the coefficients of a row whose buffer is multiplied by `buffer_factor`; `decay` and
/// `gradient_factor` are those of the step.
template <typename M>
XS_HOST_DEVICE MomentumStep<M> row_sgd_coefficients(const RowSGDNumbers& n,
                                                    const PendingEntry& pending, double decay,
                                                    double gradient_factor, double buffer_factor) {
  return {M(pending.decay * decay),
          M(pending.movement * decay),
          M(buffer_factor),
          M(gradient_factor),
          M(n.momentum),
          M(n.lr),
          n.nesterov};
}

/// Arguments of a step, which updates rows with a gradient, and of a flush, which updates all rows.
struct RowSGDUpdate {
  at::Tensor param;
  OptionalTensor momentum_buffer;
  OptionalTensor last_step; ///< none: there are no pending updates, and this step adds none
  const PendingSteps& pending;    ///< before this step
  int64_t step; ///< the step after the update: pending.step() + 1; in a flush pending.step()
  double momentum;
  double lr = 0, decay = 1; ///< of this step: decay = 1 - lr weight_decay
  double gradient_factor = 1; ///< 1 - dampening
  bool nesterov = false, maximize = false;
  bool stochastic_rounding = false;
  /// In a flush: also brings the buffer up to date, before steps with another momentum.
  bool rebase = false;
};

void row_sgd_rows_reference(const RowSGDUpdate& update, const at::Tensor& rows,
                            const at::Tensor& values);
void row_sgd_rows_cpu(const RowSGDUpdate& update, const at::Tensor& rows, const at::Tensor& values);
void row_sgd_flush_reference(const RowSGDUpdate& update);
void row_sgd_flush_cpu(const RowSGDUpdate& update);

} // namespace xsoftmax
