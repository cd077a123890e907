#pragma once

#include "proposal/midx/midx_index.h"

namespace xsoftmax {

// Sampling and expected counts for MIDX. midx_index.h defines the index and q(i | z), adaptive.h
// the contract that all families share. Potentials, sums and draws are float64 (products of 16-bit
// and float32 queries are float32).
//
// midx_sample draws private sets, or one set that the batch shares.
//   Private, with replacement: log_count = log(M q).
//   Private, without replacement: systematic sampling, log pi_i = min(0, log c + log q(i | z)) with
//     c such that the pi sum to M. The inclusion probabilities are exact.
//   Query q reads Philox blocks (q, 0 ...).
//   Shared: drawn from the mixture q(i) = mean_z q(i | z) over the queries that are not ignored, or
//     with mixture=rms from q(i) ~ sqrt(mean_z q(i | z)^2), which minimises the variance of a
//     shared set. Without queries, cells are drawn by mass. Without replacement, ids are sorted.
//   Exact form: private, with replacement, from the softmax itself.
//
// midx_log_count returns the same counts for any ids, in O(1) per pair after the 2 K products of
// each query. All-zero queries are ignored. Raises for private draws without replacement, because
// c is known only while drawing.

/// The exact form on CPU (midx_exact.cpp).
PrivateDraws midx_exact_sample(const at::Tensor& seed, const at::Tensor& queries,
                               const OptionalTensor& target, const Targets& targets,
                               const MidxIndex& index, int64_t num_samples);
at::Tensor midx_exact_log_count(const at::Tensor& queries, const at::Tensor& ids,
                                const MidxIndex& index, int64_t num_samples);

/// The codewords prepared for the products with queries, in one dtype.
struct MidxCodewords {
  MidxCodewords(const at::Tensor& input, const MidxIndex& index);

  at::ScalarType dtype;
  bool residual;
  at::Tensor first,
      second; ///< [K, D] each for a residual quantizer, [K, D1] and [K, D2] for a product quantizer
};

/// The softmax over the codewords for a block of queries: contiguous, float64.
///
/// score: scores of both codebooks [Q, 2, K], clamped to at least the best minus kMidxRange.
/// exp: e^(score - best score of the codebook) [Q, 2, K].
/// first_probability: P1(k1) [Q, K].
/// z: Z / e^(sum of the two best scores) [Q]; log_z: log Z [Q].
struct MidxQueries { at::Tensor score, exp, first_probability, z, log_z; };
/// Returns the products of queries with all codewords: [Q, 2 K], contiguous.
at::Tensor midx_products(const at::Tensor& input, const MidxCodewords& codewords);
MidxQueries midx_queries(const at::Tensor& input, const MidxCodewords& codewords,
                         const at::Tensor& mass);

/// Returns sum_z (q(cell | z) / mass(cell))^p [K, K] with p = 2 for `rms`, else 1. Without queries,
/// all ones.
at::Tensor midx_density_sums(const MidxQueries& queries, bool rms);
/// Returns the queries that contribute to a mixture: those that are not all zeros (samplers receive
/// ignored queries as zeros). The counts of a shared set can then be computed later, without the
/// targets, and agree with the draw. If all queries are zero, returns all of them.
at::Tensor nonzero_queries(const at::Tensor& queries);
/// Returns the probability of each cell in the mixture [K, K] (sum 1), from the sums over all
/// queries.
at::Tensor midx_mixture_shares(const at::Tensor& density_sums, const at::Tensor& mass, bool rms);

} // namespace xsoftmax
