#pragma once

#include "core/optional.h"
#include "samplers/union_kind.h"

#include <xsoftmax/loss_options.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>

namespace xsoftmax {

// sampled_step(input, weight, bias, target, state!, sampler, options, generator, training, prepare, others) -> loss
//
// A training step of a loss over a class table, up to the reduced loss: the sampler brings itself up to date, draws, and
// sampled_softmax_loss (xsoftmax/ops.h) scores what it proposes.
//
//     prepare: sampler.prepare(weight, bias, generator)
//     queries, masked_target = (logit_scale * input).detach(), target          # 0 and -1 where a target is ignored
//     sets = sampler.sample(queries, masked_target, generator)
//     loss = sampled_softmax_loss(input, weight, bias, target, sets, options, class_weight, log_z, target_prob)
//
// sampler, state: as of samplers/sampler_kind.h. options: SampledSoftmaxOptions. training: a sampler that counts the targets of
// a stream does so. others: class_weight [N], log_z, target_prob [*, T], negatives int64 [P] or [*, P] and
// negative_log_count of their shape, each of them none where it is not given. Negatives without counts are always
// candidates: the expected count of a draw is added to their count of 1. Log counts that the caller gives are used unchanged.
//
// All arguments are checked before the sampler changes.

/// What sampled_step takes beside the sampler.
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

/// What a step asks of its sampler.
struct StepSampler {
  UnionPart part;             ///< without the head
  at::Tensor head;            ///< int64 [H], classes that are always there, which the sampler leaves out; undefined: none
  bool reads_queries = true;  ///< draws depend on the query vectors, not only on which targets are ignored
  std::function<void(const at::Tensor& weight, const OptionalTensor& bias, const std::optional<at::Generator>& generator)> prepare;
};

/// Refuses what sampled_softmax_loss refuses beside its batch (check_batch) and the proposal. soft: with target_prob. Also an operator, check_sampled_loss, for
/// steps whose sampler is written in Python.
void check_sampled_loss(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target, const OptionalTensor& class_weight,
                        const OptionalTensor& log_z, bool soft, const SampledSoftmaxOptions& options);

/// sampled_softmax_loss of a batch and options that are checked already (check_batch, check_sampled_loss); without target_prob.
at::Tensor loss_of_proposal(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target, const Proposal& sets,
                            const SampledSoftmaxOptions& options, const OptionalTensor& class_weight, const OptionalTensor& log_z);

/// With autograd.
at::Tensor sampled_step(const SampledStep& step, const StepSampler& sampler, const SampledSoftmaxOptions& options);

} // namespace xsoftmax
