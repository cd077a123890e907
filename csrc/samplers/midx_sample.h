#pragma once

#include "samplers/midx_index.h"

namespace xsoftmax {

// Draws and counts of MIDX; the index and q(i | z) as in midx_index.h, what all families share in adaptive.h. Potentials, sums and draws are
// float64 (products of 16-bit and float32 queries in float32).
//
// midx_sample: private sets, or one shared by the batch.
//   Private, independent: log_count = log(M q). Distinct: systematic, log pi_i = min(0, log c + log q(i | z)) with c such that the pi sum to M:
//   exact inclusion probabilities. Query q reads Philox blocks (q, 0 ...).
//   Shared: drawn from the mixture q(i) = mean_z q(i | z) over the queries that count, or with mixture=rms from q(i) ~ sqrt(mean_z q(i | z)^2),
//   which minimises the variance of a shared set. Distinct ids rise. No queries: the cells by mass.
//   The exact form: private, independent, from the softmax itself.
//
// midx_log_count: the same counts of any ids, O(1) a pair once a query's 2 K products are there. Queries of zeros do not count. Distinct private
// draws are an error: c is known by a draw alone.

/// The exact form on the CPU (midx_exact.cpp).
PrivateDraws midx_exact_sample(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const Targets& targets, const MidxIndex& index,
                               int64_t num_samples);
at::Tensor midx_exact_log_count(const at::Tensor& queries, const at::Tensor& ids, const MidxIndex& index, int64_t num_samples);

/// The codewords as products take them, in one dtype.
struct MidxCodewords {
  MidxCodewords(const at::Tensor& input, const MidxIndex& index);

  at::ScalarType dtype;
  bool residual;
  at::Tensor first, second; ///< [K, D] of a residual quantizer, [K, D1], [K, D2] of a product quantizer
};

/// What a block of queries knows of the codewords, contiguous, float64: scores of both codebooks (not lower than the best less kMidxRange)
/// and e^score over that of the best, both [Q, 2, K]; P1(k1) [Q, K]; z [Q], Z over e^score of the best of both, and log Z [Q].
struct MidxQueries { at::Tensor score, exp, first_probability, z, log_z; };
/// Products of queries with all codewords: [Q, 2 K]. Contiguous.
at::Tensor midx_products(const at::Tensor& input, const MidxCodewords& codewords);
MidxQueries midx_queries(const at::Tensor& input, const MidxCodewords& codewords, const at::Tensor& mass);

/// sum_z (q(cell | z) / mass(cell))^p [K, K], p = 2 with `rms`, else 1; without queries, 1.
at::Tensor midx_density_sums(const MidxQueries& queries, bool rms);
/// The queries that a mixture is of: those that are not all zeros, as queries that do not count are. So counts of a shared set that are asked
/// for later, without targets, are those of the draw. All of them where none is left.
at::Tensor midx_mixed_queries(const at::Tensor& queries);
/// The share of each cell in the mixture [K, K], summing to 1, from the sums over all queries.
at::Tensor midx_mixture_shares(const at::Tensor& density_sums, const at::Tensor& mass, bool rms);

} // namespace xsoftmax
