#include <xsoftmax/static_samplers.h>

#include "core/options.h"
#include "samplers/modules.h"
#include "samplers/static_sample.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/zeros.h>

namespace xsoftmax::samplers {

using at::Tensor;

struct StaticSamplerImpl::Law {
  Law(const char* owner, const Tensor& weights, std::optional<double> power, const Tensor& classes, const StaticOptions& options) : name(owner) {
    std::tie(tables, text) = static_tables(owner, optional(weights), power, optional(classes), print_options(options));
    made = parse_options<StaticOptions>(owner, text);
  }
  const char* name;
  std::vector<Tensor> tables;
  std::string text;
  StaticOptions made;
};

namespace {

StaticOptions drawing(const char* law, int64_t num_classes, int64_t num_samples, const DrawOptions& options) {
  const bool shared = options.shared.value_or(true);
  return {.law = law, .num_classes = num_classes, .num_samples = num_samples, .shared = shared, .distinct = options.distinct.value_or(shared)};
}

DrawOptions asked(const SamplerRequest& request) { return {.shared = request.shared, .exclude = request.exclude}; }

int64_t num_samples_of(const char* name, const SamplerRequest& request) {
  TORCH_CHECK_VALUE(request.num_samples.has_value(), "make_sampler: expected num_samples for \"", name, "\", got none");
  return *request.num_samples;
}

template <typename Sampler>
void register_law(const char* name) {
  register_sampler(name, [name](const SamplerRequest& request) {
    return std::make_shared<Sampler>(request.num_classes, num_samples_of(name, request), asked(request));
  });
}

std::shared_ptr<SamplerImpl> make_unigram(const SamplerRequest& request) {
  const int64_t size = request.counts.defined() ? request.counts.numel() : 0;
  TORCH_CHECK_VALUE(size == request.num_classes, "make_sampler: expected counts of ", request.num_classes, " classes for \"unigram\", got ", size);
  return std::make_shared<UnigramSamplerImpl>(request.counts, num_samples_of("unigram", request), 0.75, asked(request));
}

[[maybe_unused]] const bool registered = [] {
  register_law<UniformSamplerImpl>("uniform");
  register_law<LogUniformSamplerImpl>("log_uniform");
  register_sampler("unigram", make_unigram);
  register_sampler("in_batch", [](const SamplerRequest& request) {
    TORCH_CHECK_VALUE(!request.num_samples.has_value(), "make_sampler: expected no num_samples for \"in_batch\", whose draws are the batch's targets");
    return std::make_shared<InBatchSamplerImpl>(request.num_classes);
  });
  return true;
}();

} // namespace

StaticSamplerImpl::StaticSamplerImpl(const Law& law)
    : SamplerImpl(law.name, law.made.num_classes, law.made.num_samples, law.made.shared, law.made.distinct), tables_(law.tables),
      options_(law.text) {}

StaticSamplerImpl::StaticSamplerImpl(const Tensor& weights, int64_t num_samples, const DrawOptions& options)
    : StaticSamplerImpl(Law("StaticSampler", weights, {}, options.exclude, drawing("table", 0, num_samples, options))) {}
UniformSamplerImpl::UniformSamplerImpl(int64_t num_classes, int64_t num_samples, const DrawOptions& options)
    : StaticSamplerImpl(Law("UniformSampler", {}, {}, options.exclude, drawing("uniform", num_classes, num_samples, options))) {}
LogUniformSamplerImpl::LogUniformSamplerImpl(int64_t num_classes, int64_t num_samples, const DrawOptions& options)
    : StaticSamplerImpl(Law("LogUniformSampler", {}, {}, options.exclude, drawing("log_uniform", num_classes, num_samples, options))) {}
UnigramSamplerImpl::UnigramSamplerImpl(const Tensor& counts, int64_t num_samples, double power, const DrawOptions& options)
    : StaticSamplerImpl(Law("UnigramSampler", counts, power, options.exclude, drawing("table", 0, num_samples, options))) {}
FixedSamplerImpl::FixedSamplerImpl(int64_t num_classes, const Tensor& ids)
    : StaticSamplerImpl(Law("FixedSampler", {}, {}, ids, drawing("fixed", num_classes, 0, {}))) {}

Proposal StaticSamplerImpl::sample(const Tensor& queries, const Tensor& target, std::optional<at::Generator> generator) {
  static const auto op = find_op<decltype(static_sample)>("xsoftmax::static_sample");
  return one_set(op.call(draw_seed(queries, generator), queries, optional(target), tables_, options_), target, distinct());
}

Tensor StaticSamplerImpl::log_count(const Tensor&, const Tensor& ids) {
  static const auto op = find_op<decltype(static_log_count)>("xsoftmax::static_log_count");
  return op.call(ids, tables_, options_);
}

std::shared_ptr<SamplerImpl> StaticSamplerImpl::excluding(const Tensor& ids) const {
  const std::string owner = name();
  const Tensor weights = tables_[kProbability].numel() > 0 ? tables_[kProbability] : Tensor();
  const Law law(owner.c_str(), weights, {}, ids, parse_options<StaticOptions>(owner.c_str(), options_));
  return std::shared_ptr<SamplerImpl>(new StaticSamplerImpl(law));
}

std::shared_ptr<SamplerImpl> FixedSamplerImpl::excluding(const Tensor& ids) const {
  const Tensor classes = tables_[kOrder];
  return std::make_shared<FixedSamplerImpl>(num_classes(), classes.masked_select(at::isin(classes, ids).logical_not()));
}

void StaticSamplerImpl::to(torch::Device device, bool non_blocking) {
  SamplerImpl::to(device, non_blocking);
  for (Tensor& table : tables_) {
    table = table.to(device, non_blocking);
  }
}

InBatchSamplerImpl::InBatchSamplerImpl(int64_t num_classes) : SamplerImpl("InBatchSampler", num_classes, kOfBatch, /*shared=*/true) {
  counts = register_buffer("counts", at::zeros({num_classes}, at::kLong));
  total = register_buffer("total", at::zeros({}, at::kLong));
  drawn_ = at::zeros({}, at::kLong);
}

Proposal InBatchSamplerImpl::sample(const Tensor&, const Tensor& target, std::optional<at::Generator>) {
  TORCH_CHECK_VALUE(target.defined(), "InBatchSampler: expected target, got none");
  static const auto op =
      find_op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, Tensor&, Tensor&, Tensor&, bool)>("xsoftmax::in_batch_sample");
  return one_set(op.call(target, counts, total, drawn_, is_training()), target, distinct());
}

Tensor InBatchSamplerImpl::log_count(const Tensor&, const Tensor& ids) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&)>("xsoftmax::in_batch_log_count");
  return op.call(ids, counts, total, drawn_);
}

void InBatchSamplerImpl::to(torch::Device device, bool non_blocking) {
  SamplerImpl::to(device, non_blocking);
  drawn_ = drawn_.to(device, non_blocking);
}

} // namespace xsoftmax::samplers
