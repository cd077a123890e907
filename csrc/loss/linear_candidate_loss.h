#pragma once

#include "cpu/impl.h"
#include "estimator/candidates.h"

#include <array>
#include <tuple>

namespace xsoftmax {

// linear_candidate_loss computes the loss of each query from its hidden state and the ids of its
// candidates: candidate_scores and estimator_loss in one operator.
//
//     # an ignored target counts as class 0; its loss and gradient are 0
//     row_ids = cat(target[:, None], private_ids)
//     scores = candidate_scores(input, weight, bias, row_ids, shared_ids)
//     loss = estimator_loss(scores, target, candidates, ...)
//
// The forward pass also computes the gradients of each loss, while the gathered rows are still in
// cache; the backward pass only scales them. So the table is read once, and the gradient of the
// scores overwrites the scores. options: SampledSoftmaxOptions.
//
// share [Q], optional: the weight of each loss in the reduction. The result is then
// (share * loss).sum(), and the forward pass computes the gradients of share[q] * loss[q], so that
// the backward pass usually has nothing to scale. share has no gradient.

/// The arguments of the operator.
struct LinearLossArguments {
  const at::Tensor& input; ///< [Q, D]
  const at::Tensor& weight; ///< [N, D]
  const OptionalTensor& bias;
  const at::Tensor& target; ///< [Q]
  Candidates candidates;
  SampledSoftmaxOptions options;
  const OptionalTensor& share; ///< [Q]

  /// Parses and checks the arguments.
  LinearLossArguments(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                      const at::Tensor& target, const OptionalTensors& candidates,
                      at::IntArrayRef distinct, std::string_view options,
                      const OptionalTensor& share);
};

/// The layout of the gradients of the scores in a buffer [Q, width]: `count` columns from column
/// `padding` on. Fast GPU matrix products read 16 bytes at a time, so if `aligned`, the shared
/// candidates begin at a multiple of 8 columns, and `width` is a multiple of 8.
struct ScoreColumns {
  c10::SymInt padding, count, width;

  /// row_width: 1 + P. shared_width: S. aligned: true for a GPU.
  ScoreColumns(const c10::SymInt& row_width, const c10::SymInt& shared_width, bool aligned);
};

/// (loss [Q], gradient of input [Q, D], gradient of the scores [Q, width] in the layout of
/// ScoreColumns, row_ids [Q, 1 + P]). Loss and gradients are multiplied by share and have the dtype
/// of the loss. Gradients that are not needed have 0 rows.
using CandidateLossState = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Returns the targets [Q], with 0 in place of ignored targets.
at::Tensor targets_or_zero(const at::Tensor& target, int64_t ignore_index);

/// Calls the operator through the dispatcher, with autograd. Returns the loss [Q], or with `share`
/// the weighted sum.
at::Tensor linear_candidate_loss(const at::Tensor& input, const at::Tensor& weight,
                                 const OptionalTensor& bias, const at::Tensor& target,
                                 const Candidates& candidates, const SampledSoftmaxOptions& options,
                                 const OptionalTensor& share = std::nullopt);

/// Composite in ATen calls: runs on any device and is the oracle of the tests. wanted: whether to
/// compute the gradients of input and of scores.
CandidateLossState linear_candidate_loss_forward_reference(const LinearLossArguments& arguments,
                                                           std::array<bool, 2> wanted,
                                                           bool aligned);

/// Returns the estimator of the options. Throws a ValueError if it has no loop over rows.
const Estimator& row_estimator(const SampledSoftmaxOptions& options);

/// The operator linear_candidate_loss_forward of a device: parses the arguments and calls kKernel,
/// or the composite if use_reference().
template <CandidateLossState (*kKernel)(const LinearLossArguments& arguments,
                                        std::array<bool, 2> wanted, bool aligned)>
CandidateLossState linear_candidate_loss_forward(const at::Tensor& input, const at::Tensor& weight,
                                                 const OptionalTensor& bias,
                                                 const at::Tensor& target,
                                                 const OptionalTensors& candidates,
                                                 at::IntArrayRef distinct, std::string_view options,
                                                 std::array<bool, 2> wanted,
                                                 const OptionalTensor& share, bool aligned) {
  const LinearLossArguments arguments(input, weight, bias, target, candidates, distinct, options,
                                      share);
  return use_reference() ? linear_candidate_loss_forward_reference(arguments, wanted, aligned)
                         : kKernel(arguments, wanted, aligned);
}

} // namespace xsoftmax
