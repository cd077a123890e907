#pragma once

#include "core/optional.h"

#include <xsoftmax/loss_options.h>

#include <array>
#include <tuple>

// linear_positives_loss: the exact loss of several positives of each query, target [*, T] (losses/several_positives.h), without the [Q, N] logits.
//
//     s = F.linear(input, weight, bias); n = logsumexp of s over the classes that are no positive of the query
//     "mean": the mean over its positives y of class_weight[y] softplus(n - s_y)
//     "sum": softplus(n - logsumexp over its positives of s_y)
//     reduction as of sampled_softmax_loss
//
// Both passes work through the queries in blocks, whose logits take 54 MB, or those of one query where they take more. options:
// ExactPositivesOptions.

namespace xsoftmax {

/// input [*, D], weight [N, D], bias [N] or none, target [*, T], class_weight [N] or none. Returns a scalar or [*].
at::Tensor linear_positives_loss(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target,
                                 const OptionalTensor& class_weight, const ExactPositivesOptions& options);

// positives_cross_entropy(input [Q, D], weight, bias, positives [Q, T], shares [Q, T] or [Q, 1], together) -> [Q], with autograd: positives as
// different_positives has them, shares of positive_shares; together: as one class.
// positives_cross_entropy_backward(grad [Q], ..., mask) -> (grad_input, grad_weight, grad_bias), without rows where they are not wanted.

using PositivesGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

} // namespace xsoftmax
