#pragma once

#include "losses/candidates.h"

#include <array>
#include <tuple>

namespace xsoftmax {

// linear_candidate_loss: the loss of each query from its hidden state and its candidates' ids, candidate_scores and estimator_loss in
// one step.
//
//     row_ids = cat(target[:, None], private_ids)                       # 0 in place of a target that is ignored
//     scores = candidate_scores(input, weight, bias, row_ids, shared_ids)
//     loss = estimator_loss(scores, target, candidates, ...)            # 0, and no gradient, where ignored
//
// The forward pass makes the gradients of each query's own loss while the rows that it gathered are still in cache; the backward pass
// scales them. So the table is read once, and the scores turn into their gradient in place. options: SampledSoftmaxOptions.
//
// share [Q], where it is given: what loss[q] counts. The result is (share * loss).sum() then, and the gradients that the forward pass makes are those of
// share[q] * loss[q]: as a rule the backward pass finds nothing to scale. share has no gradient.

/// What the op takes.
struct LinearLossArguments {
  const at::Tensor& input;  ///< [Q, D]
  const at::Tensor& weight; ///< [N, D]
  const OptionalTensor& bias;
  const at::Tensor& target; ///< [Q]
  Candidates candidates;
  SampledSoftmaxOptions options;
  const OptionalTensor& share; ///< [Q]

  /// Parsed and checked.
  LinearLossArguments(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target,
                      const OptionalTensors& candidates, at::IntArrayRef distinct, std::string_view options, const OptionalTensor& share);
};

/// Where the gradients of the scores lie in a buffer [Q, width]: from column `lead` on. The fast kernels of a GPU's matrix products read 16 bytes at a time, so
/// that there the scores of shared candidates begin on a multiple of eight columns, and rows are as long.
struct ScoreColumns {
  c10::SymInt lead, count, width;

  /// row_width: 1 + P; shared_width: S. aligned: for a GPU.
  ScoreColumns(const c10::SymInt& row_width, const c10::SymInt& shared_width, bool aligned);
};

/// loss [Q] and the gradient of loss[q], both times share[q], for input[q], [Q, D], and for scores[q], [Q, width] of ScoreColumns, all in the dtype of the
/// loss; row_ids [Q, 1 + P]. Gradients that are not wanted have size 0.
using CandidateLossState = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The targets with 0 where they are ignored, [Q].
at::Tensor targets_that_count(const at::Tensor& target, int64_t ignore_index);

/// loss [Q], or with shares their sum, with autograd, by the dispatcher.
at::Tensor linear_candidate_loss(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target,
                                 const Candidates& candidates, const SampledSoftmaxOptions& options, const OptionalTensor& share = std::nullopt);

/// The composite: any device, and the oracle of the tests. wanted: gradient of input, of scores.
CandidateLossState linear_candidate_loss_forward_reference(const LinearLossArguments& arguments, std::array<bool, 2> wanted, bool aligned);

} // namespace xsoftmax
