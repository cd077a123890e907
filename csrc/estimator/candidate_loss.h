#pragma once

#include "estimator/candidates.h"

// The operators that candidate_loss (contract: xsoftmax/ops.h) calls after it has concatenated the
// sets of a proposal:
//
// estimator_loss(scores [Q, 1 + P + S], target [Q], candidates, distinct, options) -> [Q]
//   Returns the loss of each query, with autograd. Column 0 of scores is the target; the others are
//   in the order of Candidates. options: EstimatorOptions as text.
// estimator_loss_backward(grad [Q], scores, ...) -> [Q, 1 + P + S]
//   Returns the gradient of the scores. It recomputes everything from the scores; autograd saves
//   only the inputs.

namespace xsoftmax {

/// The arguments of estimator_loss. The first constructor parses and checks them.
struct EstimatorArguments {
  const at::Tensor& scores;
  const at::Tensor& target;
  Candidates candidates;
  EstimatorOptions options;
  const Estimator& estimator;

  EstimatorArguments(const char* op, const at::Tensor& scores, const at::Tensor& target,
                     const OptionalTensors& candidates, at::IntArrayRef distinct,
                     std::string_view options);
  EstimatorArguments(const at::Tensor& scores, const at::Tensor& target, Candidates candidates,
                     EstimatorOptions options, const Estimator& estimator)
      : scores(scores), target(target), candidates(std::move(candidates)),
        options(std::move(options)), estimator(estimator) {}
};

/// Builds the batch that an estimator receives, in differentiable ATen calls.
CandidateBatch make_batch(const at::Tensor& scores, const at::Tensor& target,
                          const Candidates& candidates, const EstimatorTraits& traits,
                          bool remove_accidental_hits, double label_smoothing);

/// Call the operators through the dispatcher.
at::Tensor estimator_loss(const at::Tensor& scores, const at::Tensor& target,
                          const Candidates& candidates, const EstimatorOptions& options);
at::Tensor estimator_loss_backward(const at::Tensor& grad, const at::Tensor& scores,
                                   const at::Tensor& target, const Candidates& candidates,
                                   const EstimatorOptions& options);

/// Returns the loss [Q] plus z_loss * (log normaliser)^2. Calls the operator, or the composite if
/// the estimator has no kernels.
at::Tensor loss_of_scores(const EstimatorArguments& arguments, double z_loss);

/// Composites in ATen calls: they run on any device and are the oracle of the tests.
at::Tensor estimator_loss_reference(const EstimatorArguments& arguments);
at::Tensor estimator_loss_backward_reference(const at::Tensor& grad,
                                             const EstimatorArguments& arguments);
void check_estimator_loss_backward(const at::Tensor& grad, const at::Tensor& scores);

} // namespace xsoftmax
