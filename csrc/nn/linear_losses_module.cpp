#include "nn/modules.h"

#include "op/checks.h"
#include "op/optional.h"
#include "proposal/candidate_set.h"
#include "estimator/estimators.h"
#include "loss/exclude_topk.h"
#include "loss/linear_positives_loss.h"
#include "estimator/logit_transform.h"
#include "loss/reduction.h"
#include "loss/sampled_step.h"
#include "loss/soft_targets.h"
#include "table/updates/resize_tables.h"
#include "table/updates/pending_updates.h"
#include "proposal/modules.h"

#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace xsoftmax::nn {

using at::Tensor;

std::vector<int64_t> replace_last_dim(const Tensor& input, int64_t last) {
  std::vector<int64_t> shape(input.sizes().begin(), input.sizes().end());
  shape.back() = last;
  return shape;
}

Tensor as_rows(const Tensor& input) { return input.unsqueeze(0).flatten(0, -2); }

LinearLossImpl::LinearLossImpl(const char* name, int64_t in_features, int64_t num_classes,
                               const LossOptions& options)
    : TableLossImpl(name, num_classes, options,
                    {"sampler", "noise", "candidate_sampler", "log_z"}) {
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, name,
                    ": expected label_smoothing in [0, 1], got ", options.label_smoothing);
  check_logits(name, logit_options());
  check_z_loss(name, options.z_loss);
  if (options.linear.is_empty()) {
    linear =
        torch::nn::Linear(torch::nn::LinearOptions(in_features, num_classes).bias(options.bias));
  } else {
    linear = options.linear;
    options_.bias = linear->bias.defined();
    TORCH_CHECK_VALUE(
        linear->weight.size(0) == num_classes && linear->weight.size(1) == in_features, name,
        ": expected a linear of ", num_classes, " classes and ", in_features,
        " features, got weight of shape ", linear->weight.sizes());
  }
  register_module("linear", linear);
}

namespace {

// Returns the rows of a parameter from `known` on, including those about to be added.
Tensor new_rows_of(const Tensor& table, const Tensor& added, int64_t known, int64_t num_classes) {
  if (known >= std::min(table.size(0), num_classes)) {
    return added;
  }
  catch_up(table); // another loss has already resized it, or all rows are needed
  return at::cat({table.detach().slice(0, known, num_classes), added});
}

} // namespace

void LinearLossImpl::resize_classes(int64_t num_classes, const Tensor& class_weight) {
  const at::NoGradGuard guard;
  TORCH_CHECK_VALUE(num_classes >= 1, name_, ": expected num_classes of at least 1, got ",
                    num_classes);
  const int64_t last =
      fixed_ids().defined() && fixed_ids().numel() > 0 ? fixed_ids().max().item<int64_t>() : -1;
  TORCH_CHECK_VALUE(last < num_classes, name_, ": expected num_classes above ", last,
                    ", one of the classes that are always scored, got ", num_classes);
  const int64_t more = std::max<int64_t>(0, num_classes - num_classes_);
  Tensor weights = class_weight;
  if (weight.defined()) {
    TORCH_CHECK_VALUE(!weights.defined() || (weights.dim() == 1 && weights.size(0) == more), name_,
                      ": expected class_weight of shape [", more,
                      "], the classes that are new, got ", weights.sizes());
    // An earlier call may have resized the table and then run out of memory for a sampler.
    weights = weights.defined()
        ? weights.slice(0, std::max<int64_t>(0, weight.size(0) - num_classes_))
        : at::ones({std::max<int64_t>(0, num_classes - weight.size(0))}, weight.options());
  } else {
    TORCH_CHECK_VALUE(!weights.defined(), name_,
                      ": expected no class_weight for a loss without class weights, got one");
  }
  std::vector<Tensor> tables{linear->weight}, added;
  const int64_t new_rows = std::max<int64_t>(0, num_classes - linear->weight.size(0));
  added.push_back(
      at::empty({new_rows, linear->weight.size(1)}, linear->weight.options().requires_grad(false)));
  const double bound = linear->weight.size(1) > 0 ? 1 / std::sqrt(double(linear->weight.size(1)))
                                                  : 0; // as LinearImpl::reset_parameters
  added[0].uniform_(-bound, bound);
  if (linear->bias.defined()) {
    tables.push_back(linear->bias);
    added.push_back(
        at::empty({new_rows}, linear->bias.options().requires_grad(false)).uniform_(-bound, bound));
  }
  Tensor rows;
  const auto samplers = samplers_of_table();
  const bool followed = std::any_of(samplers.begin(), samplers.end(),
                                    [](const auto& sampler) { return sampler->follows_table(); });
  const int64_t known = std::min(num_classes_, num_classes);
  const auto biases = [&](int64_t first) {
    return followed && linear->bias.defined()
        ? OptionalTensor(new_rows_of(linear->bias, added[1], first, num_classes))
        : std::nullopt;
  };
  if (followed) {
    rows = new_rows_of(linear->weight, added[0], known, num_classes);
  }
  const OptionalTensor bias = biases(known);
  std::vector<std::function<void()>> plans;
  for (const auto& sampler : samplers) {
    const std::function<void()> grow = sampler->plan_growth(num_classes, rows, bias);
    plans.push_back(grow ? grow : sampler->plan_resize(num_classes, rows, biases(0)));
  }
  // Resize an alias: the tensor that the user passed keeps its memory.
  const Tensor alias = weight.defined() ? weight.detach() : Tensor();
  if (alias.defined()) {
    tables.push_back(alias);
    added.push_back(weights.to(weight.options()));
  }
  // Resize all tables in one call: if memory runs out for one of them, none changes.
  static const auto resize = find_op<decltype(resize_tables_)>("xsoftmax::resize_tables_");
  resize.call(tables, added, std::vector<int64_t>(tables.size(), num_classes));
  if (alias.defined()) {
    weight.set_data(alias);
    options_.weight = weight;
  }
  for (const auto& plan : plans) {
    plan();
  }
  linear->options.out_features(num_classes);
  num_classes_ = num_classes;
}

void LinearLossImpl::check_table(const Tensor& input, const Tensor& target) const {
  TORCH_CHECK_VALUE(linear->weight.size(0) == num_classes_, name_,
                    ": expected linear->weight with a row for each of ", num_classes_,
                    " classes, got shape ", linear->weight.sizes());
  const bool swapped = input.dim() >= 1 && input.size(-1) == num_classes_;
  TORCH_CHECK_VALUE(
      input.dim() >= 1 && input.size(-1) == linear->weight.size(1), name_,
      ": expected input of shape [*, ", linear->weight.size(1), "], got ", input.sizes(),
      swapped ? ", whose width is num_classes: in_features comes before num_classes" : "");
  const at::IntArrayRef queries = input.sizes().slice(0, input.dim() - 1);
  const bool has_multiple = target.defined() && target.dim() == input.dim() &&
      target.sizes().slice(0, queries.size()) == queries;
  TORCH_CHECK_VALUE(!target.defined() || has_multiple || queries == target.sizes(), name_,
                    ": expected target of shape ", queries,
                    ", or with one more dimension for several positives, got ", target.sizes());
}

Tensor LinearLossImpl::exact(const Tensor& input, const Tensor& target,
                             const std::optional<Tensor>& target_prob) const {
  check_table(input, target);
  catch_up();
  ExactPositivesOptions options;
  options.reduction = options_.reduction;
  options.ignore_index = options_.ignore_index;
  options.label_smoothing = options_.label_smoothing;
  options.z_loss = options_.z_loss;
  options.workspace_mb = options_.workspace_mb;
  options.positives = options_.positives;
  static_cast<LogitOptions&>(options) = logit_options();
  if (is_defined(target_prob)) {
    return linear_soft_loss(input, linear->weight, optional(linear->bias), target, *target_prob,
                            optional(weight), options);
  }
  if (target.dim() == input.dim()) {
    TORCH_CHECK_VALUE(options_.label_smoothing == 0, name_,
                      ": expected label_smoothing of 0 with several positives of a query, got ",
                      options_.label_smoothing);
    return linear_positives_loss(input, linear->weight, optional(linear->bias), target,
                                 optional(weight), options);
  }
  const Tensor loss = linear_cross_entropy(as_rows(input), linear->weight, optional(linear->bias),
                                           target.reshape({-1}), optional(weight), options);
  return options.reduction == "none" ? loss.reshape(target.sizes()) : loss;
}

LogitOptions LinearLossImpl::logit_options() const {
  return {options_.logit_scale, options_.softcap};
}

Tensor LinearLossImpl::log_prob(const Tensor& input, const std::optional<Tensor>& ids) {
  check_table(input);
  catch_up();
  return linear_log_prob(input, linear->weight, optional(linear->bias), ids, logit_options());
}

Tensor LinearLossImpl::entropy(const Tensor& input) {
  check_table(input);
  catch_up();
  return linear_entropy(input, linear->weight, optional(linear->bias), logit_options());
}

std::tuple<Tensor, Tensor> LinearLossImpl::topk(const Tensor& input, int64_t k,
                                                const Tensor& exclude) const {
  check_table(input);
  catch_up();
  const int64_t classes = linear->weight.size(0);
  const auto found = linear_topk(as_rows(input), linear->weight, optional(linear->bias),
                                 with_excluded(k, exclude, classes), logit_options());
  return without_excluded(name_, input, found, exclude, classes, k);
}

Tensor LinearLossImpl::predict(const Tensor& input) const {
  return std::get<1>(topk(input, 1)).squeeze(-1);
}

LinearCrossEntropyLossImpl::LinearCrossEntropyLossImpl(int64_t in_features, int64_t num_classes,
                                                       const LossOptions& options)
    : LinearLossImpl("LinearCrossEntropyLoss", in_features, num_classes, options) {}

Tensor LinearCrossEntropyLossImpl::forward(const Tensor& input, const Tensor& target,
                                           const std::optional<Tensor>& target_prob) {
  return exact(input, target, target_prob);
}

CandidateLossImpl::CandidateLossImpl(const char* name, int64_t in_features, int64_t num_classes,
                                     const LossOptions& options)
    : LinearLossImpl(name, in_features, num_classes, options) {
  step_.reduction = options.reduction;
  step_.ignore_index = options.ignore_index;
  step_.label_smoothing = options.label_smoothing;
  step_.positives = options.positives;
  step_.z_loss = options.z_loss;
  static_cast<LogitOptions&>(step_) = logit_options();
}

std::tuple<Tensor, Tensor> CandidateLossImpl::counted(const Tensor& input, const Tensor& target,
                                                      bool soft) const {
  auto [queries, counted] =
      counted_queries(input, target, linear->weight, step_.ignore_index, soft);
  return {step_.logit_scale == 1 ? queries : queries * step_.logit_scale, counted};
}

Tensor CandidateLossImpl::candidate_loss(const Tensor& input, const Tensor& target,
                                         const Proposal& sets, const Tensor& log_z,
                                         const std::optional<Tensor>& target_prob) const {
  return sampled_softmax_loss(input, linear->weight, optional(linear->bias), target, sets, step_,
                              optional(weight), optional(log_z), target_prob);
}

namespace {

constexpr const char* kLinearLossesModule = "SampledSoftmaxLoss";
constexpr const char* kComplementary = "complementary_sum";

std::shared_ptr<samplers::SamplerImpl> by_name(const std::string& name, int64_t in_features,
                                               int64_t num_classes, const SamplingOptions& sampling,
                                               const LossOptions& options) {
  const bool bias = options.linear.is_empty() ? options.bias : options.linear->bias.defined();
  samplers::SamplerRequest request{.num_classes = num_classes,
                                   .num_samples = sampling.num_samples,
                                   .dim = in_features,
                                   .bias = bias,
                                   .shared = sampling.shared,
                                   .exclude = {}};
  if (sampling.estimator == kComplementary) {
    TORCH_CHECK_VALUE(!sampling.shared.value_or(false), kLinearLossesModule,
                      ": expected shared=false with estimator \"", kComplementary, "\", got true");
    const int64_t draws = sampling.num_samples.value_or(20);
    if (name == "uniform") {
      return samplers::ComplementSampler(num_classes, draws).ptr();
    }
    request.num_samples = 4 * draws; // four tries per sample
    request.shared = false;
    return samplers::ComplementSampler(samplers::make_sampler(name, request), draws).ptr();
  }
  if (!sampling.shared.has_value() && !sampling.estimator.empty() &&
      find_estimator(kLinearLossesModule, sampling.estimator).traits.has_noise) {
    // Noise must be private: it represents the classes outside a query's candidates.
    request.shared = false;
  }
  return samplers::make_sampler(name, request);
}

} // namespace

SampledSoftmaxLossImpl::SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes,
                                               const std::string& name,
                                               const SamplingOptions& sampling,
                                               const LossOptions& options)
    : SampledSoftmaxLossImpl(
          in_features, num_classes, by_name(name, in_features, num_classes, sampling, options),
          [&] {
            SamplingOptions others = sampling;
            others.num_samples.reset();
            others.shared.reset();
            return others;
          }(),
          options) {}

SampledSoftmaxLossImpl::SampledSoftmaxLossImpl(
    int64_t in_features, int64_t num_classes,
    std::shared_ptr<samplers::SamplerImpl> sampler_or_none, const SamplingOptions& sampling,
    const LossOptions& options)
    : CandidateLossImpl(kLinearLossesModule, in_features, num_classes, options) {
  for (const char* const argument : {sampling.num_samples.has_value() ? "num_samples" : "",
                                     sampling.shared.has_value() ? "shared" : ""}) {
    TORCH_CHECK_VALUE(
        *argument == '\0', kLinearLossesModule, ": expected no ", argument,
        " with a sampler object, got one: pass it to the sampler's constructor, or give "
        "the sampler by name");
  }
  const bool none = sampler_or_none == nullptr;
  const auto sampler_argument =
      none ? samplers::FixedSampler(num_classes, at::empty({0}, at::kLong)).ptr() : sampler_or_none;
  TORCH_CHECK_VALUE(sampler_argument->num_classes() == num_classes, kLinearLossesModule,
                    ": expected a sampler of ", num_classes, " classes, got one of ",
                    sampler_argument->num_classes());
  const bool outside = sampling.estimator == kComplementary;
  head = sampling.head.defined()
      ? distinct_ids(sampling.head, num_classes, kLinearLossesModule, "head")
      : at::zeros({0}, at::kLong);
  TORCH_CHECK_VALUE(
      !outside || (head.numel() == 0 && options.label_smoothing == 0), kLinearLossesModule,
      ": expected no head and label_smoothing of 0 with estimator \"", kComplementary, "\"");
  TORCH_CHECK_VALUE(sampler_argument->num_samples() != 0 || head.numel() > 0 || none,
                    kLinearLossesModule,
                    ": expected classes to score, got num_samples of 0 and no head");
  TORCH_CHECK_VALUE(!options.weight.defined() || options.label_smoothing == 0, kLinearLossesModule,
                    ": expected label_smoothing of 0 with class weights, got ",
                    options.label_smoothing);
  step_.estimator = outside        ? "sampled_softmax"
      : sampling.estimator.empty() ? sampler_argument->default_estimator()
                                   : sampling.estimator;
  step_.remove_accidental_hits = sampling.remove_accidental_hits;
  step_.sparse_grad = sampling.sparse_grad;
  const Estimator& estimator = find_estimator(kLinearLossesModule, step_.estimator);
  check_z_loss(kLinearLossesModule, options.z_loss, estimator);
  const EstimatorTraits& traits = estimator.traits;
  TORCH_CHECK_VALUE(
      !traits.has_noise ||
          ((head.numel() > 0 || sampler_argument->has_distinct()) &&
           sampler_argument->has_independent()),
      kLinearLossesModule,
      ": expected candidates (head classes, or draws without replacement) and noise (draws with "
      "replacement) with estimator \"",
      step_.estimator, "\", got ", head.numel(), " head classes and a ", sampler_argument->name());
  TORCH_CHECK_VALUE(traits.smooths || options.label_smoothing == 0, kLinearLossesModule,
                    ": expected label_smoothing of 0 with estimator \"", step_.estimator,
                    "\", got ", options.label_smoothing);
  TORCH_CHECK_VALUE(std::isfinite(sampling.log_z), kLinearLossesModule,
                    ": expected log_z as a finite number, got ", sampling.log_z);
  TORCH_CHECK_VALUE((sampling.log_z == 0 && !sampling.learn_log_z) || step_.estimator == "nce",
                    kLinearLossesModule, ": expected log_z of 0 with estimator \"", step_.estimator,
                    "\", which does not use it");
  sampler = sampler_argument; // claimed below, after all other checks
  if (outside) {
    sampler = sampler_argument->outside_target();
  } else if (head.numel() > 0) {
    sampler = sampler_argument->excluding(head);
    if (sampler == nullptr) {
      sampler = samplers::UnionSampler(
                    std::vector<std::shared_ptr<samplers::SamplerImpl>>{
                        samplers::FixedSampler(num_classes, head).ptr(), sampler_argument})
                    .ptr();
      head = head.narrow(0, 0, 0);
    }
  }
  sampler->claim(kLinearLossesModule);
  register_module("sampler", sampler);
  if (sampling.learn_log_z) {
    log_z = register_parameter("log_z", at::full({}, sampling.log_z));
  } else if (sampling.log_z != 0) {
    log_z = at::full({}, sampling.log_z);
  }
}

SamplingOptions SampledSoftmaxLoss::with_num_samples(SamplingOptions sampling,
                                                     int64_t num_samples) {
  TORCH_CHECK_VALUE(!sampling.num_samples.has_value(), kLinearLossesModule,
                    ": expected num_samples once, got ", num_samples,
                    " and SamplingOptions with num_samples of ", *sampling.num_samples);
  sampling.num_samples = num_samples;
  return sampling;
}

void SampledSoftmaxLossImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  CandidateLossImpl::to(device, dtype, non_blocking);
  head = head.to(device, non_blocking);
}

void SampledSoftmaxLossImpl::to(torch::Device device, bool non_blocking) {
  CandidateLossImpl::to(device, non_blocking);
  head = head.to(device, non_blocking);
}

Proposal SampledSoftmaxLossImpl::propose(const Tensor& queries, const Tensor& target,
                                         std::optional<at::Generator> generator) {
  Proposal sets = sampler->sample(queries, target, generator);
  if (head.numel() > 0) {
    sets.insert(sets.begin(), head_set(head));
  }
  return sets;
}

Tensor SampledSoftmaxLossImpl::sampled(const Tensor& input, const Tensor& target, bool prepares,
                                       std::optional<at::Generator> generator,
                                       const std::optional<Tensor>& negatives,
                                       const std::optional<Tensor>& negative_log_count,
                                       const std::optional<Tensor>& target_prob) {
  check_table(input, target);
  TORCH_CHECK_VALUE(is_defined(negatives) || sampler->num_samples() != 0 || head.numel() > 0,
                    kLinearLossesModule,
                    ": expected negatives in each call of a loss without a sampler, got none");
  const StepSampler step_sampler{samplers::part_of(sampler), head,
                                 samplers::reads_queries(*sampler),
                                 [this](const Tensor& weight, const OptionalTensor& bias,
                                        const std::optional<at::Generator>& generator) {
                                   sampler->prepare(weight, bias, generator);
                                 }};
  const OptionalTensor normalizer =
      log_z.defined() ? OptionalTensor(log_z.to(input.device())) : std::nullopt;
  return sampled_step(
      {input, linear->weight, optional(linear->bias), target, optional(weight), normalizer,
       target_prob, negatives, negative_log_count, std::move(generator), is_training(), prepares},
      step_sampler, step_);
}

Tensor SampledSoftmaxLossImpl::forward(const Tensor& input, const Tensor& target,
                                       std::optional<at::Generator> generator,
                                       const std::optional<Tensor>& negatives,
                                       const std::optional<Tensor>& negative_log_count,
                                       const std::optional<Tensor>& target_prob) {
  return is_training() ? sampled(input, target, /*prepares=*/true, std::move(generator), negatives,
                                 negative_log_count, target_prob)
                       : exact(input, target, target_prob);
}

Tensor SampledSoftmaxLossImpl::estimate(const Tensor& input, const Tensor& target,
                                        std::optional<at::Generator> generator,
                                        const std::optional<Tensor>& negatives,
                                        const std::optional<Tensor>& negative_log_count,
                                        const std::optional<Tensor>& target_prob) {
  return sampled(input, target, /*prepares=*/false, std::move(generator), negatives,
                 negative_log_count, target_prob);
}

} // namespace xsoftmax::nn
