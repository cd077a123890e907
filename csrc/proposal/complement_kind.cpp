#include "op/checks.h"
#include "op/options.h"
#include "proposal/complement_sample.h"
#include "proposal/modules.h"
#include "proposal/sampler_kind.h"
#include "proposal/union_kind.h"

#include <ATen/ops/full.h>

// Kind "complement": draws outside a set per query, by its part if it has one. The set is the
// query's target by default. Options: ComplementOptions.

namespace xsoftmax {

using at::Tensor;

namespace { constexpr const char* kComplementKind = "ComplementSampler"; } // namespace

CandidateSet sample_outside(const DrawRequest& request, const Tensor& candidates,
                            const UnionPart* part, std::string_view text) {
  const auto options = parse_options<ComplementOptions>(kComplementKind, text);
  const c10::SymInt rows = request.queries.sym_size(0);
  TORCH_CHECK_VALUE(
      candidates.dim() == 1 || (candidates.dim() == 2 && candidates.sym_size(0) == rows),
      kComplementKind, ": expected candidates of shape [C] or [", rows, ", C], got ",
      candidates.sym_sizes());
  const bool of_batch = candidates.dim() == 1;
  const Tensor inside =
      sort_sets(of_batch ? candidates.unsqueeze(0) : candidates, options.num_classes);
  OptionalTensor draws, inside_count, log_count, target_count;
  if (part != nullptr) {
    const Proposal sets = part->sample(request);
    TORCH_CHECK_VALUE(sets.size() == 1, kComplementKind, ": expected a sampler of one set, got ",
                      sets.size(), " sets");
    draws = sets[0].ids;
    target_count = optional(sets[0].target_log_count);
    const Tensor classes = inside.clamp_max(options.num_classes - 1);
    inside_count = part->log_count(request.queries, of_batch ? classes.select(0, 0) : classes);
  }
  const Tensor ids =
      complement_sample(seed_of(request, /*shared=*/false), inside, draws, request.queries, text);
  if (part != nullptr) {
    log_count = part->log_count(request.queries, ids);
  }
  const auto [ids_log_count, target_log_count] = complement_log_count(
      inside, inside_count, ids, log_count, request.target, target_count, text);
  return {ids, ids_log_count, is_defined(request.target) ? target_log_count : Tensor(),
          /*distinct=*/false};
}

CandidateSet sample_outside(const SamplerView& complement, const DrawRequest& request,
                            const Tensor& candidates) {
  const std::vector<SamplerView> parts = complement.parts();
  if (parts.empty()) {
    return sample_outside(request, candidates, nullptr, complement.options());
  }
  const UnionPart part = part_of(parts[0]);
  return sample_outside(request, candidates, &part, complement.options());
}

Tensor outside_of_targets(const DrawRequest& request) {
  const OptionalTensor& target = request.target;
  if (!is_defined(target)) {
    return at::full({0}, -1, request.queries.options().dtype(at::kLong));
  }
  return target->dim() == 1 ? target->unsqueeze(1) : target->narrow(1, 0, 1);
}

namespace {

class ComplementKind : public SamplerKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == 0 && sampler.parts.size() <= 1;
  }
  bool shared(const SamplerView&) const override { return false; }
  bool distinct(const SamplerView&) const override { return false; }

  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    return {sample_outside(sampler, request, outside_of_targets(request))};
  }

  Tensor log_count(const SamplerView&, const Tensor&, const Tensor&) const override {
    TORCH_CHECK_VALUE(false, kComplementKind,
                      ": expected counts of a draw, got a call of log_count: they depend on the "
                      "target, so in a union it has to be the last private part");
  }
};

[[maybe_unused]] const bool complement_kind_registered =
    register_sampler_kind("complement", std::make_unique<ComplementKind>());

} // namespace
} // namespace xsoftmax
