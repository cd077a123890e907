#pragma once

#include "samplers/streaming_counts.h"

namespace xsoftmax {

// The targets of a batch as candidates of its queries. p: the probability of a class as a target, by the state of streaming_counts.h; drawn int64, 0-dim: how
// many queries of the last batch count. With n of them, a query meets class i (n - 1) p_i times on average among the targets of the others.

/// in_batch_sample(target, counted, count!, total!, last!, seen!, drawn!, options) -> (ids, log_count, target_log_count)
///
/// target int64 [Q] or [Q, T], whose first column says the query's target; -1: it does not count. First drawn is set, and `counted` is counted, int64 of one
/// or two dimensions, of which the first column counts: the targets, perhaps of other processes as well; none: nothing is. options: those of the counts. ids
/// int64 [Q]: the targets, 0 in the place of -1. log_count float32 [Q, Q]: log((n - 1) p); +inf in the column of the query itself, in those of queries that do
/// not count and in their rows. target_log_count float32, the shape of target: -inf for -1. Errors, before anything changes: TypeError, ValueError, on the
/// CPU IndexError.
std::tuple<at::Tensor, at::Tensor, at::Tensor> in_batch_sample(const at::Tensor& target, const OptionalTensor& counted, at::Tensor& count, at::Tensor& total,
                                                               at::Tensor& last, at::Tensor& seen, at::Tensor& drawn, std::string_view options);

/// in_batch_log_count(ids, count, total, last, seen, drawn, options) -> float32 of ids' shape: log((n - 1) p), -inf for a class that never was a target
/// and for -1.
at::Tensor in_batch_log_count(const at::Tensor& ids, const at::Tensor& count, const at::Tensor& total, const at::Tensor& last, const at::Tensor& seen,
                              const at::Tensor& drawn, std::string_view options);

} // namespace xsoftmax
