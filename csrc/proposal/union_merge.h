#pragma once

#include "op/optional.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

namespace xsoftmax {

/// merge_log_counts(log_counts): returns the log of the summed expected counts, float32 in the
/// broadcast shape: how often all parts of a union propose a class together (the balance heuristic
/// of multiple importance sampling; Veach and Guibas, 1995). Equivalent to
/// torch.logsumexp(torch.stack(torch.broadcast_tensors(*log_counts)), 0), except that +inf in any
/// part gives +inf. Takes one or more floating-point tensors.
at::Tensor merge_log_counts(at::TensorList log_counts);

// How a union draws: its parts draw one after another, those with shared sets first. A private part
// gets union_classes as targets, that is, the targets and the ids of all earlier sets, so it
// returns the counts of these classes as target_log_count. All other counts are computed by the
// log_count of the parts. union_merge then sums the counts of each set over all parts.

/// Returns [Q, T + W]: per query the T classes of `target` [Q] or [Q, T] (without a target, one
/// column of 0), and the W ids of all `ids` ([M] or [Q, M]).
at::Tensor union_classes(const at::Tensor& queries, const OptionalTensor& target,
                         at::TensorList ids);

/// Merges the sets of a union. Returns log_count of all sets, summed over the parts, and their
/// target_log_count, in target's shape (unchanged for shared sets; size 0 if there is none). Sets
/// are in the order in which they were drawn, and their counts are those of their own part only.
/// part: the number of the part that drew each set, ascending. Sets from `first_private` on are
/// those of private parts, drawn with union_classes. queried_counts[i]: log counts of the ids of
/// set of_set[i] under another part.
std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> union_merge(
    at::TensorList ids, at::TensorList log_count, const c10::List<OptionalTensor>& target_log_count,
    at::IntArrayRef part, int64_t first_private, at::TensorList queried_counts,
    at::IntArrayRef of_set, const OptionalTensor& target);

} // namespace xsoftmax
