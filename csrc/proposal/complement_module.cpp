#include <xsoftmax/sampler.h>

#include "op/options.h"
#include "proposal/complement_sample.h"
#include "proposal/modules.h"
#include "proposal/union_kind.h"

#include <ATen/ops/full.h>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;

constexpr const char* kComplementModule = "ComplementSampler";

int64_t checked_classes_of(const std::shared_ptr<SamplerImpl>& sampler, int64_t num_samples) {
  TORCH_CHECK_VALUE(sampler != nullptr, kComplementModule, ": expected a sampler, got none");
  TORCH_CHECK_VALUE(!sampler->shared() && !sampler->distinct(), kComplementModule,
                    ": expected a sampler of private independent draws, got ", sampler->name());
  TORCH_CHECK_VALUE(num_samples >= 1 && sampler->num_samples() >= num_samples &&
                        sampler->num_samples() % num_samples == 0,
                    kComplementModule,
                    ": expected a sampler that draws a multiple of num_samples = ", num_samples,
                    " for each query, got ", sampler->num_samples());
  return sampler->num_classes();
}

std::string option_text(int64_t num_classes, int64_t num_samples, int64_t tries) {
  return print_options(
      ComplementOptions{.num_classes = num_classes, .num_samples = num_samples, .tries = tries});
}

} // namespace

std::shared_ptr<SamplerImpl> SamplerImpl::outside_target() {
  return ComplementSampler(std::static_pointer_cast<SamplerImpl>(shared_from_this()), num_samples())
      .ptr();
}

ComplementSamplerImpl::ComplementSamplerImpl(std::shared_ptr<SamplerImpl> sampler,
                                             int64_t num_samples)
    : SamplerImpl(kComplementModule, checked_classes_of(sampler, num_samples), num_samples,
                  /*shared=*/false),
      sampler_(std::move(sampler)),
      options_(option_text(num_classes(), num_samples, sampler_->num_samples() / num_samples)) {
  sampler_->claim(kComplementModule);
  register_module("sampler", sampler_);
}

ComplementSamplerImpl::ComplementSamplerImpl(int64_t num_classes, int64_t num_samples)
    : SamplerImpl(kComplementModule, num_classes, num_samples, /*shared=*/false),
      options_(option_text(num_classes, num_samples, 0)) {}

Proposal ComplementSamplerImpl::sample(const Tensor& queries, const Tensor& target,
                                       std::optional<at::Generator> generator) {
  const DrawRequest request{queries, optional(target), std::move(generator), is_training()};
  return {sample_outside(queries, outside_of_targets(request), target, request.generator)};
}

CandidateSet ComplementSamplerImpl::sample_outside(const Tensor& queries, const Tensor& candidates,
                                                   const Tensor& target,
                                                   std::optional<at::Generator> generator) {
  const DrawRequest request{queries, optional(target), std::move(generator), is_training()};
  if (sampler_ == nullptr) {
    return xsoftmax::sample_outside(request, candidates, nullptr, options_);
  }
  const UnionPart part = part_of(sampler_);
  return xsoftmax::sample_outside(request, candidates, &part, options_);
}

Tensor ComplementSamplerImpl::log_count(const Tensor&, const Tensor&) {
  TORCH_CHECK_VALUE(false, kComplementModule,
                    ": expected counts of a draw, got a call of log_count: they depend on the "
                    "target, so in a union it has to be the last private part");
}

std::function<void()> ComplementSamplerImpl::plan_growth(int64_t num_classes, const Tensor& rows,
                                                         const std::optional<Tensor>& bias) {
  return planned(
      num_classes, sampler_ != nullptr ? sampler_->plan_growth(num_classes, rows, bias) : [] {});
}

std::function<void()> ComplementSamplerImpl::plan_resize(int64_t num_classes, const Tensor& rows,
                                                         const std::optional<Tensor>& bias) {
  return planned(
      num_classes, sampler_ != nullptr ? sampler_->plan_resize(num_classes, rows, bias) : [] {});
}

std::function<void()> ComplementSamplerImpl::planned(int64_t num_classes,
                                                     std::function<void()> plan) {
  TORCH_CHECK_VALUE(num_classes >= 1, kComplementModule,
                    ": expected num_classes of at least 1, got ", num_classes);
  if (!plan) {
    return {};
  }
  return [this, num_classes, plan = std::move(plan)] {
    plan();
    auto options = parse_options<ComplementOptions>(kComplementModule, options_);
    options.num_classes = num_classes;
    options_ = print_options(options);
    set_num_classes(num_classes);
  };
}

void ComplementSamplerImpl::prepare(const Tensor& weight, const std::optional<Tensor>& bias,
                                    std::optional<at::Generator> generator) {
  if (sampler_ != nullptr) {
    sampler_->prepare(weight, bias, generator);
  }
}

std::map<std::string, double> ComplementSamplerImpl::refresh(const Tensor& weight,
                                                             const std::optional<Tensor>& bias) {
  return sampler_ != nullptr ? sampler_->refresh(weight, bias) : std::map<std::string, double>{};
}

} // namespace xsoftmax::samplers
