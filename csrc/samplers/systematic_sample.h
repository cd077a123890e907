#pragma once

#include "samplers/sampling.h"

#include <tuple>

namespace xsoftmax {

// M different classes with inclusion probabilities exactly pi_i = min(1, c q_i), sum pi_i = M: systematic sampling proportional to
// size, in an order shuffled anew for every set, from tables that do not depend on M.
//
// systematic_table(weights) -> (order, cumulative): weights float64 [N], N >= 1, finite, not negative, not all zero. The classes sorted
// by falling weight (equal ones by id) are dealt out to B = systematic_buckets(N) buckets: sorted position p goes to bucket p mod B.
// order int64 [N]: the class in each slot, bucket after bucket, falling weight inside. cumulative float64 [N]: the weight of a slot and
// of all behind it in its bucket, summed from the lightest: so neither the weight of a tail nor a class's share of it ever comes
// from the difference of two large numbers. Built on the CPU in O(N log N).
//
// systematic_sample(seed, probability, order, cumulative, num_queries, num_samples, tail) -> (ids, log_scale): `probability` is what
// systematic_table was given, of any scale. ids: int64 [M] in rising order (num_queries none) or [Q, M]. log_scale: float64, 0-dim, log c:
// it depends on M only, and log pi_i = min(0, log_scale + log probability[i]); -inf for M = 0. M is at most the number of classes with a
// weight above zero. O(B + M log N) a set. tail (static_tail.h): only so many classes are laid out; those behind them, as heavy as the lightest of these or
// lighter, are a bucket more, and no set is larger than what is laid out.
//
// A set: with t the smallest number of certain classes such that (M - t) q_(t) <= the weight behind them, the t heaviest classes are
// taken. The buckets' other classes are laid end to end with length c q_i, the buckets in a random order and the classes of each rotated
// by a random number (the cut falls between classes, so that each stays one interval no longer than 1); the points u, u + 1, ... pick
// M - t of them. Query q reads Philox blocks (q, 0 .. B), and with a tail (q, B + 1).

/// How many buckets tables of `num_classes` have: a small set of classes is shuffled wholly.
constexpr int64_t kMaxSystematicBuckets = 64;
constexpr int64_t systematic_buckets(int64_t num_classes) { return num_classes < kMaxSystematicBuckets ? num_classes : kMaxSystematicBuckets; }

void check_systematic_sample(const at::Tensor& seed, const at::Tensor& probability, const at::Tensor& order, const at::Tensor& cumulative,
                             const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples);

} // namespace xsoftmax
