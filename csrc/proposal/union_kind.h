#pragma once

#include "proposal/sampler_kind.h"

#include <functional>
#include <vector>

namespace xsoftmax {

/// A part of a union.
struct UnionPart {
  bool shared, distinct;
  std::function<Proposal(const DrawRequest& request)> sample;
  std::function<at::Tensor(const at::Tensor& queries, const at::Tensor& ids)> log_count;
  bool from_caller = false; ///< whether its classes are independent of the other parts' draws, so
                            ///< that it draws first
};

/// Returns a described sampler as a part.
UnionPart part_of(const SamplerView& sampler);
/// Returns the always-scored classes int64 [H] as a set.
CandidateSet head_set(const at::Tensor& ids);

/// Draws from all parts. The expected count of a class is summed over the parts (balance
/// heuristic).
Proposal sample_union(const DrawRequest& request, std::vector<UnionPart> parts);

/// Draws from `part` (uniformly if nullptr) outside int64 `candidates` [C] or [Q, C]. options:
/// ComplementOptions.
CandidateSet sample_outside(const DrawRequest& request, const at::Tensor& candidates,
                            const UnionPart* part, std::string_view options);
/// Returns the first target of each query as a set [Q, 1]; an empty set without targets.
at::Tensor outside_of_targets(const DrawRequest& request);

} // namespace xsoftmax
