#pragma once

#include "estimator/candidates.h"

// Two operators that compute candidate_loss from partial sums, for candidates that are scored on
// several shards, each of which holds some of the classes. Both consist of differentiable ATen
// calls.
//
// candidate_shares(scores [Q, 1 + C], target int64 [Q], ids, log_count, target_log_count, distinct,
// options) -> [Q, S]
//   Returns the partial sums of one shard. scores: as for candidate_loss. target: -1 if another
//   shard holds the target; column 0 of scores is then ignored. A candidate with log_count +inf is
//   ignored on this shard. options: EstimatorOptions.
// loss_of_shares(shares [R, Q, S], distinct, options) -> [Q]
//   Returns the loss from the partial sums of R shards. It equals candidate_loss on all candidates
//   together.
//
// The estimator and the kinds of sets determine S and the meaning of the columns. Supported are the
// estimators in which the candidates enter as one sum or log-sum-exp that does not depend on the
// target: "sampled_softmax", "ranking", "nce", "negative_sampling", "importance". If the target
// replaces a sample ("ranking" with distinct candidates), the caller must leave that sample out.

namespace xsoftmax {

at::Tensor candidate_shares(const at::Tensor& scores, const at::Tensor& target,
                            const Proposal& sets, const EstimatorOptions& options);
at::Tensor loss_of_shares(const at::Tensor& shares, const c10::List<bool>& distinct,
                          const EstimatorOptions& options);

} // namespace xsoftmax
