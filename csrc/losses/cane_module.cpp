#include "core/checks.h"
#include "core/optional.h"
#include "losses/modules.h"

#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace xsoftmax::nn {

using at::Tensor;

namespace {

constexpr const char* kName = "CaneLoss";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The ids of each set, -1 in place of repeats; in another order.
Tensor once(const Tensor& ids) {
  const Tensor ordered = std::get<0>(ids.sort(-1));
  const int64_t size = ids.size(-1);
  if (size == 0) {
    return ordered;
  }
  const Tensor changes = ordered.narrow(-1, 1, size - 1).ne(ordered.narrow(-1, 0, size - 1));
  return at::where(at::cat({at::ones_like(ordered.narrow(-1, 0, 1), at::kBool), changes}, -1), ordered, -1);
}

Tensor different_ids(const Tensor& ids, int64_t num_classes) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong && ids.dim() == 1, kName, ": expected candidates as 1-D int64 ids, got ",
                   check::name(ids.scalar_type()), " of shape ", ids.sizes());
  const Tensor ordered = std::get<0>(ids.sort());
  TORCH_CHECK_INDEX(ids.numel() == 0 || (ordered[0].item<int64_t>() >= 0 && ordered[-1].item<int64_t>() < num_classes), kName,
                    ": expected candidates in [0, ", num_classes, ")");
  TORCH_CHECK_VALUE(ids.numel() < 2 || ordered.diff().ne(0).all().item<bool>(), kName, ": expected candidates without repeats");
  return ordered;
}

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

CaneLossImpl::CaneLossImpl(int64_t in_features, int64_t num_classes, const CaneOptions& cane, const LossOptions& options)
    : LinearLossImpl(in_features, num_classes, options), cane_(cane), estimator_(cane_estimator(kName, cane.noise_reduction)) {
  TORCH_CHECK_VALUE(options.label_smoothing == 0, kName, ": expected label_smoothing of 0, got ", options.label_smoothing);
  TORCH_CHECK_VALUE(cane.num_noises >= 0, kName, ": expected num_noises of at least 0, got ", cane.num_noises);
  TORCH_CHECK_VALUE(!cane.candidates.defined() || cane.candidate_sampler == nullptr, kName,
                    ": expected candidates or a candidate_sampler, got both");
  const auto suited = noise_or_uniform(kName, cane.noise_sampler, num_classes), other = suited->for_table(in_features, options.bias);
  noise_sampler = register_module("noise", other ? other : suited);
  noise_ = std::make_shared<samplers::ComplementSampler>(noise_sampler);
  if (cane.candidates.defined()) {
    cane_.candidates = different_ids(cane.candidates, num_classes);
  }
  if (cane.candidate_sampler == nullptr) {
    TORCH_CHECK_VALUE(cane.num_candidates == 0 && !cane.shared, kName, ": expected num_candidates and shared beside a candidate_sampler");
    return;
  }
  TORCH_CHECK_VALUE(cane.candidate_sampler->num_classes() == num_classes, kName, ": expected a candidate_sampler of ", num_classes,
                    " classes, got one of ", cane.candidate_sampler->num_classes());
  TORCH_CHECK_VALUE(!cane.candidate_sampler->proposes_targets() &&
                        dynamic_cast<const samplers::UnionSamplerImpl*>(cane.candidate_sampler.get()) == nullptr,
                    kName, ": expected one sampler of candidates, which does not depend on the targets, got ", cane.candidate_sampler->name());
  const auto fitting = cane.candidate_sampler->for_table(in_features, options.bias);
  candidate_sampler = register_module("candidate_sampler", fitting ? fitting : cane.candidate_sampler);
  shared_ = cane.shared.value_or(candidate_sampler->shared_by_default());
  candidate_sampler->check_num_samples(cane.num_candidates, shared_);
}

Tensor CaneLossImpl::find_candidates(const Tensor& queries, const std::optional<Tensor>& named, std::optional<at::Generator> generator) {
  const bool fixed = cane_.candidates.defined();
  if (given(named)) {
    TORCH_CHECK_VALUE(!fixed && candidate_sampler == nullptr, kName, ": expected candidates with the call of a loss whose options name none");
    check::int64(kName, "candidates", *named);
    return once(named->dim() > 1 ? named->reshape({-1, named->size(-1)}) : *named);
  }
  TORCH_CHECK_VALUE(fixed || candidate_sampler != nullptr, kName,
                    ": expected candidates, which a loss whose options name none takes with each call");
  if (fixed) {
    cane_.candidates = cane_.candidates.to(queries.device());
    return cane_.candidates;
  }
  candidate_sampler->prepare(linear->weight, optional(linear->bias), generator);
  const auto drawn = candidate_sampler->sample(queries, cane_.num_candidates, shared_, std::nullopt, generator);
  return drawn.distinct ? drawn.ids : once(drawn.ids);
}

Tensor CaneLossImpl::forward(const Tensor& input, const Tensor& target, const std::optional<Tensor>& candidates,
                             std::optional<at::Generator> generator) {
  if (!is_training()) {
    return exact(input, target);
  }
  const Tensor queries = flatten(input, target).detach(), flat = target.reshape({-1});
  const Tensor counted = at::where(flat.eq(options_.ignore_index), 0, flat);
  noise_sampler->prepare(linear->weight, optional(linear->bias), generator);
  const Tensor found = find_candidates(queries, candidates, generator);
  const auto noise = noise_->sample(queries, cane_.num_noises, found, counted, generator);
  const Tensor ids = found.clamp_min(0);
  const Tensor log_count = at::zeros(found.sizes(), noise.log_count.options()).masked_fill(found.lt(0), kInfinity);
  for (const auto& sampler : {noise_sampler, candidate_sampler}) {
    if (sampler != nullptr) {
      sampler->note(ids);
      sampler->note(noise.ids);
      sampler->note(counted);
    }
  }
  const bool for_all = found.dim() == 1;
  const Tensor private_ids = for_all ? noise.ids : at::cat({ids, noise.ids}, 1);
  const Tensor private_log_count = for_all ? noise.log_count : at::cat({log_count, noise.log_count}, 1);
  Tensor loss = sampled_softmax_loss(input, linear->weight, optional(linear->bias), target, private_ids, for_all ? optional(ids) : std::nullopt,
                                     private_log_count, for_all ? optional(log_count) : std::nullopt, noise.target_log_count,
                                     optional(weight), estimator_, true, for_all ? 0 : ids.size(1), for_all ? ids.size(0) : 0, reduction_,
                                     options_.ignore_index, 0.0, cane_.sparse_grad);
  for (const auto& sampler : {noise_sampler, candidate_sampler}) {
    if (sampler != nullptr && sampler->learns()) {
      const Tensor known = at::where(flat.ne(options_.ignore_index).unsqueeze(1), queries, at::zeros({}, queries.options()));
      loss = with_gradient_of(loss, sampler->auxiliary_loss(known, linear->weight, optional(linear->bias), generator));
    }
  }
  return loss;
}

} // namespace xsoftmax::nn
