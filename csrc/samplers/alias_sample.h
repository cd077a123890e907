#pragma once

#include "samplers/sampling.h"

namespace xsoftmax {

// Independent draws in proportion to weights, O(1) a draw (Walker's alias method; tables by Vose, 1991).
//
// alias_table(weights) -> bins int64 [N, 2]: weights float64 [N], N >= 1, finite, not negative, not all zero, of any scale. Bin i holds class i
// below bins[i, 0] / 2^53 and class bins[i, 1] above: side by side, since a draw looks up one bin anywhere in memory. A class of zero weight
// is in no bin. Built on the CPU in O(N).
//
// alias_sample(seed, bins, num_queries, num_samples, tail) -> ids: int64 [M] (num_queries none) or [Q, M], in [0, N). Draw j of query q takes Philox
// block (q, j): 64 bits for the bin, 53 for the class. tail (static_tail.h): only the first bins are laid out, the classes behind them weigh as it says; block
// (q, 2^63 + j) says whether a draw is one of them.

void check_weights(const char* op, const at::Tensor& weights);
void check_alias_sample(const at::Tensor& seed, const at::Tensor& bins, const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples);

/// The values of CPU weights: finite, not negative, a sum above zero. Returns their maximum.
double check_weight_values(const char* op, const at::Tensor& weights);

} // namespace xsoftmax
