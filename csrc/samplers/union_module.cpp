#include <xsoftmax/union_sampler.h>

#include "samplers/merge_log_counts.h"
#include "samplers/modules.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;
using Parts = std::vector<std::shared_ptr<SamplerImpl>>;

constexpr const char* kName = "UnionSampler";

const Parts& checked_parts(const Parts& parts) {
  TORCH_CHECK_VALUE(!parts.empty(), kName, ": expected at least one sampler, got none");
  for (const auto& part : parts) {
    TORCH_CHECK_VALUE(part != nullptr, kName, ": expected samplers, got none");
    TORCH_CHECK_VALUE(part->num_classes() == parts[0]->num_classes(), kName, ": expected samplers of one number of classes, got ",
                      parts[0]->num_classes(), " and ", part->num_classes());
    TORCH_CHECK_VALUE(std::count(parts.begin(), parts.end(), part) == 1, kName, ": expected samplers of their own, got one of them twice");
    if (part->claimed()) { // an error claims none of them
      part->claim(kName);
    }
  }
  return parts;
}

int64_t total_samples(const Parts& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t(0), [](int64_t sum, const auto& part) {
    return sum == SamplerImpl::kOfBatch || part->num_samples() == SamplerImpl::kOfBatch ? SamplerImpl::kOfBatch : sum + part->num_samples();
  });
}

template <typename Predicate>
bool all(const Parts& parts, Predicate predicate) {
  return std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return predicate(*part); });
}

template <typename Predicate>
bool any(const Parts& parts, Predicate predicate) {
  return std::any_of(parts.begin(), parts.end(), [&](const auto& part) { return predicate(*part); });
}

// Shared parts draw first, then private ones, those of distinct draws last.
int turn_of(const SamplerImpl& part) { return part.shared() ? 0 : part.distinct() ? 2 : 1; }

Parts in_turn(Parts parts) {
  std::stable_sort(parts.begin(), parts.end(), [](const auto& one, const auto& other) { return turn_of(*one) < turn_of(*other); });
  return parts;
}

Tensor merge(const std::vector<Tensor>& log_counts) {
  static const auto op = find_op<Tensor(at::TensorList)>("xsoftmax::merge_log_counts");
  return op.call(log_counts);
}

} // namespace

UnionSamplerImpl::UnionSamplerImpl(Parts parts)
    : SamplerImpl(kName, checked_parts(parts)[0]->num_classes(), total_samples(parts),
                  all(parts, std::mem_fn(&SamplerImpl::shared)), all(parts, std::mem_fn(&SamplerImpl::distinct))),
      parts_(std::move(parts)) {
  auto list = register_module("parts", torch::nn::ModuleList());
  for (const auto& part : parts_) {
    part->claim(kName);
    list->push_back(part);
  }
}

Proposal UnionSamplerImpl::sample(const Tensor& queries, const Tensor& target, std::optional<at::Generator> generator) {
  const int64_t rows = queries.size(0);
  // The classes that a private part counts while it draws: the targets, and the ids of the parts before it.
  Tensor classes = target.defined() ? target.reshape({rows, target.dim() == 1 ? 1 : target.size(1)})
                                    : at::zeros({rows, 1}, queries.options().dtype(at::kLong));
  const int64_t given = classes.size(1);
  Proposal sets;
  std::vector<std::vector<Tensor>> counts; // what the sets of all parts say of each set's ids
  Parts before;
  for (const auto& part : in_turn(parts_)) {
    const bool shared = part->shared();
    const Proposal drawn = part->sample(queries, shared ? target : classes, generator);
    int64_t column = given;
    for (size_t k = 0; k < sets.size(); ++k) {
      const int64_t width = sets[k].ids.size(-1);
      if (shared) {
        counts[k].push_back(part->log_count(queries, sets[k].ids));
      }
      for (const CandidateSet& drawn_set : drawn) {
        if (!shared && drawn_set.target_log_count.defined()) {
          counts[k].push_back(drawn_set.target_log_count.narrow(1, column, width));
        }
      }
      column += width;
    }
    for (const CandidateSet& drawn_set : drawn) {
      counts.push_back({drawn_set.log_count});
      for (const auto& other : before) {
        counts.back().push_back(other->log_count(queries, drawn_set.ids));
      }
      sets.push_back(drawn_set);
      classes = at::cat({classes, drawn_set.ids.expand({rows, drawn_set.ids.size(-1)})}, 1);
    }
    before.push_back(part);
  }
  for (size_t k = 0; k < sets.size(); ++k) {
    Tensor& of_target = sets[k].target_log_count;
    sets[k].log_count = merge(counts[k]);
    if (!target.defined()) {
      of_target = Tensor();
    } else if (of_target.defined() && of_target.dim() == 2) {
      of_target = of_target.narrow(1, 0, given).reshape(target.sizes());
    }
  }
  return sets;
}

Tensor UnionSamplerImpl::log_count(const Tensor& queries, const Tensor& ids) {
  std::vector<Tensor> log_counts;
  for (const auto& part : parts_) {
    log_counts.push_back(part->log_count(queries, ids));
  }
  return merge(log_counts);
}

void UnionSamplerImpl::prepare(const Tensor& weight, const std::optional<Tensor>& bias, std::optional<at::Generator> generator) {
  for (const auto& part : parts_) {
    part->prepare(weight, bias, generator);
  }
}

std::map<std::string, double> UnionSamplerImpl::refresh(const Tensor& weight, const std::optional<Tensor>& bias) {
  std::map<std::string, double> stats;
  for (size_t i = 0; i < parts_.size(); ++i) {
    for (const auto& [name, value] : parts_[i]->refresh(weight, bias)) {
      stats[std::to_string(i) + "." + name] = value;
    }
  }
  return stats;
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

bool UnionSamplerImpl::follows_table() const { return any(parts_, std::mem_fn(&SamplerImpl::follows_table)); }
bool UnionSamplerImpl::has_distinct() const { return any(parts_, std::mem_fn(&SamplerImpl::has_distinct)); }
bool UnionSamplerImpl::has_independent() const { return any(parts_, std::mem_fn(&SamplerImpl::has_independent)); }

std::string UnionSamplerImpl::default_estimator() const {
  const bool independent = all(parts_, [](const SamplerImpl& part) { return turn_of(part) == 1; });
  const bool ranks = any(parts_, [](const SamplerImpl& part) { return part.default_estimator() == "ranking"; });
  return independent && ranks ? "ranking" : "sampled_softmax";
}

} // namespace xsoftmax::samplers
