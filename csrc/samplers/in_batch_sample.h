#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

// The targets of a batch as candidates of its queries. counts int64 [N] and total int64, 0-dim: how often each class was a target so far;
// drawn int64, 0-dim: how many queries of the last batch count. p_i = counts_i / total; with n queries that count, a query meets class i
// (n - 1) p_i times on average among the targets of the others.

/// in_batch_sample(target, counts, total, drawn, update) -> (ids, log_count, target_log_count)
///
/// target int64 [Q] or [Q, T], whose first column says the query's target; -1: it does not count. First drawn is set, and, with `update`, the
/// targets are added to counts and total. ids int64 [Q]: the targets, 0 in the place of -1. log_count float32 [Q, Q]: log((n - 1) p);
/// +inf in the column of the query itself, in those of queries that do not count and in their rows. target_log_count float32, the shape
/// of target: -inf for -1. Errors, before anything changes: TypeError, ValueError, on the CPU IndexError.
std::tuple<at::Tensor, at::Tensor, at::Tensor> in_batch_sample(const at::Tensor& target, at::Tensor& counts, at::Tensor& total,
                                                               at::Tensor& drawn, bool update);

/// in_batch_log_count(ids, counts, total, drawn) -> float32 of ids' shape: log((n - 1) p), -inf for a class that never was a target and
/// for -1.
at::Tensor in_batch_log_count(const at::Tensor& ids, const at::Tensor& counts, const at::Tensor& total, const at::Tensor& drawn);

} // namespace xsoftmax
