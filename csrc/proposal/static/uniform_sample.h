#pragma once

#include "proposal/sampling.h"

namespace xsoftmax {

// uniform_sample(seed, low, high, num_queries, num_samples, distinct) -> ids: draws uniformly from
// the classes [low, high), n = high - low >= 1. Returns int64 [M] (num_queries none) or [Q, M].
//
// distinct = false: draws with replacement, exactly uniform. Draw j of query q uses Philox block
// (q, j).
//
// distinct = true: num_samples <= n draws without replacement, each class with inclusion
// probability exactly num_samples / n: the images of 0, 1, ... under RandomPermutation.
// O(num_samples), independent of n. Shared sets are in ascending order, private ones in random
// order.

void check_uniform_sample(const at::Tensor& seed, const c10::SymInt& low, const c10::SymInt& high,
                          const std::optional<c10::SymInt>& num_queries,
                          const c10::SymInt& num_samples, bool distinct);

} // namespace xsoftmax
