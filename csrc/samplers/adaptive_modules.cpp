#include "samplers/kernel_sample.h"
#include "samplers/lsh_sample.h"
#include "samplers/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Draws = std::tuple<Tensor, Tensor, Tensor>;

void check_at_least(const char* name, const char* argument, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, name, ": expected ", argument, " of at least ", least, ", got ", value);
}

void check_positive(const char* name, const char* argument, double value) {
  TORCH_CHECK_VALUE(value > 0 && std::isfinite(value), name, ": expected ", argument, " as a finite number above 0, got ", value);
}

} // namespace

Tensor excluded_ids(const char* name, int64_t exclude_below, const Optional& exclude, int64_t num_classes) {
  const Excluded excluded = check_exclude(name, exclude_below, exclude, num_classes);
  return excluded.ids.has_value() ? excluded.ids->cpu() : at::arange(excluded.low, at::kLong);
}

Tensor target_or_first(const Optional& target, const Tensor& input) {
  return given(target) ? *target : at::zeros({input.size(0)}, input.options().dtype(at::kLong));
}

Proposal make_proposal(const Draws& draws, const Optional& target, bool distinct) {
  const auto& [ids, log_count, target_log_count] = draws;
  return {ids, log_count, given(target) ? target_log_count : Tensor(), distinct, {}, {}, 0, {}};
}

AdaptiveSamplerImpl::AdaptiveSamplerImpl(const char* name, int64_t num_classes, int64_t dim, bool bias)
    : SamplerImpl(check_num_classes(name, num_classes)), name_(name), dim_(dim), bias_(bias) {
  check_at_least(name, "dim", dim, 1);
  step = register_buffer("step", at::zeros({}, at::kLong));
}

Tensor AdaptiveSamplerImpl::log_count(const Tensor& input, int64_t num_samples, bool shared, const Tensor& ids) {
  TORCH_CHECK_VALUE(!shared, name_, ": expected private draws of a sampler that looks at the query, got shared ones");
  return log_prob(input, ids) + std::log(double(num_samples));
}

void AdaptiveSamplerImpl::check_input(const Tensor& input) const {
  TORCH_CHECK_VALUE(input.dim() == 2 && input.size(1) == dim_, name_, ": expected input of shape [Q, ", dim_, "], got ", input.sizes());
}

void AdaptiveSamplerImpl::check_table(const Tensor& weight, const Optional& bias) const {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) == num_classes_ && weight.size(1) == dim_, name_, ": expected weight of shape [",
                    num_classes_, ", ", dim_, "], got ", weight.sizes());
  TORCH_CHECK_VALUE(given(bias) == bias_, name_, ": expected ", bias_ ? "a bias" : "no bias", ", as it was built with bias=",
                    bias_ ? "true" : "false", ", got ", given(bias) ? "one" : "none");
}

std::shared_ptr<SamplerImpl> AdaptiveSamplerImpl::excluding(const Tensor& ids) {
  auto sampler = like(at::cat({excluded(), ids.to(step.device())}), bias_);
  sampler->to(step.device());
  return sampler;
}

std::shared_ptr<SamplerImpl> AdaptiveSamplerImpl::for_table(int64_t dim, bool bias) {
  TORCH_CHECK_VALUE(dim == dim_, name_, ": expected a table of width ", dim_, ", got ", dim);
  if (bias == bias_) {
    return nullptr;
  }
  auto sampler = like(excluded(), bias);
  sampler->to(step.device());
  return sampler;
}

void AdaptiveSamplerImpl::check_num_samples(int64_t num_samples, bool shared) const {
  TORCH_CHECK_VALUE(!shared || shares(), name_, ": expected shared to be false, got true: it draws for each query");
  SamplerImpl::check_num_samples(num_samples, shared);
}

void AdaptiveSamplerImpl::load(torch::serialize::InputArchive& archive) {
  const auto tables = [](const torch::nn::Module& module) {
    auto all = module.named_buffers(false);
    for (const auto& parameter : module.named_parameters(false)) {
      all.insert(parameter.key(), parameter.value());
    }
    return all;
  };
  for (const auto& table : tables(*this)) {
    Tensor saved;
    const bool found = archive.try_read(table.key(), saved, /*is_buffer=*/true) || archive.try_read(table.key(), saved);
    if (!found || saved.sizes() != table.value().sizes()) {
      step.zero_();
      return;
    }
  }
  const Tensor own = excluded().clone();
  Module::load(archive);
  if (!at::equal(excluded(), own)) {
    const at::NoGradGuard guard;
    const auto fresh = like(own, bias_);
    const auto as_built = tables(*fresh);
    for (const auto& table : tables(*this)) {
      Tensor(table.value()).copy_(as_built[table.key()]);
    }
  }
}

LshSamplerImpl::LshSamplerImpl(int64_t num_classes, int64_t dim, const LshOptions& options)
    : AdaptiveSamplerImpl("LshSampler", num_classes, dim, options.bias), options_(options) {
  check_at_least(name_, "tables", options.tables, 1);
  check_at_least(name_, "bits", options.bits, 1);
  TORCH_CHECK_VALUE(options.bits <= kLshMostBits, name_, ": expected bits of at most ", kLshMostBits, ", got ", options.bits);
  TORCH_CHECK_VALUE(options.uniform >= 0 && options.uniform <= 1, name_, ": expected uniform in [0, 1], got ", options.uniform);
  check_at_least(name_, "refresh_every", options.refresh_every, 0);
  const Tensor ids = excluded_ids(name_, options.exclude_below, options.exclude, num_classes);
  // As if all rows were on one side of all planes, until the first refresh.
  planes = register_buffer("planes", at::randn({options.tables * options.bits, dim + (options.bias ? 1 : 0)}));
  code = register_buffer("code", at::zeros({num_classes, options.tables}, at::kInt).index_fill_(0, ids, -1));
  const Tensor drawn = code.select(1, 0).ge(0).nonzero().squeeze(1);
  order = register_buffer("order", drawn.repeat({options.tables, 1}));
  start = register_buffer("start", at::full({options.tables, (int64_t(1) << options.bits) + 1}, drawn.size(0), at::kLong));
  start.select(1, 0).zero_();
}

Proposal LshSamplerImpl::sample(const Tensor& input, int64_t num_samples, bool shared, const Optional& target,
                                std::optional<at::Generator> generator) {
  check_input(input);
  static const auto op =
      find_op<Draws(const Tensor&, const Tensor&, XS_LSH_INDEX_PARAMS, double, c10::SymInt, const Tensor&)>("xsoftmax::lsh_sample");
  TORCH_CHECK_VALUE(!shared, name_, ": expected private draws, got shared ones: buckets are those of a query");
  return make_proposal(op.call(draw_seed(input, generator), input, planes, code, order, start, options_.uniform, num_samples,
                               target_or_first(target, input)), target, false);
}

Tensor LshSamplerImpl::log_prob(const Tensor& input, const Tensor& ids) {
  check_input(input);
  static const auto op = find_op<Tensor(const Tensor&, XS_LSH_INDEX_PARAMS, double, const Tensor&)>("xsoftmax::lsh_log_prob");
  return op.call(input, planes, code, order, start, options_.uniform, ids);
}

namespace {

void lsh_refresh(const Tensor& weight, const Optional& bias, XS_LSH_INDEX_PARAMS, const Optional& step, int64_t refresh_every) {
  static const auto op =
      find_op<void(const Tensor&, const Optional&, XS_LSH_INDEX_PARAMS, const Optional&, int64_t)>("xsoftmax::lsh_refresh_");
  op.call(weight.detach(), detached(bias), XS_LSH_INDEX_ARGS, step, refresh_every);
}

void kernel_refresh(const Tensor& weight, const Optional& bias, XS_KERNEL_INDEX_PARAMS, const Optional& step, int64_t refresh_every) {
  static const auto op =
      find_op<void(const Tensor&, const Optional&, XS_KERNEL_INDEX_PARAMS, const Optional&, int64_t)>("xsoftmax::kernel_refresh_");
  op.call(weight.detach(), detached(bias), XS_KERNEL_INDEX_ARGS, step, refresh_every);
}

} // namespace

std::map<std::string, double> LshSamplerImpl::refresh(const Tensor& weight, const Optional& bias) {
  check_table(weight, bias);
  lsh_refresh(weight, bias, planes, code, order, start, std::nullopt, 0);
  step.clamp_min_(1);
  return {{"largest", start.diff().max().item<double>() / double(order.size(1))}};
}

void LshSamplerImpl::prepare(const Tensor& weight, const Optional& bias, std::optional<at::Generator>) {
  check_table(weight, bias);
  lsh_refresh(weight, bias, planes, code, order, start, step, options_.refresh_every);
}

Tensor LshSamplerImpl::excluded() const { return code.select(1, 0).lt(0).nonzero().squeeze(1); }

std::shared_ptr<SamplerImpl> LshSamplerImpl::like(const Tensor& excluded, bool bias) const {
  return std::make_shared<LshSamplerImpl>(num_classes_, dim_, for_another(options_, excluded, bias));
}

KernelSamplerImpl::KernelSamplerImpl(const char* name, int64_t num_classes, int64_t dim, bool bias, int64_t refresh_every, double scale)
    : AdaptiveSamplerImpl(name, num_classes, dim, bias), refresh_every_(refresh_every), scale_(scale) {
  check_at_least(name, "refresh_every", refresh_every, 0);
}

void KernelSamplerImpl::make_tree(int64_t exclude_below, const Optional& exclude, int64_t width, int64_t features, int64_t leaf_size) {
  place = register_buffer("place", at::zeros({num_classes_}, at::kLong));
  place.index_fill_(0, excluded_ids(name_, exclude_below, exclude, num_classes_), -1);
  order = register_buffer("order", place.ge(0).nonzero().squeeze(1));
  place.index_copy_(0, order, at::arange(order.size(0), at::kLong));
  int64_t leaves = 1;
  while (2 * leaves * leaf_size <= order.size(0)) {
    leaves *= 2;
  }
  rows = register_buffer("rows", at::zeros({order.size(0), width}));
  sums = register_buffer("sums", at::zeros({2 * leaves, features}));
}

Proposal KernelSamplerImpl::sample(const Tensor& input, int64_t num_samples, bool shared, const Optional& target,
                                   std::optional<at::Generator> generator) {
  check_input(input);
  static const auto op =
      find_op<Draws(const Tensor&, const Tensor&, XS_KERNEL_INDEX_PARAMS, double, c10::SymInt, const Tensor&)>("xsoftmax::kernel_sample");
  TORCH_CHECK_VALUE(!shared, name_, ": expected private draws, got shared ones: the kernel looks at the query");
  return make_proposal(op.call(draw_seed(input, generator), input, optional(directions), rows, sums, order, place, scale_, num_samples,
                               target_or_first(target, input)), target, false);
}

Tensor KernelSamplerImpl::log_prob(const Tensor& input, const Tensor& ids) {
  check_input(input);
  static const auto op = find_op<Tensor(const Tensor&, XS_KERNEL_INDEX_PARAMS, double, const Tensor&)>("xsoftmax::kernel_log_prob");
  return op.call(input, optional(directions), rows, sums, order, place, scale_, ids);
}

std::map<std::string, double> KernelSamplerImpl::refresh(const Tensor& weight, const Optional& bias) {
  check_table(weight, bias);
  kernel_refresh(weight, bias, optional(directions), rows, sums, order, place, std::nullopt, 0);
  step.clamp_min_(1);
  return {};
}

void KernelSamplerImpl::prepare(const Tensor& weight, const Optional& bias, std::optional<at::Generator>) {
  check_table(weight, bias);
  kernel_refresh(weight, bias, optional(directions), rows, sums, order, place, step, refresh_every_);
}

Tensor KernelSamplerImpl::excluded() const { return place.lt(0).nonzero().squeeze(1); }

SphereSamplerImpl::SphereSamplerImpl(int64_t num_classes, int64_t dim, const SphereOptions& options)
    : KernelSamplerImpl("SphereSampler", num_classes, dim, options.bias, options.refresh_every, options.alpha), options_(options) {
  check_positive(name_, "alpha", options.alpha);
  const int64_t width = dim + (options.bias ? 1 : 0);
  make_tree(options.exclude_below, options.exclude, width, width * (width + 1) / 2, width);
}

std::shared_ptr<SamplerImpl> SphereSamplerImpl::like(const Tensor& excluded, bool bias) const {
  return std::make_shared<SphereSamplerImpl>(num_classes_, dim_, for_another(options_, excluded, bias));
}

RffSamplerImpl::RffSamplerImpl(int64_t num_classes, int64_t dim, const RffOptions& options)
    : KernelSamplerImpl("RffSampler", num_classes, dim, options.bias, options.refresh_every, options.floor), options_(options) {
  check_at_least(name_, "features", options.features, 1);
  check_positive(name_, "tau", options.tau);
  check_positive(name_, "floor", options.floor);
  make_tree(options.exclude_below, options.exclude, 2 * options.features, 2 * options.features, 32);
  directions = register_buffer("directions", at::randn({options.features, dim + (options.bias ? 1 : 0)}).mul_(std::sqrt(options.tau)));
}

std::shared_ptr<SamplerImpl> RffSamplerImpl::like(const Tensor& excluded, bool bias) const {
  return std::make_shared<RffSamplerImpl>(num_classes_, dim_, for_another(options_, excluded, bias));
}

std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, int64_t num_classes, int64_t dim) {
  if (name == "midx") {
    return std::make_shared<MidxSamplerImpl>(num_classes, dim);
  }
  if (name == "lsh") {
    return std::make_shared<LshSamplerImpl>(num_classes, dim);
  }
  if (name == "sphere") {
    return std::make_shared<SphereSamplerImpl>(num_classes, dim);
  }
  TORCH_CHECK_VALUE(name == "rff", "make_sampler: expected \"midx\", \"lsh\", \"sphere\" or \"rff\" for a class table of width ", dim,
                    ", got \"", name, "\"");
  return std::make_shared<RffSamplerImpl>(num_classes, dim);
}

} // namespace xsoftmax::samplers
