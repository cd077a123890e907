#include "op/checks.h"
#include "op/optional.h"
#include "loss/sampled_step.h"
#include "proposal/candidate_set.h"
#include "proposal/cane_kind.h"
#include "proposal/modules.h"
#include "nn/modules.h"
#include "loss/reduction.h"

#include <xsoftmax/nn.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

namespace xsoftmax::nn {

using at::Tensor;

namespace { constexpr const char* kCaneModule = "CaneLoss"; } // namespace

std::string cane_estimator(const char* name, const std::string& noise_reduction) {
  TORCH_CHECK_VALUE(noise_reduction == "mean_of_logs" || noise_reduction == "log_of_mean", name,
                    ": expected noise_reduction to be \"mean_of_logs\" or \"log_of_mean\", got \"",
                    noise_reduction, "\"");
  return noise_reduction == "mean_of_logs" ? "cane" : "cane_log_of_mean";
}

namespace {

std::shared_ptr<samplers::SamplerImpl> noise_sampler(const samplers::SamplerOrName& sampler,
                                                     const NoiseOptions& request) {
  if (sampler.name().empty() || sampler.name() == "uniform") {
    return sampler.or_null();
  }
  return samplers::make_sampler(sampler.name(),
                                {.num_classes = request.num_classes,
                                 .num_samples = 4 * request.num_noises, // four tries each
                                 .dim = request.dim,
                                 .bias = request.bias,
                                 .shared = false});
}

} // namespace

samplers::ComplementSampler make_noise_sampler(const char* name,
                                               const samplers::SamplerOrName& sampler_argument,
                                               const NoiseOptions& request) {
  const int64_t num_noises = request.num_noises, num_classes = request.num_classes;
  TORCH_CHECK_VALUE(num_noises >= 0, name, ": expected num_noises of at least 0, got ", num_noises);
  const auto sampler = noise_sampler(sampler_argument, request);
  if (sampler == nullptr || num_noises == 0) {
    return samplers::ComplementSampler(num_classes, num_noises);
  }
  TORCH_CHECK_VALUE(sampler->num_classes() == num_classes, name, ": expected a noise_sampler of ",
                    num_classes, " classes, got one of ", sampler->num_classes());
  TORCH_CHECK_VALUE(
      request.follows_table || !sampler->follows_table(), name,
      ": expected a noise_sampler that does not follow a class table, since a tree has none, got ",
      sampler->name());
  const Tensor& candidates = request.candidates;
  const Tensor inside = candidates.defined() ? candidates.to(at::kCPU) : at::zeros({0}, at::kLong);
  auto noise = inside.numel() > 0 && inside.numel() < num_classes
      ? sampler->excluding(inside)
      : nullptr; // draws only classes outside
  noise = noise == nullptr ? sampler : noise;
  // A class that is neither a candidate nor ever drawn would never be compared with the others.
  const Tensor count =
      noise->log_count(at::zeros({1, request.dim}), at::arange(num_classes, at::kLong))
          .reshape({-1});
  Tensor impossible = count.isneginf().nonzero().squeeze(1).to(at::kCPU);
  impossible = impossible.masked_select(at::isin(impossible, inside).logical_not());
  TORCH_CHECK_VALUE(impossible.numel() == 0, name,
                    ": expected a noise_sampler that draws every class outside the candidates, got "
                    "one that never "
                    "draws ",
                    impossible.numel(), " of them, such as ",
                    impossible.numel() > 0 ? impossible[0].item<int64_t>() : -1);
  return samplers::ComplementSampler(noise, num_noises);
}

CaneLossImpl::CaneLossImpl(int64_t in_features, int64_t num_classes, const CaneOptions& cane,
                           const LossOptions& options)
    : CandidateLossImpl(kCaneModule, in_features, num_classes, options),
      candidate_sampler(cane.candidate_sampler.or_null()) {
  TORCH_CHECK_VALUE(options.label_smoothing == 0, kCaneModule,
                    ": expected label_smoothing of 0, got ", options.label_smoothing);
  TORCH_CHECK_VALUE(!cane.candidates.defined() || candidate_sampler == nullptr, kCaneModule,
                    ": expected candidates or candidate_sampler, got both");
  step_.estimator = cane_estimator(kCaneModule, cane.noise_reduction);
  step_.sparse_grad = cane.sparse_grad;
  if (candidate_sampler != nullptr) {
    TORCH_CHECK_VALUE(
        candidate_sampler->num_classes() == num_classes && candidate_sampler->num_samples() >= 1,
        kCaneModule, ": expected a candidate_sampler of ", num_classes,
        " classes that draws one at least, got one of ", candidate_sampler->num_classes(),
        " that draws ", candidate_sampler->num_samples());
    for (const auto& part : candidate_sampler->modules()) {
      TORCH_CHECK_VALUE(std::dynamic_pointer_cast<samplers::StreamingCountsImpl>(part) == nullptr,
                        kCaneModule,
                        ": expected candidates that do not depend on the target, got a ",
                        candidate_sampler->name(), " that counts targets");
    }
    TORCH_CHECK_VALUE(
        candidate_sampler != cane.noise_sampler.or_null(), kCaneModule,
        ": expected two samplers for candidates and noise, got one for both: make a second one");
    if (candidate_sampler->claimed()) { // claimed before the noise sampler
      candidate_sampler->claim(kCaneModule);
    }
    register_module("candidate_sampler", candidate_sampler);
  } else if (cane.candidates.defined()) {
    candidates_ = distinct_ids(cane.candidates, num_classes, kCaneModule, "candidates");
    TORCH_CHECK_VALUE(candidates_.numel() > 0, kCaneModule,
                      ": expected at least one class as candidates, got none");
  }
  noise = register_module("noise",
                          make_noise_sampler(kCaneModule, cane.noise_sampler,
                                             {.num_noises = cane.num_noises,
                                              .num_classes = num_classes,
                                              .dim = in_features,
                                              .bias = options_.bias,
                                              .candidates = candidates_}));
  noise->claim(kCaneModule);
  if (candidate_sampler != nullptr) {
    candidate_sampler->claim(kCaneModule);
  }
}

std::vector<std::shared_ptr<samplers::SamplerImpl>> CaneLossImpl::samplers_of_table() const {
  std::vector<std::shared_ptr<samplers::SamplerImpl>> found{noise.ptr()};
  if (candidate_sampler != nullptr) {
    found.push_back(candidate_sampler);
  }
  return found;
}

namespace {

UnionPart candidates_of(const Tensor& input, const std::optional<Tensor>& ids_argument,
                        const Tensor& fixed,
                        const std::shared_ptr<samplers::SamplerImpl>& sampler) {
  if (is_defined(ids_argument)) {
    TORCH_CHECK_VALUE(sampler == nullptr && !fixed.defined(), kCaneModule,
                      ": expected no candidates in the call of a loss that has its own, got some");
    const Tensor& ids = *ids_argument;
    TORCH_CHECK_VALUE(
        ids.dim() == 1 ||
            (ids.dim() >= 1 &&
             ids.sizes().slice(0, ids.dim() - 1) == input.sizes().slice(0, input.dim() - 1)),
        kCaneModule,
        ": expected candidates of shape [C], or that of target with one more dimension, got ",
        ids.sizes());
    return caller_candidates(ids.dim() <= 2 ? ids : ids.flatten(0, -2));
  }
  if (fixed.defined()) {
    return {/*shared=*/true,
            /*distinct=*/true,
            [fixed](const DrawRequest&) -> Proposal { return {head_set(fixed)}; },
            {}};
  }
  TORCH_CHECK_VALUE(
      sampler != nullptr, kCaneModule,
      ": expected candidates in each call of a loss whose options have none, got none");
  return samplers::part_of(sampler);
}

} // namespace

Tensor CaneLossImpl::forward(const Tensor& input, const Tensor& target,
                             const std::optional<Tensor>& candidates,
                             std::optional<at::Generator> generator) {
  if (!is_training()) {
    return exact(input, target);
  }
  check_table(input, target);
  const auto outside = [this](const DrawRequest& request, const Tensor& found) {
    return noise->sample_outside(request.queries, found, request.target.value_or(Tensor()),
                                 request.generator);
  };
  candidates_ = candidates_.defined() ? candidates_.to(input.device()) : candidates_;
  const auto sample = [&, part = candidates_of(input, candidates, candidates_, candidate_sampler)](
                          const DrawRequest& request) {
    return cane_sets(request, part, outside, num_classes_);
  };
  const auto prepare = [this](const Tensor& weight, const OptionalTensor& bias,
                              const std::optional<at::Generator>& generator) {
    if (candidate_sampler != nullptr) {
      candidate_sampler->prepare(weight, bias, generator);
    }
    noise->prepare(weight, bias, generator);
  };
  const StepSampler step_sampler{{/*shared=*/false, /*distinct=*/false, sample, {}},
                                 Tensor(),
                                 /*reads_queries=*/true,
                                 prepare};
  return sampled_step({.input = input,
                       .weight = linear->weight,
                       .bias = optional(linear->bias),
                       .target = target,
                       .class_weight = optional(weight),
                       .generator = std::move(generator),
                       .training = is_training()},
                      step_sampler, step_);
}

} // namespace xsoftmax::nn
