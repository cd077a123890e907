#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace xsoftmax {

// candidate_loss: the loss of each query from the scores of its target and of its candidates.
//
//     adjusted = scores[:, 1:] - log_count                       # a candidate weighs 1 / its expected count
//     adjusted[ids == target] = -inf                             # remove_accidental_hits
//     adjusted[:, independent] += log((M - exp(target_log_count)) / m)     # M independent draws, m of them not hits
//     loss = logsumexp(cat(scores[:, :1], adjusted)) - scores[:, 0]        # estimator "sampled_softmax"
//
// scores [Q, 1 + P + S] (float32 or float64): the target, P private candidates, S shared ones, as candidate_scores lays them out.
// target [Q], private_ids [Q, P], shared_ids [S]: int64. private_log_count [Q, P], shared_log_count [S], target_log_count [Q]:
// logarithms of expected counts (M q for M draws), in scores' dtype or float32; absent: counts of 1 (for the target: 0).
// The first fixed_private private and fixed_shared shared columns are classes that are always there, or draws without replacement:
// they weigh 1 / count as they stand. The others are independent draws, with replacement; there q is renormalised to the classes other
// than the target, and target_log_count is the target's log expected count among them (-inf if it cannot be drawn).
// estimator: "sampled_softmax" (MIDX paper, section 3.2; with remove_accidental_hits=False its Eq. 1), or "ranking", which corrects the
// target's score by target_log_count as well (TensorFlow's sampled softmax) and never renormalises.
// label_smoothing e: (1 - e) of the loss above and e of (log normaliser - mean score of all classes), the mean estimated
// with the weights exp(adjusted - score), 1 for the target, over their sum.
// With no live candidate the loss is 0. Returns [Q] in scores' dtype. Backward recomputes from the scores; nothing else is kept.

// The op's parameters: each kernel takes them as the schema gives them and works on the struct.
#define XS_CANDIDATE_LOSS_PARAMS                                                                                                   \
  const at::Tensor &scores, const at::Tensor &target, const std::optional<at::Tensor>&private_ids,                                 \
      const std::optional<at::Tensor>&shared_ids, const std::optional<at::Tensor>&private_log_count,                               \
      const std::optional<at::Tensor>&shared_log_count, const std::optional<at::Tensor>&target_log_count,                          \
      c10::string_view estimator, bool remove_accidental_hits, int64_t fixed_private, int64_t fixed_shared, double label_smoothing
#define XS_CANDIDATE_LOSS_ARGS                                                                                                     \
  scores, target, private_ids, shared_ids, private_log_count, shared_log_count, target_log_count, estimator,                       \
      remove_accidental_hits, fixed_private, fixed_shared, label_smoothing

struct CandidateLossArgs {
  const at::Tensor& scores;
  const at::Tensor& target;
  const std::optional<at::Tensor>& private_ids;
  const std::optional<at::Tensor>& shared_ids;
  const std::optional<at::Tensor>& private_log_count;
  const std::optional<at::Tensor>& shared_log_count;
  const std::optional<at::Tensor>& target_log_count;
  c10::string_view estimator;
  bool remove_accidental_hits;
  int64_t fixed_private, fixed_shared;
  double label_smoothing;
};

/// Shared by every kernel of the op and of its backward.
void check_candidate_loss(const CandidateLossArgs& args);

/// The composites in ATen calls: any device, and the oracle of the tests.
at::Tensor candidate_loss_reference(XS_CANDIDATE_LOSS_PARAMS);
at::Tensor candidate_loss_backward_reference(const at::Tensor& grad, XS_CANDIDATE_LOSS_PARAMS);

} // namespace xsoftmax
