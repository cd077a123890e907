#pragma once

#include "samplers/sampling.h"

namespace xsoftmax {

// log_uniform_sample(seed, low, high, num_queries, num_samples) -> ids: independent draws from [low, high), where
//
//     P(i) = (ln(i + 2) - ln(i + 1)) / (ln(high + 1) - ln(low + 1)),
//
// which suits classes sorted by falling frequency (Zipf). By inversion: floor(e^(ln(low + 1) + u (ln(high + 1) - ln(low + 1)))) - 1
// with 53 bits of u, draw j of query q from Philox block (q, j). Returns int64 [M] (num_queries none) or [Q, M].

// log_uniform_log_count(ids, low, high, log_scale) -> float32 of the shape of ids: the logarithms of expected counts of M draws,
//
//     ln(ln(1 + 1 / (i + 1))) + log_scale,     log_scale = ln M - ln(ln(high + 1) - ln(low + 1)),
//
// -inf for ids outside of [low, high).

void check_log_uniform_log_count(const at::Tensor& ids, int64_t low, int64_t high);
at::Tensor log_uniform_log_count(const at::Tensor& ids, int64_t low, int64_t high, double log_scale);
/// In ATen calls: any device, and the oracle of the tests.
at::Tensor log_uniform_log_count_reference(const at::Tensor& ids, int64_t low, int64_t high, double log_scale);

void check_log_uniform_sample(const at::Tensor& seed, const c10::SymInt& low, const c10::SymInt& high, const std::optional<c10::SymInt>& num_queries,
                              const c10::SymInt& num_samples);

} // namespace xsoftmax
