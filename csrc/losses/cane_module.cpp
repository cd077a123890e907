#include "core/checks.h"
#include "core/optional.h"
#include "losses/candidate_set.h"
#include "losses/modules.h"

#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <memory>
#include <vector>

namespace xsoftmax::nn {

using at::Tensor;

namespace {

constexpr const char* kName = "CaneLoss";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

} // namespace

std::string cane_estimator(const char* name, const std::string& noise_reduction) {
  TORCH_CHECK_VALUE(noise_reduction == "mean_of_logs" || noise_reduction == "log_of_mean", name,
                    ": expected noise_reduction to be \"mean_of_logs\" or \"log_of_mean\", got \"", noise_reduction, "\"");
  return noise_reduction == "mean_of_logs" ? "cane" : "cane_log_of_mean";
}

std::shared_ptr<samplers::SamplerImpl> noise_or_uniform(const char* name, const std::shared_ptr<samplers::SamplerImpl>& sampler,
                                                        int64_t num_classes) {
  if (sampler == nullptr) {
    return samplers::UniformSampler(num_classes).ptr();
  }
  TORCH_CHECK_VALUE(sampler->num_classes() == num_classes, name, ": expected a noise_sampler of ", num_classes, " classes, got one of ",
                    sampler->num_classes());
  return sampler;
}

void check_draws_all(const char* name, samplers::SamplerImpl& sampler, const Tensor& candidates) {
  Tensor never;
  if (const auto* adaptive = dynamic_cast<const samplers::AdaptiveSamplerImpl*>(&sampler)) {
    never = adaptive->excluded();
  } else if (dynamic_cast<const samplers::StaticSamplerImpl*>(&sampler) != nullptr) {
    const Tensor all = at::arange(sampler.num_classes(), at::kLong);
    never = sampler.log_prob(Tensor(), all).isneginf().nonzero().squeeze(1);
  } else {
    return;
  }
  never = never.to(at::kCPU);
  if (candidates.defined()) {
    never = never.masked_select(at::isin(never, candidates.to(at::kCPU)).logical_not());
  }
  TORCH_CHECK_VALUE(never.numel() == 0, name, ": expected a noise_sampler that draws every class outside the candidates, got one that never "
                    "draws ", never.numel(), " of them, such as ", never.numel() > 0 ? never[0].item<int64_t>() : -1);
}

CaneLossImpl::CaneLossImpl(int64_t in_features, int64_t num_classes, const CaneOptions& cane, const LossOptions& options)
    : LinearLossImpl(in_features, num_classes, options), cane_(cane), estimator_(cane_estimator(kName, cane.noise_reduction)) {
  TORCH_CHECK_VALUE(options.label_smoothing == 0, kName, ": expected label_smoothing of 0, got ", options.label_smoothing);
  TORCH_CHECK_VALUE(cane.num_noises >= 0, kName, ": expected num_noises of at least 0, got ", cane.num_noises);
  TORCH_CHECK_VALUE(!cane.candidates.defined() || cane.candidate_sampler == nullptr, kName,
                    ": expected candidates or a candidate_sampler, got both");
  auto suited = noise_or_uniform(kName, cane.noise_sampler, num_classes);
  if (cane.candidates.defined()) {
    TORCH_CHECK_VALUE(cane.candidates.numel() > 0, kName, ": expected at least one of candidates, without which there is nothing to learn");
    cane_.candidates = different_ids(kName, "candidates", cane.candidates, num_classes);
  }
  check_draws_all(kName, *suited, cane_.candidates);
  const bool uniform = dynamic_cast<const samplers::UniformSamplerImpl*>(suited.get()) != nullptr;
  const bool is_static = dynamic_cast<const samplers::StaticSamplerImpl*>(suited.get()) != nullptr;
  if (is_static && !uniform && cane_.candidates.defined() && cane_.candidates.numel() < num_classes) {
    suited = suited->excluding(cane_.candidates); // its draws then are all outside
  }
  const auto other = suited->for_table(in_features, options.bias);
  noise_sampler = register_module("noise", other ? other : suited);
  noise_ = std::make_shared<samplers::ComplementSampler>(noise_sampler);
  if (cane.candidate_sampler == nullptr) {
    TORCH_CHECK_VALUE(cane.num_candidates == 0 && !cane.shared, kName, ": expected num_candidates and shared beside a candidate_sampler");
    return;
  }
  TORCH_CHECK_VALUE(cane.candidate_sampler->num_classes() == num_classes, kName, ": expected a candidate_sampler of ", num_classes,
                    " classes, got one of ", cane.candidate_sampler->num_classes());
  TORCH_CHECK_VALUE(!cane.candidate_sampler->proposes_targets() &&
                        dynamic_cast<const samplers::UnionSamplerImpl*>(cane.candidate_sampler.get()) == nullptr,
                    kName, ": expected one sampler of candidates, which does not depend on the targets, got ", cane.candidate_sampler->name());
  TORCH_CHECK_VALUE(cane.num_candidates >= 1, kName, ": expected num_candidates of at least 1 beside a candidate_sampler, got ",
                    cane.num_candidates);
  const auto fitting = cane.candidate_sampler->for_table(in_features, options.bias);
  candidate_sampler = register_module("candidate_sampler", fitting ? fitting : cane.candidate_sampler);
  shared_ = cane.shared.value_or(candidate_sampler->shared_by_default());
  candidate_sampler->check_num_samples(cane.num_candidates, shared_);
}

Tensor CaneLossImpl::find_candidates(const Tensor& queries, at::IntArrayRef batch, const std::optional<Tensor>& named,
                                     std::optional<at::Generator> generator) {
  const bool fixed = cane_.candidates.defined();
  if (given(named)) {
    TORCH_CHECK_VALUE(!fixed && candidate_sampler == nullptr, kName, ": expected candidates with the call of a loss whose options name none");
    check::int64(kName, "candidates", *named);
    TORCH_CHECK_VALUE(named->dim() == 1 || (named->dim() > 1 && named->sizes().slice(0, named->dim() - 1) == batch), kName,
                      ": expected candidates of shape [C] or of target's and one more dimension, got candidates ", named->sizes(), " and target ",
                      batch);
    return candidate_set(named->dim() <= 2 ? *named : named->flatten(0, -2), num_classes_);
  }
  TORCH_CHECK_VALUE(fixed || candidate_sampler != nullptr, kName,
                    ": expected candidates, which a loss whose options name none takes with each call");
  if (fixed) {
    cane_.candidates = cane_.candidates.to(queries.device());
    return cane_.candidates;
  }
  if (candidate_sampler != noise_sampler) {
    candidate_sampler->prepare(linear->weight, optional(linear->bias), generator);
  }
  const auto drawn = candidate_sampler->sample(queries, cane_.num_candidates, shared_, std::nullopt, generator);
  return drawn.distinct ? drawn.ids : candidate_set(drawn.ids, num_classes_);
}

Tensor CaneLossImpl::forward(const Tensor& input, const Tensor& target, const std::optional<Tensor>& candidates,
                             std::optional<at::Generator> generator) {
  if (!is_training()) {
    return exact(input, target);
  }
  const Tensor queries = flatten(input, target).detach(), flat = target.reshape({-1});
  const Tensor counted = at::where(flat.eq(options_.ignore_index), 0, flat);
  noise_sampler->prepare(linear->weight, optional(linear->bias), generator);
  const Tensor found = find_candidates(queries, target.sizes(), candidates, generator);
  const auto noise = noise_->sample(queries, cane_.num_noises, found, counted, generator);
  const Tensor ids = found.clamp_min(0);
  const Tensor log_count = at::zeros(found.sizes(), noise.log_count.options()).masked_fill(found.lt(0), kInfinity);
  std::vector<std::shared_ptr<samplers::SamplerImpl>> each{noise_sampler}; // one that does both takes each step once
  if (candidate_sampler != nullptr && candidate_sampler != noise_sampler) {
    each.push_back(candidate_sampler);
  }
  for (const auto& sampler : each) {
    sampler->note(ids);
    sampler->note(noise.ids);
    sampler->note(counted);
  }
  const bool for_all = found.dim() == 1;
  const Tensor private_ids = for_all ? noise.ids : at::cat({ids, noise.ids}, 1);
  const Tensor private_log_count = for_all ? noise.log_count : at::cat({log_count, noise.log_count}, 1);
  Tensor loss = sampled_softmax_loss(input, linear->weight, optional(linear->bias), target, private_ids, for_all ? optional(ids) : std::nullopt,
                                     private_log_count, for_all ? optional(log_count) : std::nullopt, noise.target_log_count,
                                     optional(weight), estimator_, true, for_all ? 0 : ids.size(1), for_all ? ids.size(0) : 0, reduction_,
                                     options_.ignore_index, 0.0, cane_.sparse_grad);
  for (const auto& sampler : each) {
    if (sampler->learns()) {
      const Tensor known = at::where(flat.ne(options_.ignore_index).unsqueeze(1), queries, at::zeros({}, queries.options()));
      loss = with_gradient_of(loss, sampler->auxiliary_loss(known, linear->weight, optional(linear->bias), generator));
    }
  }
  return loss;
}

} // namespace xsoftmax::nn
