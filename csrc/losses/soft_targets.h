#pragma once

#include "core/optional.h"

#include <xsoftmax/candidates.h>
#include <xsoftmax/loss_options.h>

// Targets with probabilities: target [*, T] and target_prob [*, T] beside input [*, D], a weight for
// the loss of each class listed.
//
//     loss_q = sum_t target_prob_qt class_weight_t (log Z_q - s_qt + z_loss (log Z_q)^2)
//
// Entries of ignore_index or -1 are padding. Those and entries of probability 0 add nothing, repeats
// add up, and the probabilities of a query need not sum to 1. A mean is over the queries with an
// entry that is no padding, as F.cross_entropy takes it over all queries, also beside class weights.

namespace xsoftmax {

/// target with ignore_index in the place of entries that add nothing: padding, and those of
/// probability 0.
at::Tensor soft_targets(const char* op, const at::Tensor& input, const at::Tensor& target, const at::Tensor& target_prob, int64_t ignore_index);

/// sampled_softmax_loss with target_prob: log normaliser is estimated once for a query, from the
/// different classes listed, each with the count 1, and the candidates that are none of them.
at::Tensor sampled_soft_loss(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target,
                             const at::Tensor& target_prob, const Proposal& sets, const SampledSoftmaxOptions& options, const OptionalTensor& class_weight,
                             const OptionalTensor& log_z);

} // namespace xsoftmax
