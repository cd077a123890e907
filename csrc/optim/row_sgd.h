#pragma once

#include "optim/row_update.h"

#include <cmath>

namespace xsoftmax {

// row_sgd_: stochastic gradient descent on the rows that have a gradient (optim/row_update.h). In dense terms, at step t:
//
//     param *= 1 - lr weight_decay                  through `decay` and last_decay, where given
//     buffer = momentum buffer + (1 - dampening) g
//     param -= lr (nesterov ? g + momentum buffer : buffer)
//
// Without momentum_buffer: param -= lr g. With it, rows without a gradient would go on moving by their momentum; that movement is
// owed and made up, with the current lr, when the row is next touched or by row_sgd_flush_. last_step int32 [N] holds the step up
// to which a row is made up, `step` the number of this step, from 1. So after row_sgd_flush_ every row is where dense
// torch.optim.SGD would have it, provided that the gradients did not depend on the parameters and that lr was constant. dampening:
// torch.optim.SGD applies none at the first step of a parameter, so a caller passes 0 there. maximize: g is negated.
//
// row_sgd_flush_: makes up what every row owes after `step` steps. O(N).

/// Shared by every kernel of the op and of row_sgd_flush_, which has no rows and values.
void check_row_sgd(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values,
                   const std::optional<at::Tensor>& momentum_buffer, const std::optional<at::Tensor>& last_step,
                   const std::optional<at::Tensor>& last_decay);
void check_row_sgd_flush(const at::Tensor& param, const at::Tensor& momentum_buffer, const at::Tensor& last_step,
                         const std::optional<at::Tensor>& last_decay);

void row_sgd_reference(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values,
                       const std::optional<at::Tensor>& momentum_buffer, const std::optional<at::Tensor>& last_step,
                       const std::optional<at::Tensor>& last_decay, int64_t step, double lr, double momentum, double dampening,
                       bool nesterov, bool maximize, double decay);
void row_sgd_flush_reference(const at::Tensor& param, const at::Tensor& momentum_buffer, const at::Tensor& last_step,
                             const std::optional<at::Tensor>& last_decay, int64_t step, double lr, double momentum, bool nesterov,
                             double decay);

/// What k steps without a gradient do to a row, each of which decays it by `a`:
/// param = a^k param - lr movement buffer, buffer *= momentum^k.
struct OwedMomentum {
  double movement; ///< sum_{i=1..k} a^(k-i) momentum^i, times momentum once more for Nesterov's
  double keep;     ///< momentum^k

  OwedMomentum(int64_t k, double a, double momentum, bool nesterov) : movement(0), keep(1) {
    if (k <= 0) {
      return;
    }
    keep = std::pow(momentum, double(k));
    if (momentum > 0) {
      const double log_ratio = std::log(momentum / a);
      const double ratio_sum = log_ratio == 0 ? double(k) : std::expm1(double(k) * log_ratio) / std::expm1(log_ratio);
      movement = momentum * std::pow(a, double(k - 1)) * ratio_sum * (nesterov ? momentum : 1);
    }
  }
};

} // namespace xsoftmax
