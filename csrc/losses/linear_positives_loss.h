#pragma once

#include "core/optional.h"

#include <xsoftmax/ops.h>

#include <array>
#include <tuple>

// linear_positives_loss (xsoftmax/ops.h says what it is), of positives as losses/several_positives.h has them.
//
// Both passes work through the queries in blocks, whose logits take 54 MB, or those of one query where they take more.

namespace xsoftmax {

// positives_cross_entropy(input [Q, D], weight, bias, positives [Q, T], shares [Q, T] or [Q, 1], options) -> [Q], with autograd: positives as
// different_positives has them, shares of positive_shares; options: ExactPositivesOptions.
// positives_cross_entropy_backward(grad [Q], ..., mask) -> (grad_input, grad_weight, grad_bias), without rows where they are not wanted.

using PositivesGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

} // namespace xsoftmax
