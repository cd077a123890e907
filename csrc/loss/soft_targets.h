#pragma once

#include "op/optional.h"

#include <xsoftmax/ops.h>
#include <xsoftmax/options.h>

// Soft targets: target [*, T] and target_prob [*, T] for input [*, D]. target_prob is the weight of
// the loss of each listed class.
//
//     loss_q = sum_t target_prob_qt class_weight_t (log Z_q - s_qt + z_loss (log Z_q)^2)
//
// Entries of ignore_index or -1 are padding. Padding and entries of probability 0 contribute
// nothing, duplicates are summed, and the probabilities of a query need not sum to 1. A mean
// divides by the number of queries that have an entry other than padding, with and without class
// weights; F.cross_entropy with probabilities divides by the number of all queries.

namespace xsoftmax {

/// Checks the arguments and returns target with ignore_index in place of padding and of entries of
/// probability 0.
at::Tensor soft_targets(const char* op, const at::Tensor& input, const at::Tensor& target,
                        const at::Tensor& target_prob, int64_t ignore_index);

/// Returns sampled_softmax_loss with target_prob. The log normaliser is estimated once per query,
/// from the distinct listed classes, each with a count of 1, and the candidates that are not
/// listed.
at::Tensor sampled_soft_loss(const at::Tensor& input, const at::Tensor& weight,
                             const OptionalTensor& bias, const at::Tensor& target,
                             const at::Tensor& target_prob, const Proposal& sets,
                             const SampledSoftmaxOptions& options,
                             const OptionalTensor& class_weight, const OptionalTensor& log_z);

} // namespace xsoftmax
