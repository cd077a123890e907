#pragma once

#include "losses/candidates.h"

// candidate_loss (contract: xsoftmax/ops.h) lays the sets of a proposal out side by side and calls
//
// estimator_loss(scores [Q, 1 + P + S], target [Q], candidates, distinct, options) -> [Q]: the loss of each query, with autograd; the columns as
// Candidates has them, behind that of the target. options: EstimatorOptions.
// estimator_loss_backward(grad [Q], scores, ...) -> the gradient of the scores. It recomputes from the scores; nothing else is kept.

namespace xsoftmax {

/// What estimator_loss takes, checked.
struct EstimatorArguments {
  const at::Tensor& scores;
  const at::Tensor& target;
  Candidates candidates;
  EstimatorOptions options;
  const Estimator& estimator;

  EstimatorArguments(const char* op, const at::Tensor& scores, const at::Tensor& target, const OptionalTensors& candidates, at::IntArrayRef distinct,
                     std::string_view options);
  EstimatorArguments(const at::Tensor& scores, const at::Tensor& target, Candidates candidates, EstimatorOptions options, const Estimator& estimator)
      : scores(scores), target(target), candidates(std::move(candidates)), options(std::move(options)), estimator(estimator) {}
};

/// The batch as an estimator sees it, in differentiable ATen calls.
CandidateBatch make_batch(const at::Tensor& scores, const at::Tensor& target, const Candidates& candidates, const EstimatorTraits& traits,
                          bool remove_accidental_hits, double label_smoothing);

/// Calls the operator through the dispatcher.
at::Tensor estimator_loss(const at::Tensor& scores, const at::Tensor& target, const Candidates& candidates, const EstimatorOptions& options);
at::Tensor estimator_loss_backward(const at::Tensor& grad, const at::Tensor& scores, const at::Tensor& target, const Candidates& candidates,
                                   const EstimatorOptions& options);

/// The loss [Q] by the dispatcher, or in ATen calls where the estimator has no kernels, and z_loss * (log normaliser)^2.
at::Tensor loss_of_scores(const EstimatorArguments& arguments, double z_loss);

/// The composites in ATen calls: any device, and the oracle of the tests.
at::Tensor estimator_loss_reference(const EstimatorArguments& arguments);
at::Tensor estimator_loss_backward_reference(const at::Tensor& grad, const EstimatorArguments& arguments);
void check_estimator_loss_backward(const at::Tensor& grad, const at::Tensor& scores);

} // namespace xsoftmax
