#include "proposal/union_kind.h"

#include "cpu/memory.h"
#include "op/shape_checks.h"
#include "proposal/candidate_set.h"
#include "proposal/union_merge.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

// Kinds composed of other samplers:
//
//     union      parts may contain the same classes; their expected counts are added
//     disjoint   parts never contain the same classes; their sets are concatenated
//     head       always-scored classes. Tensors: int64 ids [H]. Used in "disjoint" with a sampler
//                that excludes them

namespace xsoftmax {

using at::Tensor;

namespace {

// Order of the parts: given classes, shared parts, private parts with replacement, private
// distinct.
int draw_order(const UnionPart& part) {
  return part.from_caller ? 0 : part.shared ? 1 : part.distinct ? 3 : 2;
}

// counts[:, first : first + width]
Tensor columns_of(const Tensor& counts, const c10::SymInt& first, const c10::SymInt& width) {
  return check::can_read(counts)
      ? strided_view(counts, {counts.size(0), width.expect_int()}, counts.strides(),
                     first.expect_int() * counts.stride(1))
      : counts.narrow_symint(1, first, width);
}

// Returns the columns of the targets, which come first, in the shape of `target`.
Tensor target_counts(const Tensor& counts, const c10::SymInt& targets, const Tensor& target) {
  return check::can_read(counts) && target.dim() == 1
      ? strided_view(counts, {counts.size(0)}, {counts.stride(0)})
      : counts.narrow_symint(1, 0, targets).reshape_symint(target.sym_sizes());
}

// The state of a set while the union draws.
struct DrawnSet {
  CandidateSet set;
  std::vector<Tensor> log_counts; // log counts of its ids under each part
  size_t part;
};

} // namespace

UnionPart part_of(const SamplerView& sampler) {
  return {sampler.shared(), sampler.distinct(),
          [sampler](const DrawRequest& request) { return sampler.sample(request); },
          [sampler](const Tensor& queries, const Tensor& ids) {
            return sampler.log_count(queries, ids);
          }};
}

namespace {

Tensor zero_counts(const Tensor& ids) {
  if (!check::can_read(ids)) {
    return at::zeros_symint(ids.sym_sizes(), ids.options().dtype(at::kFloat));
  }
  const Tensor counts = at::empty(ids.sizes(), ids.options().dtype(at::kFloat));
  std::fill_n(counts.mutable_data_ptr<float>(), counts.numel(), 0.0f);
  return counts;
}

} // namespace

CandidateSet head_set(const Tensor& ids) {
  return {ids, zero_counts(ids), Tensor(), /*distinct=*/true};
}

Proposal sample_union(const DrawRequest& request, std::vector<UnionPart> parts) {
  std::stable_sort(parts.begin(), parts.end(), [](const UnionPart& one, const UnionPart& other) {
    return draw_order(one) < draw_order(other);
  });
  const c10::SymInt targets = is_defined(request.target) && request.target->dim() == 2
      ? request.target->sym_size(1)
      : c10::SymInt(1);
  std::vector<DrawnSet> drawn;
  for (size_t number = 0; number < parts.size(); ++number) {
    const UnionPart& part = parts[number];
    // Such a part computes the counts of earlier ids by log_count; a private part gets them as
    // targets.
    const bool independent = part.from_caller || part.shared;
    const size_t before = drawn.size();
    std::vector<Tensor> ids;
    for (const DrawnSet& previous : drawn) {
      ids.push_back(previous.set.ids);
    }
    const Proposal sets = part.sample(
        independent ? request
                    : request.with_target(union_classes(request.queries, request.target, ids)));
    for (size_t k = 0; independent && k < before; ++k) {
      drawn[k].log_counts.push_back(part.log_count(request.queries, ids[k]));
    }
    for (const CandidateSet& set : sets) {
      DrawnSet drawn_part{set, {set.log_count}, number};
      for (size_t previous = 0; previous < number; ++previous) {
        drawn_part.log_counts.push_back(parts[previous].log_count(request.queries, set.ids));
      }
      // Columns: one per target, then one per id of the earlier sets.
      if (!independent && set.target_log_count.defined()) {
        c10::SymInt column = targets;
        for (size_t k = 0; k < before; ++k) {
          const c10::SymInt width = ids[k].sym_size(-1);
          drawn[k].log_counts.push_back(columns_of(set.target_log_count, column, width));
          column += width;
        }
        drawn_part.set.target_log_count = is_defined(request.target)
            ? target_counts(set.target_log_count, targets, *request.target)
            : Tensor();
      }
      drawn.push_back(std::move(drawn_part));
    }
  }
  Proposal sets;
  for (DrawnSet& one : drawn) {
    one.set.log_count = merge_log_counts(one.log_counts);
    sets.push_back(std::move(one.set));
  }
  return sets;
}

namespace {

template <typename Predicate>
bool all(const SamplerView& sampler, Predicate predicate) {
  const auto parts = sampler.parts();
  return std::all_of(parts.begin(), parts.end(), predicate);
}

class CompoundKind : public SamplerKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == 0 && !sampler.parts.empty();
  }
  bool shared(const SamplerView& sampler) const override {
    return all(sampler, [](const SamplerView& part) { return part.shared(); });
  }
  bool distinct(const SamplerView& sampler) const override {
    return all(sampler, [](const SamplerView& part) { return part.distinct(); });
  }
  Tensor log_count(const SamplerView& sampler, const Tensor& queries,
                   const Tensor& ids) const override {
    std::vector<Tensor> log_counts;
    for (const SamplerView& part : sampler.parts()) {
      log_counts.push_back(part.log_count(queries, ids));
    }
    return merge_log_counts(log_counts);
  }
};

class UnionKind : public CompoundKind {
 public:
  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    std::vector<UnionPart> parts;
    for (const SamplerView& part : sampler.parts()) {
      parts.push_back(part_of(part));
    }
    return sample_union(request, std::move(parts));
  }
};

class DisjointKind : public CompoundKind {
 public:
  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    Proposal sets;
    for (const SamplerView& part : sampler.parts()) {
      for (CandidateSet& set : part.sample(request)) {
        sets.push_back(std::move(set));
      }
    }
    return sets;
  }
};

class HeadKind : public SamplerKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == 1 && sampler.parts.empty();
  }
  bool shared(const SamplerView&) const override { return true; }
  bool distinct(const SamplerView&) const override { return true; }
  Proposal sample(const SamplerView& sampler, const DrawRequest&) const override {
    return {head_set(sampler.tensors()[0])};
  }
  Tensor log_count(const SamplerView& sampler, const Tensor&, const Tensor& ids) const override {
    const CandidateSet head = head_set(sampler.tensors()[0]);
    return always_scored_log_count(head.ids, head.log_count, ids);
  }
};

[[maybe_unused]] const bool union_kind_registered =
    register_sampler_kind("union", std::make_unique<UnionKind>()) &&
    register_sampler_kind("disjoint", std::make_unique<DisjointKind>()) &&
    register_sampler_kind("head", std::make_unique<HeadKind>());

} // namespace
} // namespace xsoftmax
