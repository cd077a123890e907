#pragma once

#include "samplers/union_kind.h"

#include <functional>

namespace xsoftmax {

using SampleOutside = std::function<CandidateSet(const DrawRequest& request, const at::Tensor& candidates)>;

/// The candidates of CaneLoss, as one distinct set, and the noise outside of them. Candidates are not shown the targets.
Proposal cane_sets(const DrawRequest& request, const UnionPart& candidates, const SampleOutside& noise, int64_t num_classes);

/// Candidates that a caller gives, int64 [C] or [Q, C], -1 for none.
UnionPart given_candidates(const at::Tensor& ids);

} // namespace xsoftmax
