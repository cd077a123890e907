#pragma once

#include "proposal/stream/streaming_counts.h"

namespace xsoftmax {

// The targets of a batch as candidates of its queries. p: the probability of a class as a target,
// from the state of streaming_counts.h. drawn: int64, 0-dim, the number n of queries in the last
// batch that count. A query meets class i on average (n - 1) p_i times among the other queries'
// targets.

/// in_batch_sample(target, counted, count!, total!, last!, seen!, drawn!, options) -> (ids,
/// log_count, target_log_count)
///
/// Stores n in `drawn`, counts `counted`, and then returns the targets as candidates.
///
/// target: int64 [Q] or [Q, T], the first column of which is the query's target; -1: the query does
/// not count. counted: int64, 1- or 2-dim, counted by its first column: the targets, possibly also
/// those of other processes; none: nothing is counted. options: those of the counts. ids: int64
/// [Q], the targets, with 0 instead of -1. log_count: float32 [Q, Q], log((n - 1) p); +inf in the
/// query's own column and in the rows and columns of queries that do not count. target_log_count:
/// float32 in the shape of target, -inf for -1. Raises TypeError, ValueError or, on the CPU,
/// IndexError before anything changes.
std::tuple<at::Tensor, at::Tensor, at::Tensor> in_batch_sample(
    const at::Tensor& target, const OptionalTensor& counted, at::Tensor& count, at::Tensor& total,
    at::Tensor& last, at::Tensor& seen, at::Tensor& drawn, std::string_view options);

/// in_batch_log_count(ids, count, total, last, seen, drawn, options): returns log((n - 1) p),
/// float32 in the shape of ids; -inf for -1 and for a class that was never a target.
at::Tensor in_batch_log_count(const at::Tensor& ids, const at::Tensor& count,
                              const at::Tensor& total, const at::Tensor& last,
                              const at::Tensor& seen, const at::Tensor& drawn,
                              std::string_view options);

} // namespace xsoftmax
