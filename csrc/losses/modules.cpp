#include "core/checks.h"
#include "core/optional.h"
#include "losses/estimators.h"
#include "losses/modules.h"

#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>

#include <ATen/core/Reduction.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace xsoftmax::nn {

using at::Tensor;

namespace {

Tensor head_ids(const SamplingOptions& sampling, int64_t num_classes) {
  if (!sampling.head.defined()) {
    TORCH_CHECK_VALUE(sampling.head_classes >= 0 && sampling.head_classes <= num_classes,
                      "SampledSoftmaxLoss: expected head_classes in [0, ", num_classes, "], got ", sampling.head_classes);
    return at::arange(sampling.head_classes, at::kLong);
  }
  TORCH_CHECK_VALUE(sampling.head_classes == 0, "SampledSoftmaxLoss: expected head_classes or head, got both");
  return different_ids("SampledSoftmaxLoss", "head", sampling.head, num_classes);
}

} // namespace

Tensor different_ids(const char* name, const char* argument, const Tensor& ids, int64_t num_classes) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong && ids.dim() == 1, name, ": expected ", argument, " as 1-D int64 ids, got ",
                   check::name(ids.scalar_type()), " of shape ", ids.sizes());
  const Tensor ordered = std::get<0>(ids.sort());
  TORCH_CHECK_INDEX(ids.numel() == 0 || (ordered[0].item<int64_t>() >= 0 && ordered[-1].item<int64_t>() < num_classes), name, ": expected ",
                    argument, " in [0, ", num_classes, ")");
  TORCH_CHECK_VALUE(ids.numel() < 2 || ordered.diff().ne(0).all().item<bool>(), name, ": expected ", argument, " without repeats");
  return ordered;
}

int64_t reduction_code(const std::string& reduction) {
  if (reduction == "none") return at::Reduction::None;
  if (reduction == "mean") return at::Reduction::Mean;
  TORCH_CHECK_VALUE(reduction == "sum", "xsoftmax::nn: expected reduction to be \"mean\", \"sum\" or \"none\", got \"", reduction, "\"");
  return at::Reduction::Sum;
}

std::vector<int64_t> with_last(const Tensor& input, int64_t last) {
  std::vector<int64_t> shape(input.sizes().begin(), input.sizes().end());
  shape.back() = last;
  return shape;
}

Tensor with_gradient_of(const Tensor& loss, const Tensor& auxiliary) {
  return auxiliary.defined() ? loss + (auxiliary - auxiliary.detach()) / double(std::max<int64_t>(1, loss.numel())) : loss;
}

LinearLossImpl::LinearLossImpl(int64_t in_features, int64_t num_classes, const LossOptions& options)
    : num_classes_(num_classes), options_(options), reduction_(reduction_code(options.reduction)) {
  TORCH_CHECK_VALUE(num_classes >= 1, "xsoftmax::nn: expected num_classes of at least 1, got ", num_classes);
  TORCH_CHECK_VALUE(!options.weight.defined() || (options.weight.dim() == 1 && options.weight.size(0) == num_classes),
                    "xsoftmax::nn: expected weight of shape [", num_classes, "], got ", options.weight.sizes());
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, "xsoftmax::nn: expected label_smoothing in [0, 1], got ",
                    options.label_smoothing);
  linear = register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(in_features, num_classes).bias(options.bias)));
  if (options.weight.defined()) {
    weight = register_buffer("weight", options.weight);
  }
}

Tensor LinearLossImpl::flatten(const Tensor& input, const Tensor& target) const {
  TORCH_CHECK_VALUE(linear->weight.size(0) == num_classes_, "xsoftmax::nn: expected linear->weight with a row for each of ", num_classes_,
                    " classes, got shape ", linear->weight.sizes());
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sizes().slice(0, input.dim() - 1) == target.sizes(),
                    "xsoftmax::nn: expected target of the shape of input without its last dimension, got input ", input.sizes(), " and target ",
                    target.sizes());
  return input.reshape({target.numel(), input.size(-1)});
}

Tensor LinearLossImpl::exact(const Tensor& input, const Tensor& target) const {
  const Tensor loss = linear_cross_entropy(flatten(input, target), linear->weight, optional(linear->bias), target.reshape({-1}),
                                           optional(weight), reduction_, options_.ignore_index, options_.label_smoothing);
  return reduction_ == at::Reduction::None ? loss.reshape(target.sizes()) : loss;
}

Tensor LinearLossImpl::log_prob(const Tensor& input) { return at::log_softmax(linear->forward(input), -1); }

std::tuple<Tensor, Tensor> LinearLossImpl::topk(const Tensor& input, int64_t k) const {
  auto [values, ids] = linear_topk(input.unsqueeze(0).flatten(0, -2), linear->weight, optional(linear->bias), k);
  const auto shape = with_last(input, k);
  return {values.reshape(shape), ids.reshape(shape)};
}

Tensor LinearLossImpl::predict(const Tensor& input) const { return std::get<1>(topk(input, 1)).squeeze(-1); }

LinearCrossEntropyLossImpl::LinearCrossEntropyLossImpl(int64_t in_features, int64_t num_classes, const LossOptions& options)
    : LinearLossImpl(in_features, num_classes, options) {}

Tensor LinearCrossEntropyLossImpl::forward(const Tensor& input, const Tensor& target) { return exact(input, target); }

namespace {

/// Whether the sampler, or one of a union, draws by the class table.
bool follows_table(const samplers::SamplerImpl& sampler) {
  const auto parts = sampler.children();
  return dynamic_cast<const samplers::AdaptiveSamplerImpl*>(&sampler) != nullptr || std::any_of(parts.begin(), parts.end(), [](const auto& part) {
           return std::dynamic_pointer_cast<samplers::AdaptiveSamplerImpl>(part) != nullptr;
         });
}

} // namespace

SampledSoftmaxLossImpl::SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes,
                                               std::shared_ptr<samplers::SamplerImpl> given_sampler, const SamplingOptions& sampling,
                                               const LossOptions& options)
    : LinearLossImpl(in_features, num_classes, options), sampling_(sampling) {
  TORCH_CHECK_VALUE(given_sampler != nullptr, "SampledSoftmaxLoss: expected a sampler, got none");
  TORCH_CHECK_VALUE(sampling.num_samples >= 0, "SampledSoftmaxLoss: expected num_samples of at least 0, got ", sampling.num_samples);
  const bool automatic = sampling.estimator.empty();
  if (automatic) {
    sampling_.estimator = "sampled_softmax";
  }
  const Estimator& estimator = find_estimator("SampledSoftmaxLoss", sampling_.estimator);
  TORCH_CHECK_VALUE(estimator.smooths || options.label_smoothing == 0, "SampledSoftmaxLoss: expected label_smoothing of 0 with estimator \"",
                    sampling_.estimator, "\", got ", options.label_smoothing);
  TORCH_CHECK_VALUE(!options.weight.defined() || options.label_smoothing == 0,
                    "SampledSoftmaxLoss: expected label_smoothing of 0 beside class weights, got ", options.label_smoothing);
  TORCH_CHECK_VALUE(given_sampler->num_classes() == num_classes, "SampledSoftmaxLoss: expected a sampler of ", num_classes,
                    " classes, got one of ", given_sampler->num_classes());
  head = head_ids(sampling, num_classes);
  auto suited = head.numel() > 0 ? given_sampler->excluding(head) : given_sampler;
  const auto other = suited->for_table(in_features, options.bias);
  sampler = register_module("sampler", other ? other : suited);
  const bool against = estimator.has_noise;
  shared_ = sampling.shared.value_or(!against && sampler->shared_by_default());
  sampler->check_num_samples(sampling.num_samples, shared_);
  const auto [distinct, independent] = sampler->draws_by_kind(sampling.num_samples, shared_);
  adaptive_ = follows_table(*sampler);
  if (automatic && adaptive_ && !shared_ && distinct == 0) {
    sampling_.estimator = "ranking";
  }
  TORCH_CHECK_VALUE(!against || (head.numel() + distinct > 0 && independent > 0),
                    "SampledSoftmaxLoss: expected candidates, the head or distinct draws, and independent draws as noise with estimator \"",
                    sampling_.estimator, "\", got ", head.numel(), " classes, ", distinct, " distinct draws and ", independent, " independent ones");
  TORCH_CHECK_VALUE(!sampler->proposes_targets() || (shared_ && sampling.remove_accidental_hits),
                    "SampledSoftmaxLoss: expected shared draws and remove_accidental_hits for a sampler that proposes targets");
}

void SampledSoftmaxLossImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  Module::to(device, dtype, non_blocking);
  head = head.to(device, non_blocking);
}

void SampledSoftmaxLossImpl::to(torch::Dtype dtype, bool non_blocking) { Module::to(dtype, non_blocking); }

void SampledSoftmaxLossImpl::to(torch::Device device, bool non_blocking) {
  Module::to(device, non_blocking);
  head = head.to(device, non_blocking);
}

void SampledSoftmaxLossImpl::load(torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive table, state;
  archive.read("linear", table);
  linear->load(table);
  if (weight.defined()) {
    archive.read("weight", weight, /*is_buffer=*/true);
  }
  if (archive.try_read("sampler", state) && !state.keys().empty()) {
    sampler->load(state);
  }
}

Tensor SampledSoftmaxLossImpl::forward(const Tensor& input, const Tensor& target, std::optional<at::Generator> generator) {
  if (!is_training()) {
    return exact(input, target);
  }
  const Tensor flat = target.reshape({-1});
  Tensor query = flatten(input, target).detach();
  if (adaptive_) { // ignored queries may hold anything
    query = at::where(flat.ne(options_.ignore_index).unsqueeze(1), query, at::zeros({}, query.options()));
  }
  const Tensor counted = at::where(flat.eq(options_.ignore_index), sampler->proposes_targets() ? -1 : 0, flat);
  sampler->prepare(linear->weight, optional(linear->bias), generator);
  const auto proposal = sampler->sample(query, sampling_.num_samples, shared_, counted, generator);
  std::optional<Tensor> private_ids, private_log_count;
  Tensor shared_ids = head, shared_log_count = at::zeros(head.sizes(), proposal.log_count.options());
  Tensor beside = proposal.shared_ids, beside_log_count = proposal.shared_log_count;
  const bool needs_target_count = find_estimator("SampledSoftmaxLoss", sampling_.estimator).needs_target_count;
  int64_t fixed_private = 0, beside_distinct = proposal.shared_distinct;
  if (shared_) {
    beside = proposal.ids;
    beside_log_count = proposal.log_count;
    // The batch's targets hold each query's own: the estimators that keep hits among independent draws must not see it twice.
    beside_distinct = proposal.distinct || (sampler->proposes_targets() && needs_target_count) ? beside.size(0) : 0;
  } else {
    private_ids = proposal.ids;
    private_log_count = proposal.log_count;
    fixed_private = proposal.distinct ? proposal.ids.size(1) : 0;
    sampler->note(proposal.ids);
  }
  if (beside.defined()) {
    if (beside_log_count.dim() == 2) {
      shared_log_count = shared_log_count.expand({beside_log_count.size(0), head.size(0)});
    }
    shared_ids = at::cat({shared_ids, beside});
    shared_log_count = at::cat({shared_log_count, beside_log_count}, -1);
    sampler->note(beside);
  }
  sampler->note(counted);
  const bool by_draws = proposal.target_log_draws.defined() && !needs_target_count;
  const Tensor target_log_count = needs_target_count || sampler->renormalises()
      ? (by_draws ? proposal.target_log_draws : proposal.target_log_count) : Tensor();
  const Tensor loss = sampled_softmax_loss(
      input, linear->weight, optional(linear->bias), target, private_ids, shared_ids, private_log_count, shared_log_count,
      optional(target_log_count), optional(weight), sampling_.estimator,
      sampling_.remove_accidental_hits, fixed_private, head.numel() + beside_distinct, reduction_, options_.ignore_index,
      options_.label_smoothing, sampling_.sparse_grad);
  if (!sampler->learns()) {
    return loss;
  }
  return with_gradient_of(loss, sampler->auxiliary_loss(query, linear->weight, optional(linear->bias), generator));
}

} // namespace xsoftmax::nn
