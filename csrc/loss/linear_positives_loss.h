#pragma once

#include "op/optional.h"

#include <xsoftmax/ops.h>

#include <array>
#include <tuple>

// linear_positives_loss (contract: xsoftmax/ops.h): exact loss with several positives per query, in
// the format of loss/several_positives.h.
//
// Forward and backward pass process the queries in blocks whose logits take 54 MB, or one query at
// a time if its logits take more.

namespace xsoftmax {

// positives_cross_entropy(input [Q, D], weight, bias, positives [Q, T], shares [Q, T] or [Q, 1],
// options) -> [Q]
//   Returns the loss of each query, with autograd. positives: from distinct_positives(). shares:
//   from positive_shares(). options: ExactPositivesOptions.
// positives_cross_entropy_backward(grad [Q], ..., mask) -> (grad_input, grad_weight, grad_bias)
//   Gradients that are not needed have 0 rows.

using PositivesGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

} // namespace xsoftmax
