#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/optional.h"
#include "op/options.h"
#include "estimator/candidate_loss.h"
#include "loss/linear_candidate_loss.h"
#include "estimator/logit_transform.h"
#include "loss/reduction.h"
#include "loss/sampled_step.h"
#include "loss/several_positives.h"
#include "loss/soft_targets.h"
#include "xsoftmax/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSampledSoftmaxLoss = "sampled_softmax_loss";

} // namespace

void check_sampled_loss(const Tensor& input, const Tensor& weight, const Tensor& target,
                        const OptionalTensor& class_weight, const OptionalTensor& log_z, bool soft,
                        const SampledSoftmaxOptions& options) {
  check_class_weight(kSampledSoftmaxLoss, class_weight, weight.sym_size(0), target);
  TORCH_CHECK_VALUE(!is_defined(class_weight) || options.label_smoothing == 0, kSampledSoftmaxLoss,
                    ": expected label_smoothing of 0 with class weights, got ",
                    options.label_smoothing,
                    ": a sample does not estimate the weighted mean over all classes");
  if (is_defined(log_z)) {
    check::dim(kSampledSoftmaxLoss, "log_z", *log_z, 0);
    check::floating(kSampledSoftmaxLoss, "log_z", *log_z);
    if (!log_z->is_cpu()) { // a 0-dim CPU tensor works with any device
      check::same_device(kSampledSoftmaxLoss, "log_z", *log_z, "input", input);
    }
  }
  reduction_code(kSampledSoftmaxLoss, options.reduction);
  check_logits(kSampledSoftmaxLoss, options);
  if (soft) {
    TORCH_CHECK_VALUE(options.estimator == "sampled_softmax", kSampledSoftmaxLoss,
                      ": expected estimator \"sampled_softmax\" with target_prob, got \"",
                      options.estimator, "\"");
    TORCH_CHECK_VALUE(options.label_smoothing == 0, kSampledSoftmaxLoss,
                      ": expected label_smoothing of 0 with target_prob, got ",
                      options.label_smoothing);
  } else if (target.dim() == input.dim() && target.sym_size(-1) > 1) {
    check_positives(kSampledSoftmaxLoss, options, class_weight, options.label_smoothing);
  }
  check_z_loss(kSampledSoftmaxLoss, options.z_loss,
               find_estimator(kSampledSoftmaxLoss, options.estimator));
}

namespace {

// Computes the scores, then the loss from them. Used if scores are transformed or lowered by log Z,
// if z_loss needs them, or if the estimator has no fused row loop.
Tensor loss_by_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const Tensor& target, const Candidates& candidates,
                      const OptionalTensor& log_z, const SampledSoftmaxOptions& options,
                      const Estimator& estimator) {
  if (is_defined(candidates.private_ids)) {
    check::same_device(kSampledSoftmaxLoss, "ids of a set", *candidates.private_ids, "target",
                       target);
  }
  const Tensor known = targets_or_zero(target, options.ignore_index),
               counts = target.ne(options.ignore_index);
  // Ignored queries may hold anything, including NaN.
  const Tensor queries = at::where(counts.unsqueeze(1), input, at::zeros({}, input.options()));
  const Tensor ids = is_defined(candidates.private_ids)
      ? at::cat({known.unsqueeze(1), *candidates.private_ids}, 1)
      : known.unsqueeze(1);
  Tensor scores =
      candidate_scores(queries, weight, bias, ids, candidates.shared_ids, options.sparse_grad);
  scores = transform_logits(scores, options);
  scores = is_defined(log_z) ? scores - *log_z : scores;
  check_candidates(kSampledSoftmaxLoss, "input", queries, known, candidates, options);
  return loss_of_scores({scores, known, candidates, options, estimator}, options.z_loss);
}

Tensor sampled_softmax_loss_op(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& target, at::TensorList ids,
                               at::TensorList log_count, const OptionalTensors& target_log_count,
                               const c10::List<bool>& distinct, const OptionalTensor& class_weight,
                               const OptionalTensor& log_z, std::string_view options,
                               const OptionalTensor& target_prob) {
  return sampled_softmax_loss(
      input, weight, bias, target,
      make_proposal(kSampledSoftmaxLoss, ids, log_count, target_log_count, distinct),
      parse_options<SampledSoftmaxOptions>(kSampledSoftmaxLoss, options), class_weight, log_z,
      target_prob);
}

} // namespace

Tensor sampled_softmax_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& target_argument, const Proposal& sets,
                            const SampledSoftmaxOptions& options,
                            const OptionalTensor& class_weight, const OptionalTensor& log_z,
                            const OptionalTensor& target_prob) {
  if (is_defined(target_prob)) {
    return sampled_soft_loss(input, weight, bias, target_argument, *target_prob, sets, options,
                             class_weight, log_z);
  }
  check_batch(kSampledSoftmaxLoss, input, target_argument, weight, options.ignore_index);
  check_sampled_loss(input, weight, target_argument, class_weight, log_z, /*soft=*/false, options);
  return loss_of_proposal(input, weight, bias, target_argument, sets, options, class_weight, log_z);
}

Tensor loss_of_proposal(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& target_argument, const Proposal& sets,
                        const SampledSoftmaxOptions& options, const OptionalTensor& class_weight,
                        const OptionalTensor& log_z) {
  Tensor target = target_argument;
  const bool has_multiple = has_multiple_positives(input, target, options.ignore_index);
  const Estimator& estimator = find_estimator(kSampledSoftmaxLoss, options.estimator);
  if (estimator.traits.has_noise) {
    const auto distinct = std::count_if(sets.begin(), sets.end(),
                                        [](const CandidateSet& set) { return set.distinct; });
    TORCH_CHECK_VALUE(distinct > 0 && size_t(distinct) < sets.size(), kSampledSoftmaxLoss,
                      ": expected candidates, sets of distinct classes such as a head, and "
                      "noise, independent draws, with estimator \"",
                      estimator.name, "\", got ", distinct, " of ", sets.size(), " sets distinct");
  }
  if (has_multiple) {
    return several_positives_loss(input, weight, bias, target, sets, options, class_weight, log_z);
  }
  const Tensor flat = as_vector(target), queries = as_queries(input, flat.sym_size(0));
  const Candidates candidates = arrange_columns(sets, flat.sym_size(0), estimator.traits);
  const bool by_scores =
      is_defined(log_z) || !estimator.has_kernels() || transforms(options) || options.z_loss != 0;
  if (!by_scores && !is_defined(class_weight)) {
    if (const OptionalTensor share =
            mean_weights(flat, options, opmath_dtype(weight.scalar_type()));
        is_defined(share)) {
      return linear_candidate_loss(queries, weight, bias, flat, candidates, options, share);
    }
  }
  const Tensor loss = by_scores
      ? loss_by_scores(queries, weight, bias, flat, candidates, log_z, options, estimator)
      : linear_candidate_loss(queries, weight, bias, flat, candidates, options);
  return reduced_loss(loss, target, class_weight, options);
}

XSOFTMAX_OPERATORS(m) {
  m.def((std::string(
             "sampled_softmax_loss(Tensor input, Tensor weight, Tensor? bias, Tensor target, ") +
         kProposalSchema +
         ", Tensor? class_weight=None, Tensor? log_z=None, str options=\"\", Tensor? "
         "target_prob=None) -> Tensor")
            .c_str(),
        sampled_softmax_loss_op);
}

} // namespace xsoftmax
