#include "proposal/cane_kind.h"

#include "op/checks.h"
#include "op/options.h"
#include "proposal/candidate_set.h"
#include "proposal/complement_sample.h"
#include "proposal/sampler_kind.h"

#include <ATen/TensorOperators.h>

// Kinds used by CaneLoss:
//
//     cane       parts: a sampler of the candidates, and a "complement", whose draws outside of the
//                candidates are the noise
//     given      tensors: the caller's candidates, int64 ids [C], or [Q, C] for a batch of Q
//                queries, -1 for no class

namespace xsoftmax {

using at::Tensor;

Proposal cane_sets(const DrawRequest& request, const UnionPart& candidates,
                   const SampleOutside& noise, int64_t num_classes) {
  // Candidates must not depend on the targets, so the target only says which queries count.
  const OptionalTensor counts =
      is_defined(request.target) ? OptionalTensor(request.target->clamp_max(0)) : std::nullopt;
  std::vector<Tensor> ids;
  c10::List<bool> distinct;
  for (const CandidateSet& set :
       candidates.sample(request.with_target(counts, /*of_distinct=*/false))) {
    ids.push_back(set.ids);
    distinct.push_back(set.distinct);
  }
  const Tensor found = drawn_candidates(ids, distinct, request.queries.sym_size(0), num_classes);
  const auto [present, log_count] = always_scored_set(found);
  return {{present, log_count, Tensor(), /*distinct=*/true}, noise(request, found)};
}

UnionPart caller_candidates(const Tensor& ids) {
  const auto sample = [ids](const DrawRequest& request) -> Proposal {
    const c10::SymInt rows = request.queries.sym_size(0);
    TORCH_CHECK_VALUE(ids.dim() == 1 || (ids.dim() == 2 && ids.sym_size(0) == rows),
                      "CaneLoss: expected candidates of shape [C] or [", rows, ", C], got ",
                      ids.sym_sizes());
    return {{ids, std::get<1>(always_scored_set(ids)), Tensor(), /*distinct=*/false}};
  };
  const auto log_count = [ids](const Tensor&, const Tensor& query_ids) {
    const auto [classes, counts] = always_scored_set(ids);
    return always_scored_log_count(classes, counts, query_ids);
  };
  return {ids.dim() == 1, /*distinct=*/false, sample, log_count};
}

namespace {

class CaneKind : public SamplerKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == 0 && sampler.parts.size() == 2 && sampler.parts[1].name == "complement";
  }
  bool shared(const SamplerView&) const override { return false; }
  bool distinct(const SamplerView&) const override { return false; }

  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    const auto parts = sampler.parts();
    const auto noise = [&](const DrawRequest& request, const Tensor& candidates) {
      return sample_outside(parts[1], request, candidates);
    };
    return cane_sets(request, part_of(parts[0]), noise,
                     parse_options<ComplementOptions>("CaneLoss", parts[1].options()).num_classes);
  }

  Tensor log_count(const SamplerView&, const Tensor&, const Tensor&) const override {
    TORCH_CHECK_VALUE(false,
                      "CaneLoss: expected counts of a draw, got a call of log_count: those of the "
                      "noise depend on the candidates");
  }
};

class GivenKind : public SamplerKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == 1 && sampler.parts.empty();
  }
  bool shared(const SamplerView& sampler) const override { return part(sampler).shared; }
  bool distinct(const SamplerView& sampler) const override { return part(sampler).distinct; }
  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    return part(sampler).sample(request);
  }
  Tensor log_count(const SamplerView& sampler, const Tensor& queries,
                   const Tensor& ids) const override {
    return part(sampler).log_count(queries, ids);
  }

 private:
  static UnionPart part(const SamplerView& sampler) {
    return caller_candidates(sampler.tensors()[0]);
  }
};

[[maybe_unused]] const bool cane_kind_registered =
    register_sampler_kind("cane", std::make_unique<CaneKind>()) &&
    register_sampler_kind("given", std::make_unique<GivenKind>());

} // namespace
} // namespace xsoftmax
