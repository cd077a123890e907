#pragma once

#include "proposal/sampling.h"

namespace xsoftmax {

// log_uniform_sample(seed, low, high, num_queries, num_samples) -> ids: draws with replacement from
// [low, high), with
//
//     P(i) = (ln(i + 2) - ln(i + 1)) / (ln(high + 1) - ln(low + 1)),
//
// which suits classes sorted by descending frequency (Zipf). By inversion: floor(e^(ln(low + 1) + u
// (ln(high + 1) - ln(low + 1)))) - 1 with a 53-bit u; draw j of query q uses Philox block (q, j).
// Returns int64 [M] (num_queries none) or [Q, M].

// log_uniform_log_count(ids, low, high, log_scale) -> float32 in the shape of ids: returns the log
// expected counts of M draws,
//
//     ln(ln(1 + 1 / (i + 1))) + log_scale,     log_scale = ln M - ln(ln(high + 1) - ln(low + 1)),
//
// and -inf for ids outside [low, high).

void check_log_uniform_log_count(const at::Tensor& ids, int64_t low, int64_t high);
at::Tensor log_uniform_log_count(const at::Tensor& ids, int64_t low, int64_t high,
                                 double log_scale);
/// The composite in ATen calls: for any device, and the tests' oracle.
at::Tensor log_uniform_log_count_reference(const at::Tensor& ids, int64_t low, int64_t high,
                                           double log_scale);

void check_log_uniform_sample(const at::Tensor& seed, const c10::SymInt& low,
                              const c10::SymInt& high,
                              const std::optional<c10::SymInt>& num_queries,
                              const c10::SymInt& num_samples);

} // namespace xsoftmax
