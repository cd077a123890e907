#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace xsoftmax {

/// Classes to score, and the expected count of each: how often the proposal that the set is part of would hold it on average. A candidate
/// weighs 1 / expected count.
struct CandidateSet {
  at::Tensor ids;              ///< int64 [M], shared by the batch, or [Q, M], private to each query
  at::Tensor log_count;        ///< floating, the shape of ids; [Q, M] also for shared ids whose counts depend on the query. +inf: takes no part
  at::Tensor target_log_count; ///< [Q] or [Q, T], log expected count of the targets in this set alone, -inf: it cannot contain them;
                               ///< undefined: not computed, for estimators that do not need it
  bool distinct = false;       ///< no class stands twice in a set
};

/// All that a step scores beside the targets. The counts of its sets are those of the whole: of a class that two sets may hold, the sum.
using Proposal = std::vector<CandidateSet>;

} // namespace xsoftmax
