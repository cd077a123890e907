#include "samplers/modules.h"

#include "core/checks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;

Tensor uniform_sample(const Tensor& seed, int64_t low, int64_t high, OptionalSize num_queries, int64_t num_samples, bool distinct) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymInt, c10::SymInt, OptionalSize, c10::SymInt, bool)>("xsoftmax::uniform_sample");
  return op.call(seed, low, high, num_queries, num_samples, distinct);
}

Tensor log_uniform_sample(const Tensor& seed, int64_t low, int64_t high, OptionalSize num_queries, int64_t num_samples) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymInt, c10::SymInt, OptionalSize, c10::SymInt)>("xsoftmax::log_uniform_sample");
  return op.call(seed, low, high, num_queries, num_samples);
}

std::tuple<Tensor, Tensor> alias_table(const Tensor& weights) {
  static const auto op = find_op<std::tuple<Tensor, Tensor>(const Tensor&)>("xsoftmax::alias_table");
  return op.call(weights);
}

Tensor alias_sample(const Tensor& seed, const Tensor& threshold, const Tensor& alias, OptionalSize num_queries, int64_t num_samples) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, OptionalSize, c10::SymInt)>("xsoftmax::alias_sample");
  return op.call(seed, threshold, alias, num_queries, num_samples);
}

std::tuple<Tensor, Tensor> systematic_table(const Tensor& weights) {
  static const auto op = find_op<std::tuple<Tensor, Tensor>(const Tensor&)>("xsoftmax::systematic_table");
  return op.call(weights);
}

std::tuple<Tensor, Tensor> systematic_sample(const Tensor& seed, const Tensor& probability, const Tensor& order,
                                             const Tensor& cumulative, OptionalSize num_queries, int64_t num_samples) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, OptionalSize, c10::SymInt)>(
          "xsoftmax::systematic_sample");
  return op.call(seed, probability, order, cumulative, num_queries, num_samples);
}

// log M, -inf for M = 0.
Tensor log_of_count(int64_t num_samples, const Tensor& like) {
  return at::full({}, std::log(double(num_samples)), like.options().dtype(at::kDouble));
}

Tensor checked_weights(const char* name, const char* argument, const Tensor& weights) {
  TORCH_CHECK_VALUE(weights.dim() == 1 && weights.numel() >= 1, name, ": expected ", argument, " as a tensor [num_classes], got shape ",
                    weights.sizes());
  const Tensor values = weights.detach().to(at::kDouble);
  TORCH_CHECK_VALUE(values.isfinite().logical_and(values.ge(0)).all().item<bool>(), name, ": expected ", argument,
                    " that are finite and not negative");
  TORCH_CHECK_VALUE(values.gt(0).any().item<bool>(), name, ": expected ", argument, " that are not all zero, got only zeros");
  return values;
}

Tensor without_excluded(Tensor weights, const Excluded& excluded) {
  weights = weights.clone();
  weights.narrow(0, 0, excluded.low).zero_();
  return excluded.ids.has_value() ? weights.index_fill_(0, excluded.ids->to(weights.device()), 0.0) : weights;
}

at::TensorOptions table_options(const Excluded& excluded) {
  return at::TensorOptions(at::kDouble).device(excluded.ids.has_value() ? excluded.ids->device() : at::Device(at::kCPU));
}

Tensor unigram_weights(const Tensor& counts, double power) {
  constexpr const char* name = "UnigramSampler";
  TORCH_CHECK_VALUE(power >= 0 && std::isfinite(power), name, ": expected power as a finite number of at least 0, got ", power);
  const Tensor values = checked_weights(name, "counts", counts);
  // 0^0 is 1, but a class that was never seen stays one that is never drawn.
  return values.div(values.max()).pow(power).masked_fill(values.eq(0), 0.0);
}

} // namespace

Tensor draw_seed(const Tensor& input, const std::optional<at::Generator>& generator) {
  TORCH_CHECK_VALUE(!generator.has_value() || !generator->defined() || generator->device().type() == input.device().type(),
                    "sample: expected a generator on input's device ", input.device(), ", got one on ", generator->device());
  return at::randint(0, std::numeric_limits<int64_t>::max(), {}, generator, at::TensorOptions(at::kLong).device(input.device()));
}

int64_t check_num_classes(const char* name, int64_t num_classes) {
  TORCH_CHECK_VALUE(num_classes >= 1, name, ": expected num_classes of at least 1, got ", num_classes);
  return num_classes;
}

Excluded check_exclude(const char* name, int64_t exclude_below, const std::optional<Tensor>& exclude, int64_t num_classes) {
  TORCH_CHECK_VALUE(exclude_below >= 0, name, ": expected exclude_below of at least 0, got ", exclude_below);
  TORCH_CHECK_VALUE(exclude_below < num_classes, name, ": expected exclude_below to leave a class of ", num_classes, ", got ",
                    exclude_below);
  if (!exclude.has_value()) {
    return {exclude_below, std::nullopt};
  }
  TORCH_CHECK_VALUE(exclude->dim() == 1 && exclude->scalar_type() == at::kLong, name,
                    ": expected exclude as int64 ids with 1 dimension, got ", check::name(exclude->scalar_type()), " of shape ",
                    exclude->sizes());
  Tensor excluded = at::zeros({num_classes}, exclude->options().dtype(at::kBool));
  if (exclude->numel() > 0) {
    const int64_t smallest = exclude->min().item<int64_t>(), largest = exclude->max().item<int64_t>();
    TORCH_CHECK_INDEX(smallest >= 0 && largest < num_classes, name, ": expected exclude in [0, ", num_classes, "), got ids from ",
                      smallest, " to ", largest);
    excluded.index_fill_(0, *exclude, true);
  }
  excluded.narrow(0, 0, exclude_below).fill_(true);
  const Tensor ids = excluded.nonzero().squeeze(1);
  const int64_t count = ids.numel();
  TORCH_CHECK_VALUE(count < num_classes, name, ": expected exclude to leave a class of ", num_classes, ", got all of them");
  const bool prefix = count == 0 || ids[count - 1].item<int64_t>() == count - 1;
  return prefix ? Excluded{count, std::nullopt} : Excluded{0, ids};
}

std::map<std::string, double> SamplerImpl::refresh(const Tensor&, const std::optional<Tensor>&) { return {}; }
void SamplerImpl::prepare(const Tensor&, const std::optional<Tensor>&, std::optional<at::Generator>) {}
Tensor SamplerImpl::auxiliary_loss(const Tensor&, const Tensor&, const std::optional<Tensor>&, std::optional<at::Generator>) { return {}; }
void SamplerImpl::note(const Tensor&) {}
std::shared_ptr<SamplerImpl> SamplerImpl::for_table(int64_t, bool) { return nullptr; }

void SamplerImpl::check_num_samples(int64_t num_samples, bool shared) const {
  TORCH_CHECK_VALUE(!draws_distinct(shared) || num_samples <= num_drawable(), "SampledSoftmaxLoss: expected num_samples of at most ",
                    num_drawable(), ", the classes that are not excluded and of which each is drawn once, got ", num_samples);
}

Tensor SamplerImpl::log_count(const Tensor&, int64_t, bool, const Tensor&) {
  TORCH_CHECK_VALUE(false, "log_count: this sampler cannot tell the expected count of any class, so it does not go into a union");
}

// Module::to(dtype) casts integers as well.
void SamplerImpl::to(torch::Device device, torch::Dtype, bool non_blocking) { to(device, non_blocking); }
void SamplerImpl::to(torch::Dtype, bool) {}
void SamplerImpl::to(torch::Device device, bool non_blocking) { Module::to(device, non_blocking); }

void StaticSamplerImpl::to(torch::Device device, bool non_blocking) {
  SamplerImpl::to(device, non_blocking);
  for (Tensor* table : {&probability, &threshold, &alias, &order, &cumulative}) {
    *table = table->defined() ? table->to(device, non_blocking) : *table;
  }
}

std::shared_ptr<SamplerImpl> SamplerImpl::excluding(const Tensor&) {
  TORCH_CHECK_TYPE(false, "excluding: this sampler cannot leave classes out, so it does not go with head classes");
}

StaticSamplerImpl::StaticSamplerImpl(int64_t num_classes, std::optional<bool> distinct)
    : SamplerImpl(num_classes), distinct_(distinct) {}

StaticSamplerImpl::StaticSamplerImpl(const Tensor& weights, const StaticOptions& options)
    : StaticSamplerImpl(weights.numel(), options.distinct) {
  constexpr const char* name = "StaticSampler";
  const Tensor values = checked_weights(name, "weights", weights);
  const Tensor left = without_excluded(values, check_exclude(name, options.exclude_below, options.exclude, num_classes_));
  TORCH_CHECK_VALUE(left.gt(0).any().item<bool>(), name, ": expected a class of positive weight that is not excluded, got none");
  init_tables(left, distinct_ != true, distinct_ != false);
}

void StaticSamplerImpl::init_tables(const Tensor& weights, bool with_alias, bool with_systematic) {
  const Tensor scaled = weights.div(weights.max()); // so that the sum stays finite
  probability = scaled.div(scaled.sum());
  if (with_alias) {
    const auto [limits, others] = alias_table(probability);
    threshold = limits;
    alias = others;
  }
  if (with_systematic) {
    const auto [slots, sums] = systematic_table(probability);
    order = slots;
    cumulative = sums;
  }
}

std::shared_ptr<SamplerImpl> StaticSamplerImpl::excluding(const Tensor& ids) {
  const Tensor weights = probability.defined() ? probability : log_q(at::arange(num_classes_)).exp();
  return std::make_shared<StaticSamplerImpl>(weights, StaticOptions{.distinct = distinct_, .exclude = ids});
}

Proposal StaticSamplerImpl::sample(const Tensor& input, int64_t num_samples, bool shared, const std::optional<Tensor>& target,
                                   std::optional<at::Generator> generator) {
  const bool distinct = draws_distinct(shared);
  const auto [ids, log_scale] =
      draw(draw_seed(input, generator), shared ? std::nullopt : std::optional<int64_t>(input.size(0)), num_samples, distinct);
  const Tensor target_log_count = target.has_value() ? scaled_count(log_scale, *target, distinct) : Tensor();
  return {ids, scaled_count(log_scale, ids, distinct), target_log_count, distinct, {}, {}, 0, {}};
}

int64_t StaticSamplerImpl::num_drawable() const {
  return probability.defined() ? probability.count_nonzero().item<int64_t>() : num_classes_ - low_;
}

Tensor StaticSamplerImpl::log_count(const Tensor&, int64_t num_samples, bool shared, const Tensor& ids) {
  // A draw for no query: what is wanted is its scale.
  const bool distinct = draws_distinct(shared);
  return scaled_count(std::get<1>(draw(at::zeros({}, ids.options()), 0, num_samples, distinct)), ids, distinct);
}

// log(c q), and of distinct draws min(1, c q) in place of c q. float64 up to here: log c and log q nearly cancel.
Tensor StaticSamplerImpl::scaled_count(const Tensor& log_scale, const Tensor& ids, bool distinct) {
  const Tensor count = log_scale + log_q(ids);
  return (distinct ? count.clamp_max(0.0) : count).to(at::kFloat);
}

Tensor StaticSamplerImpl::log_prob(const Tensor&, const Tensor& ids) { return log_q(ids).to(at::kFloat); }

std::tuple<Tensor, Tensor> StaticSamplerImpl::draw(const Tensor& seed, std::optional<int64_t> num_queries, int64_t num_samples,
                                                   bool distinct) {
  TORCH_CHECK(distinct ? order.defined() : threshold.defined(), "sample: the tables for these draws were not built");
  if (distinct) {
    return systematic_sample(seed, probability, order, cumulative, num_queries, num_samples);
  }
  return {alias_sample(seed, threshold, alias, num_queries, num_samples), log_of_count(num_samples, seed)};
}

Tensor StaticSamplerImpl::log_q(const Tensor& ids) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("xsoftmax::table_log_prob");
  return op.call(probability, ids);
}

UniformSamplerImpl::UniformSamplerImpl(int64_t num_classes, const StaticOptions& options)
    : StaticSamplerImpl(check_num_classes("UniformSampler", num_classes), options.distinct) {
  const Excluded excluded = check_exclude("UniformSampler", options.exclude_below, options.exclude, num_classes);
  low_ = excluded.low;
  from_tables_ = excluded.ids.has_value();
  if (from_tables_) {
    init_tables(without_excluded(at::ones({num_classes}, table_options(excluded)), excluded), distinct_ != true, distinct_ != false);
  }
}

std::shared_ptr<SamplerImpl> UniformSamplerImpl::excluding(const Tensor& ids) {
  if (from_tables_ || low_ > 0) {
    return StaticSamplerImpl::excluding(ids);
  }
  return std::make_shared<UniformSamplerImpl>(num_classes_, StaticOptions{.distinct = distinct_, .exclude = ids});
}

std::tuple<Tensor, Tensor> UniformSamplerImpl::draw(const Tensor& seed, std::optional<int64_t> num_queries, int64_t num_samples,
                                                    bool distinct) {
  if (from_tables_) {
    return StaticSamplerImpl::draw(seed, num_queries, num_samples, distinct);
  }
  return {uniform_sample(seed, low_, num_classes_, num_queries, num_samples, distinct), log_of_count(num_samples, seed)};
}

Tensor UniformSamplerImpl::log_q(const Tensor& ids) {
  if (from_tables_) {
    return StaticSamplerImpl::log_q(ids);
  }
  const Tensor log_q = at::full_like(ids, -std::log(double(num_classes_ - low_)), ids.options().dtype(at::kDouble));
  return log_q.masked_fill(ids.lt(low_).logical_or(ids.ge(num_classes_)), -std::numeric_limits<double>::infinity());
}

LogUniformSamplerImpl::LogUniformSamplerImpl(int64_t num_classes, const StaticOptions& options)
    : StaticSamplerImpl(check_num_classes("LogUniformSampler", num_classes), options.distinct) {
  const Excluded excluded = check_exclude("LogUniformSampler", options.exclude_below, options.exclude, num_classes);
  low_ = excluded.low;
  from_tables_ = excluded.ids.has_value();
  if (from_tables_ || distinct_ != false) {
    const Tensor weights = at::arange(1, num_classes + 1, table_options(excluded)).reciprocal_().log1p_();
    init_tables(without_excluded(weights, excluded), from_tables_ && distinct_ != true, distinct_ != false);
  }
}

std::tuple<Tensor, Tensor> LogUniformSamplerImpl::draw(const Tensor& seed, std::optional<int64_t> num_queries, int64_t num_samples,
                                                       bool distinct) {
  if (from_tables_ || distinct) {
    return StaticSamplerImpl::draw(seed, num_queries, num_samples, distinct);
  }
  return {log_uniform_sample(seed, low_, num_classes_, num_queries, num_samples), log_of_count(num_samples, seed)};
}

Tensor LogUniformSamplerImpl::log_q(const Tensor& ids) {
  if (from_tables_) {
    return StaticSamplerImpl::log_q(ids);
  }
  const double log_span = std::log(std::log1p(double(num_classes_)) - std::log1p(double(low_)));
  const Tensor log_q = ids.to(at::kDouble).clamp_min(0.0).add(1).reciprocal().log1p().log().sub(log_span);
  return log_q.masked_fill(ids.lt(low_).logical_or(ids.ge(num_classes_)), -std::numeric_limits<double>::infinity());
}

UnigramSamplerImpl::UnigramSamplerImpl(const Tensor& counts, double power, const StaticOptions& options)
    : StaticSamplerImpl(unigram_weights(counts, power), options) {}

InBatchSamplerImpl::InBatchSamplerImpl(int64_t num_classes) : SamplerImpl(check_num_classes("InBatchSampler", num_classes)) {
  counts = register_buffer("counts", at::zeros({num_classes}, at::kLong));
  total = register_buffer("total", at::zeros({}, at::kLong));
}

Proposal InBatchSamplerImpl::sample(const Tensor&, int64_t, bool shared, const std::optional<Tensor>& target,
                                    std::optional<at::Generator>) {
  TORCH_CHECK_VALUE(target.has_value(), "InBatchSampler: expected target, got none");
  TORCH_CHECK_VALUE(shared, "InBatchSampler: expected shared to be true, got false: the batch's targets are one set");
  const Tensor counted = target->ge(0);
  const Tensor ids = target->clamp_min(0);
  if (is_training()) {
    counts.index_add_(0, ids, counted.to(at::kLong));
    total.add_(counted.sum());
  }
  const Tensor log_count = (log_q(ids) + std::log(double(target->numel()))).to(at::kFloat)
                               .masked_fill(counted.logical_not(), std::numeric_limits<double>::infinity());
  return {ids, log_count, log_count, false, {}, {}, 0, {}};
}

Tensor InBatchSamplerImpl::log_prob(const Tensor&, const Tensor& ids) { return log_q(ids).to(at::kFloat); }

Tensor InBatchSamplerImpl::log_q(const Tensor& ids) {
  // At least 1: before the first batch every class has p = 0, not 0 / 0.
  return counts.index_select(0, ids.flatten()).view_as(ids).to(at::kDouble).log() - total.to(at::kDouble).clamp_min(1.0).log();
}

std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, int64_t num_classes, const StaticOptions& options,
                                          const std::optional<Tensor>& counts, double power) {
  if (name == "uniform") {
    return std::make_shared<UniformSamplerImpl>(num_classes, options);
  }
  if (name == "log_uniform") {
    return std::make_shared<LogUniformSamplerImpl>(num_classes, options);
  }
  if (name == "in_batch") {
    return std::make_shared<InBatchSamplerImpl>(num_classes);
  }
  TORCH_CHECK_VALUE(name == "unigram", "make_sampler: expected \"uniform\", \"log_uniform\", \"unigram\" or \"in_batch\", got \"", name,
                    "\"");
  TORCH_CHECK_VALUE(counts.has_value(), "make_sampler: expected counts for \"unigram\", got none");
  TORCH_CHECK_VALUE(counts->numel() == num_classes, "make_sampler: expected counts of ", num_classes, " classes, got ", counts->numel());
  return std::make_shared<UnigramSamplerImpl>(*counts, power, options);
}

} // namespace xsoftmax::samplers
