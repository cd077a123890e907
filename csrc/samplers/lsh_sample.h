#pragma once

#include "samplers/adaptive.h"

namespace xsoftmax {

// Locality-sensitive hashing: T tables, in each of which a class and a query have B sign bits (on which side of B random planes a vector
// lies: SimHash; Charikar, 2002). A draw picks a table in which the query's bucket is not empty, and a class of that bucket:
//
//     q(i | z) = u / A + (1 - u) / T' sum_t [h_t(i) = h_t(z)] / |bucket_t(z)|,   T' tables whose bucket is not empty (none: 1 / A)
//
// u > 0 keeps every one of the A classes within reach. This is the probability given the planes, not its mean over planes.
//
// The index: planes float32 [T B, E], E = D, or D + 1 where the table has a bias, which is then the last column of its rows, and 1 of the
// queries; code int32 [N, T], the bits of a class in each table, -1 in all for a class that is never drawn; order int64 [T, A], the classes
// by code; start int64 [T, 2^B + 1], where the classes of a code begin in it.
//
// lsh_sample(seed, input [Q, D], INDEX, uniform, num_samples, target int64 [Q]) -> (ids int64 [Q, M], log_count float32 [Q, M],
// target_log_count float32 [Q]): independent private draws, log_count = log(M q). Query q reads Philox blocks (q, 0 ..).
//
// lsh_log_prob(input, INDEX, uniform, ids [S] or [Q, P]) -> float32 [Q, S or P]: log q, -inf for a class never drawn; O(T) a pair.
//
// lsh_refresh_(weight, bias, planes, code!, order!, start!, step!, refresh_every) -> (): hashes all classes anew, where `step` (int64,
// 0-dim) is none or a refresh is due (refresh_is_due); then counts the step.

#define XS_LSH_INDEX_PARAMS const at::Tensor &planes, const at::Tensor &code, const at::Tensor &order, const at::Tensor &start
#define XS_LSH_INDEX_ARGS planes, code, order, start
#define XS_LSH_INDEX_SCHEMA "Tensor planes, Tensor code, Tensor order, Tensor start"

struct LshIndex {
  const at::Tensor& planes;
  const at::Tensor& code;
  const at::Tensor& order;
  const at::Tensor& start;
};

constexpr int64_t kLshMostBits = 20;

/// Bits of a table. Checks that the index and `input` fit together.
int64_t check_lsh(const char* op, const at::Tensor& input, const LshIndex& index, double uniform);

/// The code of each row in each table, int64 [n, T].
at::Tensor lsh_codes(const at::Tensor& rows, const OptionalTensor& bias, const at::Tensor& planes, int64_t tables);

at::Tensor lsh_log_prob_reference(const at::Tensor& input, XS_LSH_INDEX_PARAMS, double uniform, const at::Tensor& ids);

} // namespace xsoftmax
