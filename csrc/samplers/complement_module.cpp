#include <xsoftmax/complement_sampler.h>

#include "core/options.h"
#include "samplers/complement_sample.h"
#include "samplers/modules.h"

#include <ATen/ops/full.h>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;

constexpr const char* kName = "ComplementSampler";

int64_t checked_classes_of(const std::shared_ptr<SamplerImpl>& sampler, int64_t num_samples) {
  TORCH_CHECK_VALUE(sampler != nullptr, kName, ": expected a sampler, got none");
  TORCH_CHECK_VALUE(!sampler->shared() && !sampler->distinct(), kName, ": expected a sampler of private independent draws, got ", sampler->name());
  TORCH_CHECK_VALUE(num_samples >= 1 && sampler->num_samples() >= num_samples && sampler->num_samples() % num_samples == 0, kName,
                    ": expected a sampler that draws a multiple of num_samples = ", num_samples, " for each query, got ", sampler->num_samples());
  return sampler->num_classes();
}

std::string option_text(int64_t num_classes, int64_t num_samples, int64_t tries) {
  return print_options(ComplementOptions{.num_classes = num_classes, .num_samples = num_samples, .tries = tries});
}

} // namespace

std::shared_ptr<SamplerImpl> SamplerImpl::outside_target() {
  return ComplementSampler(std::static_pointer_cast<SamplerImpl>(shared_from_this()), num_samples()).ptr();
}

ComplementSamplerImpl::ComplementSamplerImpl(std::shared_ptr<SamplerImpl> sampler, int64_t num_samples)
    : SamplerImpl(kName, checked_classes_of(sampler, num_samples), num_samples, /*shared=*/false), sampler_(std::move(sampler)),
      options_(option_text(num_classes(), num_samples, sampler_->num_samples() / num_samples)) {
  sampler_->claim(kName);
  register_module("sampler", sampler_);
}

ComplementSamplerImpl::ComplementSamplerImpl(int64_t num_classes, int64_t num_samples)
    : SamplerImpl(kName, num_classes, num_samples, /*shared=*/false), options_(option_text(num_classes, num_samples, 0)) {}

Proposal ComplementSamplerImpl::sample(const Tensor& queries, const Tensor& target, std::optional<at::Generator> generator) {
  const Tensor outside_of = !target.defined() ? at::full({0}, -1, queries.options().dtype(at::kLong))
      : target.dim() == 1                     ? target.unsqueeze(1)
                                              : target.narrow(1, 0, 1);
  return {sample_outside(queries, outside_of, target, generator)};
}

CandidateSet ComplementSamplerImpl::sample_outside(const Tensor& queries, const Tensor& candidates, const Tensor& target,
                                                   std::optional<at::Generator> generator) {
  const int64_t rows = queries.size(0);
  TORCH_CHECK_VALUE(candidates.dim() == 1 || (candidates.dim() == 2 && candidates.size(0) == rows), kName, ": expected candidates of shape [C] or [", rows,
                    ", C], got ", candidates.sizes());
  static const auto sort = find_op<decltype(sort_sets)>("xsoftmax::sort_sets");
  static const auto draw = find_op<decltype(complement_sample)>("xsoftmax::complement_sample");
  static const auto count = find_op<decltype(complement_log_count)>("xsoftmax::complement_log_count");
  const Tensor inside = sort.call(candidates.dim() == 2 ? candidates : candidates.unsqueeze(0), num_classes());
  OptionalTensor draws, inside_count, log_count, target_count;
  if (sampler_ != nullptr) {
    const Proposal drawn = sampler_->sample(queries, target, generator);
    TORCH_CHECK_VALUE(drawn.size() == 1, kName, ": expected a sampler of one set, got ", drawn.size(), " sets of ", sampler_->name());
    draws = drawn[0].ids;
    target_count = optional(drawn[0].target_log_count);
    const Tensor classes = inside.clamp_max(num_classes() - 1);
    inside_count = sampler_->log_count(queries, candidates.dim() == 2 ? classes : classes.select(0, 0));
  }
  const Tensor ids = draw.call(draw_seed(queries, generator), inside, draws, queries, options_);
  if (sampler_ != nullptr) {
    log_count = sampler_->log_count(queries, ids);
  }
  const auto [of_ids, of_target] = count.call(inside, inside_count, ids, log_count, optional(target), target_count, options_);
  return {ids, of_ids, target.defined() ? of_target : Tensor(), /*distinct=*/false};
}

Tensor ComplementSamplerImpl::log_count(const Tensor&, const Tensor&) {
  TORCH_CHECK_VALUE(false, kName,
                    ": expected counts of a draw, got a call of log_count: they depend on the target, so in a union it has to be the last private part");
}

std::function<void()> ComplementSamplerImpl::plan_growth(int64_t num_classes, const Tensor& rows, const std::optional<Tensor>& bias) {
  return planned(num_classes, sampler_ != nullptr ? sampler_->plan_growth(num_classes, rows, bias) : [] {});
}

std::function<void()> ComplementSamplerImpl::plan_resize(int64_t num_classes, const Tensor& rows, const std::optional<Tensor>& bias) {
  return planned(num_classes, sampler_ != nullptr ? sampler_->plan_resize(num_classes, rows, bias) : [] {});
}

std::function<void()> ComplementSamplerImpl::planned(int64_t num_classes, std::function<void()> plan) {
  TORCH_CHECK_VALUE(num_classes >= 1, kName, ": expected num_classes of at least 1, got ", num_classes);
  if (!plan) {
    return {};
  }
  return [this, num_classes, plan = std::move(plan)] {
    plan();
    auto options = parse_options<ComplementOptions>(kName, options_);
    options.num_classes = num_classes;
    options_ = print_options(options);
    set_num_classes(num_classes);
  };
}

void ComplementSamplerImpl::prepare(const Tensor& weight, const std::optional<Tensor>& bias, std::optional<at::Generator> generator) {
  if (sampler_ != nullptr) {
    sampler_->prepare(weight, bias, generator);
  }
}

std::map<std::string, double> ComplementSamplerImpl::refresh(const Tensor& weight, const std::optional<Tensor>& bias) {
  return sampler_ != nullptr ? sampler_->refresh(weight, bias) : std::map<std::string, double>{};
}

} // namespace xsoftmax::samplers
