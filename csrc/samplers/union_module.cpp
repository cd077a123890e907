#include "core/optional.h"
#include "samplers/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;

constexpr const char* kName = "UnionSampler";

Tensor add_counts(const Tensor& sum, const Tensor& log_count) { return sum.defined() ? at::logaddexp(sum, log_count) : log_count; }

int64_t common_classes(const std::vector<UnionSamplerImpl::Part>& parts) {
  TORCH_CHECK_VALUE(!parts.empty(), kName, ": expected at least one pair of sampler and number of draws, got none");
  for (const auto& [sampler, count] : parts) {
    TORCH_CHECK_VALUE(sampler != nullptr, kName, ": expected samplers, got none");
    TORCH_CHECK_VALUE(count >= 0, kName, ": expected a number of draws of at least 0, got ", count);
    TORCH_CHECK_TYPE(!sampler->proposes_targets() && dynamic_cast<UnionSamplerImpl*>(sampler.get()) == nullptr, kName,
                     ": expected samplers of independent or distinct draws, got ", sampler->name());
    TORCH_CHECK_VALUE(sampler->num_classes() == parts[0].first->num_classes(), kName, ": expected samplers of one number of classes, got ",
                      parts[0].first->num_classes(), " and ", sampler->num_classes());
    TORCH_CHECK_VALUE(sampler->shared_by_default() || !sampler->draws_distinct(false), kName,
                      ": expected private draws to be independent, got distinct ones");
  }
  TORCH_CHECK_VALUE(std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part.second > 0; }), kName,
                    ": expected at least one draw, got none");
  return parts[0].first->num_classes();
}

} // namespace

UnionSamplerImpl::UnionSamplerImpl(std::vector<Part> parts) : SamplerImpl(common_classes(parts)), parts_(std::move(parts)) {
  // Distinct shared draws first: an estimator renormalises the columns behind them. Samplers that count what stands before them last.
  std::stable_sort(parts_.begin(), parts_.end(), [](const Part& one, const Part& other) {
    const auto place = [](const Part& part) {
      return std::pair(!part.first->draws_distinct(part.first->shared_by_default()), part.first->counts_beside());
    };
    return place(one) < place(other);
  });
  for (size_t i = 0; i < parts_.size(); ++i) {
    register_module("part" + std::to_string(i), parts_[i].first);
  }
}

Proposal UnionSamplerImpl::sample(const Tensor& input, int64_t, bool, const std::optional<Tensor>& target,
                                  std::optional<at::Generator> generator) {
  const int64_t queries = input.size(0);
  const auto longs = input.options().dtype(at::kLong);
  // A sampler that looks at the query says what it would have drawn of the others' ids while it draws.
  std::vector<Proposal> proposals;
  std::vector<Tensor> beside, before; // its counts of the ids of the parts before it
  for (const auto& [part, count] : parts_) {
    const bool shared = part->shared_by_default(), asks = part->counts_beside() && !before.empty();
    std::vector<Tensor> classes{(given(target) ? *target : at::zeros({queries}, longs)).unsqueeze(1)};
    classes.insert(classes.end(), before.begin(), before.end());
    Proposal own = asks ? part->sample(input, count, shared, at::cat(classes, 1), generator) : part->sample(input, count, shared, target, generator);
    beside.push_back(asks ? own.target_log_count.narrow(1, 1, own.target_log_count.size(1) - 1) : Tensor());
    if (asks) {
      own.target_log_count = given(target) ? own.target_log_count.select(1, 0) : Tensor();
    }
    before.push_back(own.ids.expand({queries, own.ids.size(-1)}));
    proposals.push_back(own);
  }

  std::vector<Tensor> private_ids{at::zeros({queries, 0}, longs)}, shared_ids, shared_counts;
  std::vector<Tensor> private_counts{at::zeros({queries, 0}, input.options().dtype(at::kFloat))};
  Proposal all;
  bool by_query = false;
  int64_t begin = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Proposal& own = proposals[i];
    const bool shared = parts_[i].first->shared_by_default();
    const int64_t width = own.ids.size(-1);
    Tensor log_count = own.log_count;
    for (size_t j = 0; j < parts_.size(); ++j) {
      if (i < j && beside[j].defined()) {
        log_count = at::logaddexp(log_count, beside[j].narrow(1, begin, width));
      } else if (const auto& [other, other_count] = parts_[j]; j != i) {
        log_count = at::logaddexp(log_count, other->log_count(input, other_count, other->shared_by_default(), own.ids));
      }
    }
    begin += width;
    (shared ? shared_ids : private_ids).push_back(own.ids);
    (shared ? shared_counts : private_counts).push_back(log_count);
    by_query = by_query || (shared && log_count.dim() == 2);
    all.shared_distinct += shared && own.distinct ? own.ids.size(0) : 0;
    if (given(target)) {
      all.target_log_count = add_counts(all.target_log_count, own.target_log_count);
      all.target_log_draws = own.distinct ? all.target_log_draws : add_counts(all.target_log_draws, own.target_log_count);
    }
  }
  if (given(target) && !all.target_log_draws.defined()) {
    all.target_log_draws = at::full_like(all.target_log_count, -std::numeric_limits<double>::infinity());
  }
  all.ids = at::cat(private_ids, 1);
  all.log_count = at::cat(private_counts, 1);
  if (!shared_ids.empty()) {
    for (Tensor& count : shared_counts) {
      count = by_query ? count.expand({queries, count.size(-1)}) : count;
    }
    all.shared_ids = at::cat(shared_ids);
    all.shared_log_count = at::cat(shared_counts, -1);
  }
  return all;
}

Tensor UnionSamplerImpl::log_prob(const Tensor& input, const Tensor& ids) {
  Tensor total;
  int64_t size = 0;
  for (const auto& [part, count] : parts_) {
    total = add_counts(total, part->log_count(input, count, part->shared_by_default(), ids));
    size += count;
  }
  return (total - std::log(double(size))).to(at::kFloat);
}

std::map<std::string, double> UnionSamplerImpl::refresh(const Tensor& weight, const std::optional<Tensor>& bias) {
  std::map<std::string, double> stats;
  for (size_t i = 0; i < parts_.size(); ++i) {
    for (const auto& [name, value] : parts_[i].first->refresh(weight, bias)) {
      stats[std::to_string(i) + "." + name] = value;
    }
  }
  return stats;
}

std::pair<int64_t, int64_t> UnionSamplerImpl::draws_by_kind(int64_t, bool) const {
  std::pair<int64_t, int64_t> sum{0, 0};
  for (const auto& [sampler, count] : parts_) {
    const auto [distinct, independent] = sampler->draws_by_kind(count, sampler->shared_by_default());
    sum.first += distinct;
    sum.second += independent;
  }
  return sum;
}

bool UnionSamplerImpl::renormalises() const {
  return std::count_if(parts_.begin(), parts_.end(), [](const Part& part) {
           return part.second > 0 && !part.first->draws_distinct(part.first->shared_by_default());
         }) < 2;
}

bool UnionSamplerImpl::learns() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.first->learns(); });
}

void UnionSamplerImpl::check_num_samples(int64_t, bool) const {
  for (const auto& [part, count] : parts_) {
    part->check_num_samples(count, part->shared_by_default());
  }
}

void UnionSamplerImpl::prepare(const Tensor& weight, const std::optional<Tensor>& bias, std::optional<at::Generator> generator) {
  for (const auto& part : parts_) {
    part.first->prepare(weight, bias, generator);
  }
}

Tensor UnionSamplerImpl::auxiliary_loss(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                        std::optional<at::Generator> generator) {
  Tensor total;
  for (const auto& part : parts_) {
    const Tensor loss = part.first->auxiliary_loss(input, weight, bias, generator);
    total = loss.defined() && total.defined() ? total + loss : loss.defined() ? loss : total;
  }
  return total;
}

void UnionSamplerImpl::note(const Tensor& ids) {
  for (const auto& part : parts_) {
    part.first->note(ids);
  }
}

std::shared_ptr<SamplerImpl> UnionSamplerImpl::excluding(const Tensor& ids) {
  std::vector<Part> parts = parts_;
  for (auto& [part, count] : parts) {
    part = part->excluding(ids);
  }
  return std::make_shared<UnionSamplerImpl>(std::move(parts));
}

std::shared_ptr<SamplerImpl> UnionSamplerImpl::for_table(int64_t dim, bool bias) {
  std::vector<Part> parts = parts_;
  bool changed = false;
  for (auto& [part, count] : parts) {
    const auto other = part->for_table(dim, bias);
    changed = changed || other != nullptr;
    part = other ? other : part;
  }
  return changed ? std::make_shared<UnionSamplerImpl>(std::move(parts)) : nullptr;
}

} // namespace xsoftmax::samplers
