#include "op/optional.h"
#include "op/options.h"
#include "proposal/adaptive_modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <torch/serialize.h>

#include <algorithm>

namespace xsoftmax::samplers {

using at::Tensor;
using Optional = std::optional<Tensor>;

namespace {

[[maybe_unused]] const bool adaptive_modules_registered = [] {
  register_adaptive<LshSamplerImpl, LshOptions>("lsh");
  register_adaptive<SphereSamplerImpl, KernelOptions>("sphere");
  register_adaptive<RffSamplerImpl, KernelOptions>("rff");
  return true;
}();

} // namespace

AdaptiveSamplerImpl::AdaptiveSamplerImpl(const char* name, Family family, int64_t num_classes,
                                         int64_t dim, int64_t num_samples, bool shared,
                                         bool distinct, const Tensor& exclude, std::string options)
    : DescribedSamplerImpl(name, num_classes, num_samples, shared, distinct),
      family_(std::move(family)), dim_(dim), options_(std::move(options)) {
  tables_ = adaptive_index(family_.name, name, num_classes, dim,
                           exclude.defined() ? exclude.cpu() : at::empty({0}, at::kLong), options_);
  for (size_t i = 0; i < tables_.size(); ++i) {
    const std::string& table = family_.tables[i];
    const bool learnt =
        std::find(family_.learnt.begin(), family_.learnt.end(), table) != family_.learnt.end();
    tables_[i] =
        learnt ? register_parameter(table, tables_[i]) : register_buffer(table, tables_[i]);
  }
}

std::map<std::string, double> AdaptiveSamplerImpl::refresh(const Tensor& weight,
                                                           const Optional& bias) {
  const Tensor values =
      adaptive_refresh_(family_.name, weight, bias, tables_.back(), tables(), options_).cpu();
  std::map<std::string, double> named;
  for (int64_t i = 0; i < values.size(0); ++i) {
    named[family_.statistics[i]] = values[i].item<double>();
  }
  return named;
}

std::shared_ptr<SamplerImpl> AdaptiveSamplerImpl::excluding(const Tensor& ids) const {
  const Tensor before = excluded();
  const auto sampler = like(at::cat({before, ids.to(before.device())}));
  sampler->to(before.device());
  return sampler;
}

std::function<void()> AdaptiveSamplerImpl::plan_growth(int64_t num_classes, const Tensor& rows,
                                                       const Optional& bias) {
  std::vector<Tensor> gained =
      adaptive_grow(family_.name, name(), num_classes, optional(rows), bias, tables_, options_);
  if (gained.empty()) {
    return {};
  }
  return [this, num_classes, gained = std::move(gained)] {
    const at::NoGradGuard guard;
    const std::vector<Tensor> grown(tables_.begin(), tables_.end() - 2);
    static const auto op = find_op<decltype(adaptive_grow_)>("xsoftmax::adaptive_grow_");
    op.call(tables_.end()[-2], grown, gained, this->num_classes(), num_classes);
    set_num_classes(num_classes);
  };
}

std::function<void()> AdaptiveSamplerImpl::plan_resize(int64_t num_classes, const Tensor& rows,
                                                       const Optional& bias) {
  std::vector<Tensor> index =
      adaptive_resize(family_.name, name(), num_classes, optional(rows), bias, tables_, options_);
  return [this, num_classes, index = std::move(index)] {
    const at::NoGradGuard guard;
    for (size_t i = 0; i < index.size(); ++i) {
      if (std::find(family_.learnt.begin(), family_.learnt.end(), family_.tables[i]) ==
          family_.learnt.end()) {
        tables_[i].set_data(index[i]);
      }
    }
    set_num_classes(num_classes);
  };
}

void AdaptiveSamplerImpl::to(torch::Device device, bool non_blocking) {
  const Tensor recent = tables_.end()[-2].detach(), step = tables_.back().detach();
  SamplerImpl::to(device, non_blocking);
  tables_.end()[-2].set_data(recent);
  tables_.back().set_data(step);
}

void AdaptiveSamplerImpl::load(torch::serialize::InputArchive& archive) {
  std::vector<Tensor> saved(tables_.size());
  std::string missing;
  bool fits = true, from_family = false;
  for (size_t i = 0; i < tables_.size(); ++i) {
    const std::string& table = family_.tables[i];
    const bool found =
        archive.try_read(table, saved[i], /*is_buffer=*/true) || archive.try_read(table, saved[i]);
    if (found) {
      fits = fits && saved[i].sizes() == tables_[i].sizes();
      from_family = from_family || table == family_.places;
    } else if (tables_[i].numel() > 0) { // empty tables may be missing
      missing += (missing.empty() ? "" : ", ") + table;
    }
  }
  TORCH_CHECK_VALUE(missing.empty() || !fits || !from_family, name(),
                    ": expected a checkpoint with the whole index or none of it, got one without ",
                    missing);
  if (!missing.empty() || !fits) {
    tables_.back().zero_();
    return;
  }
  const Tensor before = excluded();
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (saved[i].defined()) {
      tables_[i].set_data(saved[i].detach().to(tables_[i].device()));
    }
  }
  tables_.end()[-2].set_data(tables_.end()[-2].cpu());
  tables_.back().set_data(tables_.back().cpu());
  if (!at::equal(excluded(), before)) {
    const at::NoGradGuard guard;
    const auto new_sampler = like(before);
    for (size_t i = 0; i < tables_.size(); ++i) {
      tables_[i].copy_(new_sampler->tables_[i]);
    }
  }
}

Tensor AdaptiveSamplerImpl::table(const std::string& name) const {
  const auto found = std::find(family_.tables.begin(), family_.tables.end(), name);
  TORCH_CHECK_VALUE(found != family_.tables.end(), this->name(),
                    ": expected the name of a table, got \"", name, "\"");
  return tables_[found - family_.tables.begin()];
}

Tensor AdaptiveSamplerImpl::excluded() const {
  return table(family_.places).view({num_classes(), -1}).select(1, 0).lt(0).nonzero().squeeze(1);
}

std::vector<Tensor> AdaptiveSamplerImpl::tables() const {
  return {tables_.begin(), tables_.end() - 1};
}

namespace {

template <typename Sampler, typename Options>
std::shared_ptr<AdaptiveSamplerImpl> make_like(int64_t num_classes, int64_t dim, Options options,
                                               const Tensor& exclude) {
  options.exclude = exclude;
  return std::make_shared<Sampler>(num_classes, dim, options);
}

} // namespace

LshSamplerImpl::LshSamplerImpl(int64_t num_classes, int64_t dim, const LshOptions& options)
    : AdaptiveSamplerImpl(
          "LshSampler",
          {"lsh", {"planes", "code", "order", "start", "recent", "step"}, "code", {"largest"}},
          num_classes, dim, options.num_samples, false, false, options.exclude,
          print_options(options)),
      lsh_options_(options) {}

std::shared_ptr<AdaptiveSamplerImpl> LshSamplerImpl::like(const Tensor& exclude) const {
  return make_like<LshSamplerImpl>(num_classes(), dim(), lsh_options_, exclude);
}

namespace {

std::string kernel_text(KernelOptions& options, const char* kernel) {
  options.kernel = kernel;
  return print_options(options);
}

} // namespace

KernelSamplerImpl::KernelSamplerImpl(const char* name, const char* kernel, int64_t num_classes,
                                     int64_t dim, KernelOptions options)
    : AdaptiveSamplerImpl(name,
                          {"kernel",
                           {"directions", "rows", "sums", "order", "place", "recent", "step"},
                           "place",
                           {}},
                          num_classes, dim, options.num_samples, false, false, options.exclude,
                          kernel_text(options, kernel)),
      kernel_options_(options) {}

std::shared_ptr<AdaptiveSamplerImpl> SphereSamplerImpl::like(const Tensor& exclude) const {
  return make_like<SphereSamplerImpl>(num_classes(), dim(), kernel_options_, exclude);
}

std::shared_ptr<AdaptiveSamplerImpl> RffSamplerImpl::like(const Tensor& exclude) const {
  return make_like<RffSamplerImpl>(num_classes(), dim(), kernel_options_, exclude);
}

} // namespace xsoftmax::samplers
