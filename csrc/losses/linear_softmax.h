#pragma once

#include "core/optional.h"

#include <xsoftmax/loss_options.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>
#include <tuple>

// linear_softmax(input [Q, D], weight [N, D], bias [N] or none, ids int64 [Q, K], entropy, options) ->
// (log_prob [Q, K], log_normalizer [Q], entropy [Q] or, not wanted, [0]), with autograd:
//
//     logits = transform_logits(F.linear(input, weight, bias), options)
//     log_p = log_softmax(logits, 1)       # never in memory
//     log_prob = log_p.gather(1, ids); log_normalizer = logits.logsumexp(1)
//     entropy = -(log_p.exp() * log_p).sum(1)
//
// ids in [0, N), repeats allowed; results in float32, or float64 for float64 operands. The classes
// come in blocks, forward and backward; the backward pass computes the logits of a block again.

namespace xsoftmax {

/// log_prob, log_normalizer, entropy; then the largest logit and the log of the sum of
/// e^(logit - largest) of each query, [2, Q], for the backward pass.
using SoftmaxTerms = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
/// The gradients of input, weight and bias; those that are not wanted have no rows.
using SoftmaxGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Calls the operator through the dispatcher.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_softmax(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                                                              const at::Tensor& ids, bool entropy, const LogitOptions& options = {});

/// The gradients of the three results, and what the forward pass kept. grad_entropy: [0] where
/// entropy was not wanted.
struct SoftmaxBackward {
  const at::Tensor& grad_log_prob;
  const at::Tensor& grad_log_normalizer;
  const at::Tensor& grad_entropy;
  const at::Tensor& ids;
  const at::Tensor& normalizer;
  const at::Tensor& entropy;

  bool has_entropy() const { return grad_entropy.sym_size(0) != 0; }
  /// The gradient of a logit s of query q is e^(s - largest) (constant[q] + slope[q] (s - largest)),
  /// and that of the log-probability for each of its ids: (constant [Q], slope [Q] or undefined).
  std::array<at::Tensor, 2> coefficients() const;
};

/// options: LogitOptions as text, which both return parsed.
LogitOptions check_linear_softmax(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& ids,
                                  std::string_view options);
LogitOptions check_linear_softmax_backward(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const SoftmaxBackward& grads,
                                           std::string_view options);

/// The composites in ATen calls: any device, and the oracle of the tests.
SoftmaxTerms linear_softmax_forward_reference(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& ids,
                                              bool entropy, std::string_view options);
SoftmaxGradients linear_softmax_backward_reference(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const SoftmaxBackward& grads,
                                                   std::string_view options, std::array<bool, 3> mask);

} // namespace xsoftmax
