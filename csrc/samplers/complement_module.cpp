#include "core/optional.h"
#include "samplers/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;

constexpr const char* kName = "ComplementSampler";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// outside_uniform(inside [Q or 1, C], share [Q, M] float64, num_classes) -> ids [Q, M]: of the classes that are not inside, which holds no
// class twice and -1 where it holds none, the floor(share * how many)-th.
Tensor outside_uniform(const Tensor& inside, const Tensor& share, int64_t num_classes) {
  const Tensor column = at::arange(inside.sym_size(1).guard_int(__FILE__, __LINE__), inside.options());
  // What is no candidate stands behind all classes, where it moves nothing.
  const Tensor held = std::get<0>(at::where(inside.ge(0), inside, column + num_classes).sort(1));
  const Tensor left = num_classes - inside.ge(0).sum(1, true), index = (share * left).to(at::kLong);
  const Tensor before = held - column; // how many classes outside stand before each
  const Tensor rows = before.expand_symint({share.sym_size(0), before.sym_size(1)}).contiguous();
  return (index + at::searchsorted(rows, index, /*out_int32=*/false, /*right=*/true)).clamp_max(num_classes - 1);
}

} // namespace

ComplementSampler::ComplementSampler(std::shared_ptr<SamplerImpl> sampler, int64_t tries) : sampler_(std::move(sampler)), tries_(tries) {
  TORCH_CHECK_VALUE(sampler_ != nullptr, kName, ": expected a sampler, got none");
  TORCH_CHECK_VALUE(!sampler_->proposes_targets() && !sampler_->draws_distinct(false) &&
                        dynamic_cast<const UnionSamplerImpl*>(sampler_.get()) == nullptr,
                    kName, ": expected one sampler whose private draws are independent, got ", sampler_->name());
  TORCH_CHECK_VALUE(tries >= 1, kName, ": expected tries of at least 1, got ", tries);
  const auto* uniform = dynamic_cast<const UniformSamplerImpl*>(sampler_.get());
  if (uniform != nullptr && uniform->draws_from_all()) {
    tries_ = 0; // of its draws only the uniform ones over all that is outside are needed
  }
}

Proposal ComplementSampler::sample(const Tensor& input, int64_t num_samples, const Tensor& candidates, const Tensor& target,
                                   std::optional<at::Generator> generator) const {
  const int64_t queries = input.size(0), num_classes = sampler_->num_classes();
  TORCH_CHECK_VALUE(candidates.dim() == 1 || (candidates.dim() == 2 && candidates.size(0) == queries), kName,
                    ": expected candidates of shape [C] or [", queries, ", C], got ", candidates.sizes());
  const Tensor inside = candidates.dim() == 2 ? candidates : candidates.unsqueeze(0), held = inside.ge(0);
  const Tensor left = num_classes - held.sum(1, true), some = left.gt(0); // [Q, 1] or [1, 1]
  static const auto uniform_sample =
      find_op<Tensor(const Tensor&, int64_t, int64_t, std::optional<int64_t>, int64_t, bool)>("xsoftmax::uniform_sample");
  constexpr int64_t resolution = int64_t(1) << 53;
  const Tensor numbers = uniform_sample.call(draw_seed(input, generator), 0, resolution, queries, num_samples, false);
  Tensor ids = outside_uniform(inside, numbers.to(at::kDouble) / double(resolution), num_classes);
  const Tensor log_uniform = -left.to(at::kDouble).log();
  const double scale = num_samples > 0 ? std::log(double(num_samples)) : 0.0;
  Proposal proposal;
  if (tries_ == 0) {
    const Tensor log_count = (log_uniform + scale).to(at::kFloat);
    proposal.ids = ids;
    proposal.log_count = at::where(some, log_count, kInfinity).expand({queries, num_samples});
    proposal.target_log_count = log_count.expand({queries, 1}).select(1, 0);
    return proposal;
  }
  const auto q = [&](const Tensor& of) { return sampler_->log_prob(input, of).to(at::kDouble).exp(); };
  const bool is_static = dynamic_cast<const StaticSamplerImpl*>(sampler_.get()) != nullptr; // its q is the same for all queries
  const Tensor some_ids = inside.clamp_min(0), each = is_static ? some_ids : some_ids.expand({queries, inside.size(1)});
  const Tensor mass = at::where(held, q(each), 0.0).sum(1, true).clamp_max(1.0);
  Tensor kept = at::ones_like(mass);
  for (int64_t i = 1; i < tries_; ++i) {
    kept = kept * mass + 1.0;
  }
  const Tensor rest = at::where(some, (log_uniform + double(tries_) * mass.log()).exp(), 0.0);
  const Tensor draws = sampler_->sample(input, num_samples * tries_, false, std::nullopt, generator).ids;
  const Tensor outside = draws.unsqueeze(2).ne(inside.unsqueeze(1)).all(2).view({queries, num_samples, tries_});
  const Tensor drawn = draws.view({queries, num_samples, tries_}).gather(2, outside.to(at::kChar).argmax(2, true)).squeeze(2);
  ids = at::where(outside.any(2), drawn, ids);
  const auto log_count = [&](const Tensor& of) { return (q(of) * kept + rest).log() + scale; };
  proposal.ids = ids;
  proposal.log_count = at::where(some, log_count(ids), kInfinity).to(at::kFloat);
  proposal.target_log_count = log_count(target.unsqueeze(1)).squeeze(1).to(at::kFloat);
  return proposal;
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) { m.def("outside_uniform(Tensor inside, Tensor share, int num_classes) -> Tensor", outside_uniform); }

} // namespace xsoftmax::samplers
