#pragma once

#include "core/optional.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

namespace xsoftmax {

/// merge_log_counts(log_counts) -> float32, of the shape that they broadcast to: the log of the sum of expected counts, what all parts of a
/// union propose of a class together (the balance heuristic of multiple importance sampling; Veach and Guibas, 1995). The equivalent PyTorch
/// expression is torch.logsumexp(torch.stack(torch.broadcast_tensors(*log_counts)), 0), with +inf where one is +inf. At least one, floating.
at::Tensor merge_log_counts(at::TensorList log_counts);

// How a union draws. Its parts draw one after another, shared ones first. A private part is shown union_classes while it draws: the targets, and the
// ids of all sets before it; so its sets say the counts of those as target_log_count. What the sets cannot say by themselves, the union asks
// of parts by their log_count. union_merge puts it together: a set's counts, summed over all parts.

/// [Q, T + W]: T classes of each query, those of `target` [Q] or [Q, T], or one that stands for none, and the W ids of all `ids` ([M] or [Q, M]).
at::Tensor union_classes(const at::Tensor& queries, const OptionalTensor& target, at::TensorList ids);

/// The sets of a union in the order in which they were drawn, as a proposal has them, but each with what its part alone says of it. part: the number of the
/// part that drew each set, rising; sets of private parts, from the set `first_private` on, were drawn with union_classes. asked: log counts of the ids of set
/// of_set[i], as another part says. Returns log_count of all sets, summed; and target_log_count, of target's shape or as it was for shared sets, of size 0
/// where there is none.
std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> union_merge(at::TensorList ids, at::TensorList log_count,
                                                                         const c10::List<OptionalTensor>& target_log_count, at::IntArrayRef part,
                                                                         int64_t first_private, at::TensorList asked, at::IntArrayRef of_set,
                                                                         const OptionalTensor& target);

} // namespace xsoftmax
