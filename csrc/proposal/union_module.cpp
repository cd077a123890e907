#include <xsoftmax/sampler.h>

#include "op/optional.h"
#include "proposal/modules.h"
#include "proposal/union_kind.h"
#include "proposal/union_merge.h"

#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;
using Parts = std::vector<std::shared_ptr<SamplerImpl>>;

constexpr const char* kUnionModule = "UnionSampler";

const Parts& checked_parts(const Parts& parts) {
  TORCH_CHECK_VALUE(!parts.empty(), kUnionModule, ": expected at least one sampler, got none");
  for (const auto& part : parts) {
    TORCH_CHECK_VALUE(part != nullptr, kUnionModule, ": expected samplers, got none");
    TORCH_CHECK_VALUE(part->num_classes() == parts[0]->num_classes(), kUnionModule,
                      ": expected samplers of one number of classes, got ", parts[0]->num_classes(),
                      " and ", part->num_classes());
    TORCH_CHECK_VALUE(std::count(parts.begin(), parts.end(), part) == 1, kUnionModule,
                      ": expected different samplers, got one of them twice");
    if (part->claimed()) { // throws before any part is claimed
      part->claim(kUnionModule);
    }
  }
  return parts;
}

int64_t total_samples(const Parts& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t(0), [](int64_t sum, const auto& part) {
    return sum == SamplerImpl::kOfBatch || part->num_samples() == SamplerImpl::kOfBatch
        ? SamplerImpl::kOfBatch
        : sum + part->num_samples();
  });
}

template <typename Predicate>
bool all(const Parts& parts, Predicate predicate) {
  return std::all_of(parts.begin(), parts.end(),
                     [&](const auto& part) { return predicate(*part); });
}

template <typename Predicate>
bool any(const Parts& parts, Predicate predicate) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const auto& part) { return predicate(*part); });
}

} // namespace

UnionSamplerImpl::UnionSamplerImpl(Parts parts)
    // Each argument checks the parts, because their order of evaluation is unspecified.
    : SamplerImpl(kUnionModule, checked_parts(parts)[0]->num_classes(),
                  total_samples(checked_parts(parts)),
                  all(checked_parts(parts), std::mem_fn(&SamplerImpl::shared)),
                  all(checked_parts(parts), std::mem_fn(&SamplerImpl::distinct))),
      parts_(std::move(parts)) {
  auto list = register_module("parts", torch::nn::ModuleList());
  for (const auto& part : parts_) {
    part->claim(kUnionModule);
    list->push_back(part);
  }
}

Proposal UnionSamplerImpl::sample(const Tensor& queries, const Tensor& target,
                                  std::optional<at::Generator> generator) {
  std::vector<UnionPart> parts;
  for (const auto& part : parts_) {
    parts.push_back(part_of(part));
  }
  return sample_union({queries, optional(target), std::move(generator), is_training()},
                      std::move(parts));
}

Tensor UnionSamplerImpl::log_count(const Tensor& queries, const Tensor& ids) {
  std::vector<Tensor> log_counts;
  for (const auto& part : parts_) {
    log_counts.push_back(part->log_count(queries, ids));
  }
  return merge_log_counts(log_counts);
}

void UnionSamplerImpl::prepare(const Tensor& weight, const std::optional<Tensor>& bias,
                               std::optional<at::Generator> generator) {
  for (const auto& part : parts_) {
    part->prepare(weight, bias, generator);
  }
}

std::map<std::string, double> UnionSamplerImpl::refresh(const Tensor& weight,
                                                        const std::optional<Tensor>& bias) {
  std::map<std::string, double> stats;
  for (size_t i = 0; i < parts_.size(); ++i) {
    for (const auto& [name, value] : parts_[i]->refresh(weight, bias)) {
      stats[std::to_string(i) + "." + name] = value;
    }
  }
  return stats;
}

std::function<void()> UnionSamplerImpl::plan_growth(int64_t num_classes, const Tensor& rows,
                                                    const std::optional<Tensor>& bias) {
  std::vector<std::function<void()>> plans;
  for (const auto& part : parts_) {
    plans.push_back(part->plan_growth(num_classes, rows, bias));
    if (!plans.back()) {
      return {};
    }
  }
  return [this, num_classes, plans = std::move(plans)] {
    for (const auto& plan : plans) {
      plan();
    }
    set_num_classes(num_classes);
  };
}

std::function<void()> UnionSamplerImpl::plan_resize(int64_t num_classes, const Tensor& rows,
                                                    const std::optional<Tensor>& bias) {
  std::vector<std::function<void()>> plans;
  for (const auto& part : parts_) {
    plans.push_back(part->plan_resize(num_classes, rows, bias));
  }
  return [this, num_classes, plans = std::move(plans)] {
    for (const auto& plan : plans) {
      plan();
    }
    set_num_classes(num_classes);
  };
}

std::shared_ptr<SamplerImpl> UnionSamplerImpl::excluding(const Tensor& ids) const {
  Parts parts;
  for (const auto& part : parts_) {
    parts.push_back(part->excluding(ids));
    if (parts.back() == nullptr) {
      return nullptr;
    }
  }
  return std::make_shared<UnionSamplerImpl>(std::move(parts));
}

bool UnionSamplerImpl::follows_table() const {
  return any(parts_, std::mem_fn(&SamplerImpl::follows_table));
}
bool UnionSamplerImpl::has_distinct() const {
  return any(parts_, std::mem_fn(&SamplerImpl::has_distinct));
}
bool UnionSamplerImpl::has_independent() const {
  return any(parts_, std::mem_fn(&SamplerImpl::has_independent));
}

std::string UnionSamplerImpl::default_estimator() const {
  const bool independent =
      all(parts_, [](const SamplerImpl& part) { return !part.shared() && !part.distinct(); });
  const bool ranks =
      any(parts_, [](const SamplerImpl& part) { return part.default_estimator() == "ranking"; });
  return independent && ranks ? "ranking" : "sampled_softmax";
}

} // namespace xsoftmax::samplers
