#pragma once

#include "samplers/midx_index.h"
#include "samplers/sampling.h"

namespace xsoftmax {

// Draws and probabilities of MIDX; the index and q(i | z) as in midx_index.h. input [Q, D]: floating. Potentials, sums and draws are
// float64 (products of 16-bit and float32 queries in float32). target int64 [Q].
//
// midx_sample(seed, input, INDEX, num_samples, distinct, target) -> (ids int64 [Q, M], log_count float32 [Q, M], target_log_count float32
// [Q]): private draws, and the counts of target; or, of target [Q, T], of several classes for each query, [Q, T]. Independent: log_count =
// log(M q). Distinct: systematic, log pi_i = min(0, log c + log q(i | z)) with c such that the pi sum to M: exact inclusion probabilities.
// Query q reads Philox blocks (q, 0 ...).
//
// midx_sample_shared(seed, input, INDEX, num_samples, distinct, rms, target) -> (ids int64 [M], log_count [M], target_log_count [T]): one
// set for the batch and counts of any classes target [T], drawn from the mixture q(i) = mean_z q(i | z), or with `rms` from q(i) ~
// sqrt(mean_z q(i | z)^2), which minimises the variance of a shared set. Distinct ids rise. No queries: the cells by mass.
//
// midx_log_prob(input, INDEX, ids) -> float32: log q(id | z), for ids [S], the same for all queries, [Q, S]; for ids [Q, P], [Q, P]. -inf
// for a class that is never drawn. O(1) a pair once the query's 2 K products are there.
//
// midx_mixture_log_prob(input, INDEX, rms, ids) -> float32, of ids' shape: log q of the mixture.

using MidxDraws = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_midx_sample(const char* op, const at::Tensor& seed, const at::Tensor& input, const MidxIndex& index,
                       const c10::SymInt& num_samples, bool shared, bool distinct, const at::Tensor& target);

void check_midx_log_prob(const at::Tensor& input, const MidxIndex& index, const at::Tensor& ids);
/// The composite in ATen calls: any device, and the oracle of the tests.
at::Tensor midx_log_prob_reference(const at::Tensor& input, XS_MIDX_INDEX_PARAMS, const at::Tensor& ids);

/// The codewords as products take them, in one dtype.
struct MidxCodewords {
  MidxCodewords(const at::Tensor& input, const MidxIndex& index);

  at::ScalarType dtype;
  bool residual;
  at::Tensor both;          ///< [2 K, D], of a residual quantizer
  at::Tensor first, second; ///< [K, D1], [K, D2], of a product quantizer
};

/// What a block of queries knows of the codewords, contiguous, float64: scores of both codebooks (not lower than the best less kMidxRange)
/// and e^score over that of the best, both [Q, 2, K]; P1(k1) [Q, K]; z [Q], Z over e^score of the best of both, and log Z [Q].
struct MidxQueries {
  at::Tensor score, exp, first_probability, z, log_z;
};
/// Products of queries with all codewords: [Q, 2 K].
at::Tensor midx_products(const at::Tensor& input, const MidxCodewords& codewords);
MidxQueries midx_queries(const at::Tensor& input, const MidxCodewords& codewords, const at::Tensor& mass);

/// sum_z (q(cell | z) / mass(cell))^p [K, K], p = 2 with `rms`, else 1; without queries, 1.
at::Tensor midx_density_sums(const MidxQueries& queries, bool rms);
/// The share of each cell in the mixture [K, K], summing to 1, from the sums over all queries.
at::Tensor midx_mixture_shares(const at::Tensor& density_sums, const at::Tensor& mass, bool rms);

} // namespace xsoftmax
