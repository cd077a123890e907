#pragma once

#include "proposal/sampling.h"

#include <tuple>

namespace xsoftmax {

// Draws M distinct classes with inclusion probabilities exactly pi_i = min(1, c q_i), sum pi_i = M:
// systematic sampling proportional to size, in an order shuffled for every set, from tables that do
// not depend on M.
//
// systematic_table(weights) -> (order, cumulative): weights float64 [N], N >= 1, finite,
// non-negative, not all zero. The classes, sorted by descending weight (ties by id), are dealt out
// to B = systematic_buckets(N) buckets: sorted position p goes to bucket p mod B. order int64 [N]:
// the class in each slot, bucket after bucket, by descending weight in each. cumulative float64
// [N]: the weight of a slot plus all later ones in its bucket, summed from the lightest. Neither
// the weight of a tail nor a class's share of it is ever the difference of two large numbers. Built
// on the CPU in O(N log N).
//
// systematic_sample(seed, probability, order, cumulative, num_queries, num_samples, tail) -> (ids,
// log_scale): `probability` are the weights passed to systematic_table, at any scale. ids: int64
// [M] in ascending order (num_queries none) or [Q, M]. log_scale: float64, 0-dim, log c; it depends
// only on M, and log pi_i = min(0, log_scale + log probability[i]). It is -inf for M = 0. M is at
// most the number of classes with positive weight. O(B + M log N) per set. tail (static_tail.h):
// the tables are built for fewer classes; the later ones, none heavier than the lightest of these,
// form one more bucket, and M is at most the number of classes that the tables are built for.
//
// How a set is drawn: let t be the smallest number of certain classes such that (M - t) q_(t) <=
// the weight of the classes after them. The t heaviest classes are taken. The remaining classes are
// laid end to end as intervals of length c q_i, buckets in random order and each bucket rotated by
// a random number of classes (cut between classes, so that each remains one interval of length at
// most 1). The points u, u + 1, ... select M - t of them. Query q uses Philox blocks (q, 0 .. B),
// and with a tail also (q, B + 1).
constexpr int64_t kMaxSystematicBuckets = 64;
constexpr int64_t systematic_buckets(int64_t num_classes) {
  return num_classes < kMaxSystematicBuckets ? num_classes : kMaxSystematicBuckets;
}

void check_systematic_sample(const at::Tensor& seed, const at::Tensor& probability,
                             const at::Tensor& order, const at::Tensor& cumulative,
                             const std::optional<c10::SymInt>& num_queries,
                             const c10::SymInt& num_samples);

} // namespace xsoftmax
