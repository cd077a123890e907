#include "loss/sampled_step.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "proposal/candidate_set.h"
#include "estimator/estimators.h"
#include "loss/reduction.h"
#include "loss/soft_targets.h"
#include "proposal/sampler_kind.h"
#include "proposal/union_kind.h"

#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSampledStep = "sampled_softmax_loss"; // the operator that users call

// Returns the part of a union for classes from the caller that are always scored.
UnionPart caller_part(const Tensor& ids, const Tensor& log_count) {
  const bool shared = ids.dim() == 1;
  return {shared, /*distinct=*/true,
          [ids, log_count](const DrawRequest& request) -> Proposal {
            Tensor target_log_count;
            if (is_defined(request.target)) {
              const Tensor& target = *request.target;
              target_log_count =
                  always_scored_log_count(ids, log_count,
                                          target.dim() == 2 ? target : target.unsqueeze(1))
                      .view_symint(target.sym_sizes());
            }
            return {{ids, log_count, target_log_count, /*distinct=*/true}};
          },
          [ids, log_count](const Tensor&, const Tensor& query_ids) {
            return always_scored_log_count(ids, log_count, query_ids);
          },
          /*from_caller=*/true};
}

Proposal propose(const SampledStep& step, const StepSampler& sampler,
                 const SampledSoftmaxOptions& options, const Tensor& listed_targets) {
  const bool soft = is_defined(step.target_prob),
             has_head = sampler.head.defined() && sampler.head.sym_numel() != 0;
  check_sampled_loss(step.input, step.weight, listed_targets, step.class_weight, step.log_z, soft,
                     options);
  auto [queries, counted] = counted_queries(step.input, listed_targets, step.weight,
                                            options.ignore_index, soft, sampler.reads_queries);
  if (options.logit_scale != 1 && sampler.reads_queries) {
    queries = queries * options.logit_scale;
  }
  std::tuple<Tensor, Tensor> negatives; // checked before the sampler changes
  if (is_defined(step.negatives)) {
    const Tensor head = has_head ? sampler.head : step.target.new_empty({0});
    negatives = caller_set(*step.negatives, step.negative_log_count, step.input, head,
                           step.weight.size(0), "SampledSoftmaxLoss");
  }
  if (step.prepare && sampler.prepare) {
    sampler.prepare(step.weight, step.bias, step.generator);
  }
  const bool counts = soft || counted.dim() == 2 ||
      find_estimator(kSampledStep, options.estimator).traits.needs_target_count;
  const DrawRequest request{queries, counted, step.generator, step.training, 0, counts};
  Proposal sets;
  if (has_head) {
    sets.push_back(head_set(sampler.head));
  }
  const auto& [ids, log_count] = negatives;
  const bool always_scored = is_defined(step.negatives) && !is_defined(step.negative_log_count);
  for (CandidateSet& set : always_scored
           ? sample_union(request, {caller_part(ids, log_count), sampler.part})
           : sampler.part.sample(request)) {
    sets.push_back(std::move(set));
  }
  if (is_defined(step.negatives) && !always_scored) {
    sets.push_back({ids, log_count, Tensor(), /*distinct=*/false});
  }
  return sets;
}

} // namespace

Tensor sampled_step(const SampledStep& step, const StepSampler& sampler,
                    const SampledSoftmaxOptions& options) {
  TORCH_CHECK_VALUE(is_defined(step.negatives) || !is_defined(step.negative_log_count),
                    kSampledStep, ": expected negatives with negative_log_count, got none");
  Proposal sets;
  {
    const at::AutoDispatchBelowADInplaceOrView guard; // samples have no gradient
    const Tensor listed_targets = is_defined(step.target_prob)
        ? soft_targets(kSampledStep, step.input, step.target, *step.target_prob,
                       options.ignore_index)
        : step.target;
    sets = propose(step, sampler, options, listed_targets);
  }
  if (is_defined(step.target_prob)) {
    return sampled_softmax_loss(step.input, step.weight, step.bias, step.target, sets, options,
                                step.class_weight, step.log_z, step.target_prob);
  }
  return loss_of_proposal(step.input, step.weight, step.bias, step.target, sets, options,
                          step.class_weight, step.log_z);
}

namespace {

Tensor sampled_step_op(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& target, at::TensorList state, std::string_view sampler,
                       std::string_view options, std::optional<at::Generator> generator,
                       bool training, bool prepare, const c10::List<OptionalTensor>& others) {
  TORCH_CHECK_VALUE(others.empty() || others.size() == 5, kSampledStep,
                    ": expected others as none, or class_weight, log_z, target_prob, negatives and "
                    "negative_log_count, got ",
                    others.size(), " of them");
  const auto other = [&](size_t i) {
    return others.empty() ? std::nullopt : OptionalTensor(others.get(i));
  };
  const SampledStep step{input,    weight,   bias,     target,   other(0),
                         other(1), other(2), other(3), other(4), std::move(generator),
                         training, prepare};
  SamplerView sampler_view(kSampledStep, sampler, state);
  Tensor head;
  if (const auto parts = sampler_view.parts();
      sampler_view.name() == "disjoint" && parts.size() == 2 && parts[0].name() == "head") {
    head = parts[0].tensors()[0];
    sampler_view = parts[1];
  }
  const StepSampler step_sampler{part_of(sampler_view), head, sampler_view.reads_queries(),
                                 [&](const Tensor& weight, const OptionalTensor& bias,
                                     const std::optional<at::Generator>& generator) {
                                   sampler_view.step(weight, bias, generator);
                                 }};
  return sampled_step(step, step_sampler,
                      parse_options<SampledSoftmaxOptions>(kSampledStep, options));
}

} // namespace

XSOFTMAX_OPERATORS(m) {
  m.def(
      "sampled_step(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor(a!)[] state, "
      "str sampler, str options, Generator? generator, "
      "bool training, bool prepare, Tensor?[] others) -> Tensor",
      sampled_step_op);
  m.def(
      "check_sampled_loss(Tensor input, Tensor weight, Tensor target, Tensor? class_weight, "
      "Tensor? log_z, bool soft, str options) -> ()",
      [](const Tensor& input, const Tensor& weight, const Tensor& target,
         const OptionalTensor& class_weight, const OptionalTensor& log_z, bool soft,
         std::string_view options) {
        check::strided_tensors(kSampledStep,
                               {{"input", &input}, {"weight", &weight}, {"target", &target}});
        check::dim(kSampledStep, "weight", weight, 2);
        check_sampled_loss(input, weight, target, class_weight, log_z, soft,
                           parse_options<SampledSoftmaxOptions>(kSampledStep, options));
      });
}

} // namespace xsoftmax
