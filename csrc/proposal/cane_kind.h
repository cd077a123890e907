#pragma once

#include "proposal/union_kind.h"

#include <functional>

namespace xsoftmax {

using SampleOutside =
    std::function<CandidateSet(const DrawRequest& request, const at::Tensor& candidates)>;

/// Draws for CaneLoss: the candidates, as one distinct set, and the noise outside of them.
/// Candidates are drawn without knowledge of the targets.
Proposal cane_sets(const DrawRequest& request, const UnionPart& candidates,
                   const SampleOutside& noise, int64_t num_classes);

/// Returns the caller's candidates, int64 [C] or [Q, C] (-1: no class), as a part.
UnionPart caller_candidates(const at::Tensor& ids);

} // namespace xsoftmax
