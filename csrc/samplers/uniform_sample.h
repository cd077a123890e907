#pragma once

#include "samplers/sampling.h"

namespace xsoftmax {

// uniform_sample(seed, low, high, num_queries, num_samples, distinct) -> ids: uniform classes of [low, high), n = high - low >= 1.
//
// distinct = false: independent draws, exactly uniform. Draw j of query q comes from Philox block (q, j).
// distinct = true: num_samples <= n different classes, every class with inclusion probability num_samples / n exactly: the images of
// 0, 1, ... under RandomPermutation. O(num_samples), whatever n is. A shared set stands in rising order, a private one in random order.
//
// Returns int64 [M] (num_queries none) or [Q, M].

void check_uniform_sample(const at::Tensor& seed, const c10::SymInt& low, const c10::SymInt& high, const std::optional<c10::SymInt>& num_queries,
                          const c10::SymInt& num_samples, bool distinct);

} // namespace xsoftmax
