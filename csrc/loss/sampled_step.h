#pragma once

#include "op/optional.h"
#include "proposal/union_kind.h"

#include <xsoftmax/options.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>

namespace xsoftmax {

// sampled_step(input, weight, bias, target, state!, sampler, options, generator, training, prepare,
// others) -> loss
//
// Computes the reduced loss of one training step over a class table: updates the sampler, samples
// candidates, and calls sampled_softmax_loss (xsoftmax/ops.h) on them.
//
//     if prepare: sampler.prepare(weight, bias, generator)
//     # queries of 0 and targets of -1 for ignored targets
//     queries, masked_target = (logit_scale * input).detach(), target
//     sets = sampler.sample(queries, masked_target, generator)
//     loss = sampled_softmax_loss(input, weight, bias, target, sets, options,
//                                 class_weight, log_z, target_prob)
//
// sampler, state: see proposal/sampler_kind.h. options: SampledSoftmaxOptions. training: whether a
// sampler that counts the targets of a stream counts this batch. others: class_weight [N], log_z,
// target_prob [*, T], negatives int64 [P] or [*, P], and negative_log_count of the shape of
// negatives; each may be none. Negatives without counts are always scored: their expected count is
// 1 plus the expected count of being sampled. Log counts that the caller passes are used unchanged.
//
// All arguments are checked before the sampler changes.

/// The arguments of sampled_step, without the sampler.
struct SampledStep {
  const at::Tensor& input;
  const at::Tensor& weight;
  const OptionalTensor& bias;
  const at::Tensor& target;
  OptionalTensor class_weight = std::nullopt;
  OptionalTensor log_z = std::nullopt;
  OptionalTensor target_prob = std::nullopt;
  OptionalTensor negatives = std::nullopt;
  OptionalTensor negative_log_count = std::nullopt;
  std::optional<at::Generator> generator = std::nullopt;
  bool training = true;
  bool prepare = true;
};

/// The interface of a sampler in a step.
struct StepSampler {
  UnionPart part; ///< the sampler without its head
  /// int64 [H] classes that are always scored and never sampled; undefined: none.
  at::Tensor head;
  /// Whether samples depend on the query vectors, not only on which targets are ignored.
  bool reads_queries = true;
  std::function<void(const at::Tensor& weight, const OptionalTensor& bias,
                     const std::optional<at::Generator>& generator)>
      prepare;
};

/// Checks the arguments of sampled_softmax_loss other than the batch (check_batch) and the
/// proposal. soft: whether target_prob is given. Also an operator, check_sampled_loss, for steps
/// whose sampler is written in Python.
void check_sampled_loss(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                        const OptionalTensor& class_weight, const OptionalTensor& log_z, bool soft,
                        const SampledSoftmaxOptions& options);

/// Returns sampled_softmax_loss, without target_prob. The caller has checked the batch and the
/// options (check_batch, check_sampled_loss).
at::Tensor loss_of_proposal(const at::Tensor& input, const at::Tensor& weight,
                            const OptionalTensor& bias, const at::Tensor& target,
                            const Proposal& sets, const SampledSoftmaxOptions& options,
                            const OptionalTensor& class_weight, const OptionalTensor& log_z);

/// Runs the step, with autograd.
at::Tensor sampled_step(const SampledStep& step, const StepSampler& sampler,
                        const SampledSoftmaxOptions& options);

} // namespace xsoftmax
