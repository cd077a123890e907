#pragma once

#include "samplers/sampler_kind.h"

#include <functional>
#include <vector>

namespace xsoftmax {

/// One of the parts whose draws a union puts together.
struct UnionPart {
  bool shared, distinct;
  std::function<Proposal(const DrawRequest& request)> sample;
  std::function<at::Tensor(const at::Tensor& queries, const at::Tensor& ids)> log_count;
  bool is_given = false; ///< its classes do not depend on the draws of other parts: it comes first
};

UnionPart part_of(const SamplerView& sampler);
/// Classes int64 [H] that are always there.
CandidateSet head_set(const at::Tensor& ids);

/// The draws of all parts; the expected count of each class is the sum of what each part would draw of it (the balance heuristic).
Proposal sample_union(const DrawRequest& request, std::vector<UnionPart> parts);

/// The draws of `part`, or uniform ones where it is null, outside int64 `candidates` [C] or [Q, C]. options: ComplementOptions.
CandidateSet sample_outside(const DrawRequest& request, const at::Tensor& candidates, const UnionPart* part, std::string_view options);
/// The first target of each query as a set [Q, 1] for it; an empty one where there are no targets.
at::Tensor outside_of_targets(const DrawRequest& request);

} // namespace xsoftmax
