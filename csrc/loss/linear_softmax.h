#pragma once

#include "op/optional.h"

#include <xsoftmax/options.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>
#include <tuple>

// linear_softmax(input [Q, D], weight [N, D], bias [N] or none, ids int64 [Q, K], entropy, options)
// -> (log_prob [Q, K], log_normalizer [Q], entropy [Q])
//   With autograd. entropy is [0] if it was not requested.
//
//     logits = transform_logits(F.linear(input, weight, bias), options)
//     log_p = log_softmax(logits, 1)       # never in memory
//     log_prob = log_p.gather(1, ids); log_normalizer = logits.logsumexp(1)
//     entropy = -(log_p.exp() * log_p).sum(1)
//
// ids in [0, N), repeats allowed. Results are float32, or float64 for float64 operands. Forward and
// backward pass process the classes in blocks; the backward pass recomputes the logits of a block.

namespace xsoftmax {

/// (log_prob, log_normalizer, entropy, normalizer). normalizer [2, Q] holds the largest logit and
/// the log of the sum of e^(logit - largest) of each query, for the backward pass.
using SoftmaxTerms = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
/// The gradients of (input, weight, bias). Those that are not needed have 0 rows.
using SoftmaxGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Calls the operator through the dispatcher.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_softmax(const at::Tensor& input,
                                                              const at::Tensor& weight,
                                                              const OptionalTensor& bias,
                                                              const at::Tensor& ids, bool entropy,
                                                              const LogitOptions& options = {});

/// The gradients of the three results and the tensors that the forward pass saved. grad_entropy is
/// [0] if the entropy was not requested.
struct SoftmaxBackward {
  const at::Tensor& grad_log_prob;
  const at::Tensor& grad_log_normalizer;
  const at::Tensor& grad_entropy;
  const at::Tensor& ids;
  const at::Tensor& normalizer;
  const at::Tensor& entropy;

  bool has_entropy() const { return grad_entropy.sym_size(0) != 0; }
  /// Returns (constant [Q], slope [Q]); slope is undefined without entropy. The gradient of a logit
  /// s of query q is e^(s - largest) (constant[q] + slope[q] (s - largest)), plus grad_log_prob at
  /// the query's ids.
  std::array<at::Tensor, 2> coefficients() const;
};

/// Check the arguments. `options` is LogitOptions as text; both functions return it parsed.
LogitOptions check_linear_softmax(const at::Tensor& input, const at::Tensor& weight,
                                  const OptionalTensor& bias, const at::Tensor& ids,
                                  std::string_view options);
LogitOptions check_linear_softmax_backward(const at::Tensor& input, const at::Tensor& weight,
                                           const OptionalTensor& bias, const SoftmaxBackward& grads,
                                           std::string_view options);

/// Composites in ATen calls: they run on any device and are the oracle of the tests.
SoftmaxTerms linear_softmax_forward_reference(const at::Tensor& input, const at::Tensor& weight,
                                              const OptionalTensor& bias, const at::Tensor& ids,
                                              bool entropy, std::string_view options);
SoftmaxGradients linear_softmax_backward_reference(
    const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
    const SoftmaxBackward& grads, std::string_view options, std::array<bool, 3> mask);

} // namespace xsoftmax
