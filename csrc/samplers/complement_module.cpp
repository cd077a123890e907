#include "core/checks.h"
#include "core/optional.h"
#include "samplers/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;

constexpr const char* kName = "ComplementSampler";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_inside(const Tensor& candidates, int64_t num_classes) {
  check::dim(kName, "candidates", candidates, 2);
  check::int64(kName, "candidates", candidates);
  TORCH_CHECK_VALUE(num_classes >= 1, kName, ": expected num_classes of at least 1, got ", num_classes);
}

Tensor columns_of(const Tensor& rows) { return at::arange(rows.sym_size(1).guard_int(__FILE__, __LINE__), rows.options()); }

// complement_of(candidates [Q or 1, C], num_classes) -> held [Q or 1, C]: the classes of each set, none twice, -1 where there is none; rising,
// and what is none behind all classes, as num_classes + a column of its own. What the two ops below take.
Tensor complement_of(const Tensor& candidates, int64_t num_classes) {
  check_inside(candidates, num_classes);
  return std::get<0>(at::where(candidates.ge(0), candidates, columns_of(candidates) + num_classes).sort(1));
}

Tensor complement_of_cpu(const Tensor& candidates, int64_t num_classes) {
  const Tensor held = complement_of(candidates, num_classes).contiguous(), given = candidates.contiguous();
  const int64_t *id = given.const_data_ptr<int64_t>(), *sorted = held.const_data_ptr<int64_t>(), size = held.size(1);
  for (int64_t i = 0; i < held.numel(); ++i) {
    TORCH_CHECK_INDEX(id[i] >= -1 && id[i] < num_classes, kName, ": expected candidates in [0, ", num_classes, "), or -1 for none, got ", id[i],
                      " at [", i / size, ", ", i % size, "]");
    TORCH_CHECK_VALUE(i % size == 0 || sorted[i] != sorted[i - 1], kName, ": expected candidates without repeats in a set, got ", sorted[i],
                      " twice in that of query ", i / size);
  }
  return held;
}

Tensor complement_of_meta(const Tensor& candidates, int64_t num_classes) {
  check_inside(candidates, num_classes);
  return at::empty_like(candidates);
}

void check_held(const Tensor& held, const Tensor& of) {
  check::dim(kName, "held", held, 2);
  check::int64(kName, "held", held);
  check::dim(kName, "draws", of, 2);
  TORCH_CHECK_VALUE(held.sym_size(0) == 1 || held.sym_size(0) == of.sym_size(0), kName, ": expected held with 1 row or ", of.sym_size(0),
                    ", the queries, got ", held.sym_size(0));
}

// Where `values` would stand in rising `rows` [Q or 1, C].
Tensor ranks(const Tensor& rows, const Tensor& values, bool right) {
  const bool one = rows.sym_size(0) == 1;
  return at::searchsorted(one ? rows.select(0, 0) : rows, values, /*out_int32=*/false, right);
}

// outside_uniform(held, share [Q, M] float64 in [0, 1), num_classes) -> ids [Q, M]: of the classes that are not held the
// floor(share * how many)-th.
Tensor outside_uniform(const Tensor& held, const Tensor& share, int64_t num_classes) {
  check_held(held, share);
  const Tensor left = num_classes - held.lt(num_classes).sum(1, true), index = (share * left).to(at::kLong);
  const Tensor before = held - columns_of(held); // how many classes outside stand before each
  return (index + ranks(before, index, /*right=*/true)).clamp(0, num_classes - 1);
}

// is_held(held, ids [Q, M]) -> bool [Q, M]: whether a class is in its query's set.
Tensor is_held(const Tensor& held, const Tensor& ids) {
  check_held(held, ids);
  if (held.sym_size(1) == 0) {
    return at::zeros_like(ids, at::kBool);
  }
  const Tensor place = ranks(held, ids.contiguous(), /*right=*/false).clamp_max(held.sym_size(1).guard_int(__FILE__, __LINE__) - 1);
  const bool one = held.sym_size(0) == 1;
  return (one ? held.select(0, 0).take(place) : held.gather(1, place)).eq(ids);
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
  static const auto sorted = find_op<Tensor(const Tensor&, int64_t)>("xsoftmax::complement_of");
  const Tensor held = sorted.call(candidates.dim() == 2 ? candidates : candidates.unsqueeze(0), num_classes), inside = held.lt(num_classes);
  const Tensor left = num_classes - inside.sum(1, true), some = left.gt(0); // [Q, 1] or [1, 1]
  static const auto uniform_sample =
      find_op<Tensor(const Tensor&, int64_t, int64_t, std::optional<int64_t>, int64_t, bool)>("xsoftmax::uniform_sample");
  constexpr int64_t resolution = int64_t(1) << 53;
  const Tensor numbers = uniform_sample.call(draw_seed(input, generator), 0, resolution, queries, num_samples, false);
  Tensor ids = outside_uniform(held, numbers.to(at::kDouble) / double(resolution), num_classes);
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
  const Tensor some_ids = held.clamp_max(num_classes - 1), each = is_static ? some_ids : some_ids.expand({queries, held.size(1)});
  const Tensor mass = at::where(inside, q(each), 0.0).sum(1, true).clamp_max(1.0);
  Tensor kept = at::ones_like(mass);
  for (int64_t i = 1; i < tries_; ++i) {
    kept = kept * mass + 1.0;
  }
  const Tensor rest = at::where(some, (log_uniform + double(tries_) * mass.log()).exp(), 0.0);
  const Tensor draws = sampler_->sample(input, num_samples * tries_, false, std::nullopt, generator).ids;
  const Tensor outside = is_held(held, draws).logical_not().view({queries, num_samples, tries_});
  const Tensor drawn = draws.view({queries, num_samples, tries_}).gather(2, outside.to(at::kChar).argmax(2, true)).squeeze(2);
  ids = at::where(outside.any(2), drawn, ids);
  const auto log_count = [&](const Tensor& of) { return (q(of) * kept + rest).log() + scale; };
  proposal.ids = ids;
  proposal.log_count = at::where(some, log_count(ids), kInfinity).to(at::kFloat);
  proposal.target_log_count = log_count(target.unsqueeze(1)).squeeze(1).to(at::kFloat);
  return proposal;
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("complement_of(Tensor candidates, int num_classes) -> Tensor");
  m.def("outside_uniform(Tensor held, Tensor share, int num_classes) -> Tensor", outside_uniform);
  m.def("is_held(Tensor held, Tensor ids) -> Tensor", is_held);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("complement_of", complement_of); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("complement_of", complement_of_cpu); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("complement_of", complement_of_meta); }

} // namespace xsoftmax::samplers
