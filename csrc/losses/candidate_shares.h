#pragma once

#include "losses/candidates.h"

// A loss whose candidates are scored in several places, each of which has some of the classes. Two operators, in differentiable ATen calls:
//
// candidate_shares(scores [Q, 1 + C], target int64 [Q], ids, log_count, target_log_count, distinct, options) -> [Q, S]
//   What one place knows of each query: scores as candidate_loss has them; target -1 where the target is elsewhere, its column then counts for
//   nothing. log_count +inf: the candidate takes no part here. options: EstimatorOptions.
// loss_of_shares(shares [R, Q, S], distinct, options) -> [Q]
//   The loss from the shares of R places: what candidate_loss gives of all candidates in one place.
//
// S and what the columns are follow from the estimator and from the kinds of sets. An estimator goes with them where the candidates enter it as one sum
// or log-sum-exp, whatever the target is: "sampled_softmax", "ranking", "nce", "negative_sampling", "importance". One that lets a target take the place of a
// draw ("ranking" beside distinct candidates) has that draw left out by the caller.

namespace xsoftmax {

at::Tensor candidate_shares(const at::Tensor& scores, const at::Tensor& target, const Proposal& sets, const EstimatorOptions& options);
at::Tensor loss_of_shares(const at::Tensor& shares, const c10::List<bool>& distinct, const EstimatorOptions& options);

} // namespace xsoftmax
