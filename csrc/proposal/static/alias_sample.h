#pragma once

#include "proposal/sampling.h"

namespace xsoftmax {

// Draws with replacement, proportional to weights, in O(1) per draw (Walker's alias method; tables
// by Vose, 1991).
//
// alias_table(weights) -> bins int64 [N, 2]: weights float64 [N], N >= 1, finite, non-negative, not
// all zero, at any scale. Bin i holds class i below bins[i, 0] / 2^53 and class bins[i, 1] above;
// both are adjacent, because each draw reads one bin at a random address. A class of zero weight is
// in no bin. Built on the CPU in O(N).
//
// alias_sample(seed, bins, num_queries, num_samples, tail) -> ids: int64 [M] (num_queries none) or
// [Q, M], in [0, N). Draw j of query q uses Philox block (q, j): 64 bits for the bin, 53 for the
// class. tail (static_tail.h): only the first bins are built, and the tail gives the weights of the
// later classes; block (q, 2^63 + j) decides whether a draw is one of these.

void check_weights(const char* op, const at::Tensor& weights);
void check_alias_sample(const at::Tensor& seed, const at::Tensor& bins,
                        const std::optional<c10::SymInt>& num_queries,
                        const c10::SymInt& num_samples);

/// Checks values of CPU weights: finite, non-negative, with a positive sum. Returns their maximum.
double check_weight_values(const char* op, const at::Tensor& weights);

} // namespace xsoftmax
