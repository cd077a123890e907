#pragma once

#include "samplers/sampling.h"

namespace xsoftmax {

// log_uniform_sample(seed, low, high, num_queries, num_samples) -> ids: independent draws from [low, high), where
//
//     P(i) = (ln(i + 2) - ln(i + 1)) / (ln(high + 1) - ln(low + 1)),
//
// which suits classes sorted by falling frequency (Zipf). By inversion: floor(e^(ln(low + 1) + u (ln(high + 1) - ln(low + 1)))) - 1
// with 53 bits of u, draw j of query q from Philox block (q, j). Returns int64 [M] (num_queries none) or [Q, M].

void check_log_uniform_sample(const at::Tensor& seed, const c10::SymInt& low, const c10::SymInt& high, const std::optional<c10::SymInt>& num_queries,
                              const c10::SymInt& num_samples);

} // namespace xsoftmax
