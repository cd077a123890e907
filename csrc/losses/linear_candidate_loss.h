#pragma once

#include "losses/candidate_loss.h"

#include <array>
#include <tuple>

namespace xsoftmax {

// linear_candidate_loss: the loss of each query from its hidden state and its candidates' ids, candidate_scores and candidate_loss in
// one step.
//
//     own_ids = cat(target[:, None], private_ids)                       # 0 in place of a target that is ignored
//     scores = candidate_scores(input, weight, bias, own_ids, shared_ids)
//     loss = candidate_loss(scores, target, private_ids, shared_ids, ...)      # 0, and no gradient, where ignored
//
// The forward pass makes the gradients of each query's own loss while the rows that it gathered are still in cache; the backward pass
// scales them. So the table is read once, and the scores turn into their gradient in place.

#define XS_LINEAR_CANDIDATE_LOSS_PARAMS                                                                                            \
  const at::Tensor &input, const at::Tensor &weight, const std::optional<at::Tensor>&bias, XS_CANDIDATES_PARAMS, int64_t ignore_index
#define XS_LINEAR_CANDIDATE_LOSS_ARGS input, weight, bias, XS_CANDIDATES_ARGS, ignore_index

/// loss [Q]; the gradient of loss[q] for input[q], [Q, D], and for scores[q], [Q, 1 + P + S], all in the dtype of the loss; own_ids
/// [Q, 1 + P]. Gradients that are not wanted have size 0.
using CandidateLossState = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Shared by every kernel.
void check_linear_candidate_loss(XS_LINEAR_CANDIDATE_LOSS_PARAMS);

/// The targets with 0 where they are ignored, [Q].
at::Tensor targets_that_count(const at::Tensor& target, int64_t ignore_index);

/// loss [Q], with autograd.
at::Tensor linear_candidate_loss(XS_LINEAR_CANDIDATE_LOSS_PARAMS, bool sparse_grad);

/// The composite: any device, and the oracle of the tests. output_mask: gradient of input, of scores.
CandidateLossState linear_candidate_loss_forward_reference(XS_LINEAR_CANDIDATE_LOSS_PARAMS, std::array<bool, 2> output_mask);

} // namespace xsoftmax
