#pragma once

#include "samplers/adaptive.h"

namespace xsoftmax {

// Draws in proportion to a kernel of query and class, by a binary tree whose nodes hold the sum of their classes' features (Blanc and
// Rendle, "Adaptive sampled softmax with kernel based sampling", ICML 2018): O(F log N) a draw, F features.
//
// Sphere (no `directions`):  K(z, w) = scale (z.w)^2 + 1; features: the products of two elements, F = E (E + 1) / 2.
// Random Fourier features (`directions` [R, E]):  K(z, w) = max(phi(z).phi(w), scale), phi(x) = [cos Ux', sin Ux'] / sqrt(R), x' = x / |x|
//     (Rawat et al., "Sampled softmax with random Fourier features", NeurIPS 2019), F = 2 R. A sum over a node's classes knows nothing of
//     negative terms among them: it is raised to scale times its number of classes where it is less.
// Where the table has a bias it is the last column of its rows, E = D + 1, and 1 of the queries.
//
// What is drawn: from the root, a child in proportion to the (raised) sums of the two; in a leaf, a class in proportion to K. q is the
// product of these shares, exactly: for the sphere K(z, w_i) / sum_j K(z, w_j).
//
// The index over A classes: rows float32 [A, E or 2 R], what a leaf compares with the query; sums float32 [2 L, F], a heap: node 1 is the
// root, 2 n and 2 n + 1 the children of n, L + l is leaf l (L a power of two), which holds the rows from floor(l A / L) to floor((l + 1)
// A / L); order int64 [A], the class of each row; place int64 [N], the row of each class, -1 for one that is never drawn.
//
// kernel_sample(seed, input [Q, D], INDEX, scale, num_samples, target int64 [Q]) -> (ids int64 [Q, M], log_count float32 [Q, M],
// target_log_count float32 [Q]): independent private draws, log_count = log(M q). Query q reads Philox blocks (q, 0 ..).
//
// kernel_log_prob(input, INDEX, scale, ids [S] or [Q, P]) -> float32 [Q, S or P]: log q, -inf for a class never drawn; O(F log N) a pair.
//
// kernel_refresh_(weight, bias, directions, rows!, sums!, order, place, step!, refresh_every) -> (): takes in the class table, where `step`
// (int64, 0-dim) is none or a refresh is due (refresh_is_due); then counts the step.

#define XS_KERNEL_INDEX_PARAMS \
  const OptionalTensor &directions, const at::Tensor &rows, const at::Tensor &sums, const at::Tensor &order, const at::Tensor &place
#define XS_KERNEL_INDEX_ARGS directions, rows, sums, order, place
#define XS_KERNEL_INDEX_SCHEMA "Tensor? directions, Tensor rows, Tensor sums, Tensor order, Tensor place"

struct KernelIndex {
  const OptionalTensor& directions;
  const at::Tensor& rows;
  const at::Tensor& sums;
  const at::Tensor& order;
  const at::Tensor& place;

  bool sphere() const { return !given(directions); }
  int64_t classes() const { return rows.size(0); }
  int64_t leaves() const { return sums.size(0) / 2; }
  /// The first row of a leaf; of leaf L: the number of rows.
  int64_t leaf_begin(int64_t leaf) const { return leaf * classes() / leaves(); }
};

/// Checks that the index and `input` fit together.
void check_kernel(const char* op, const at::Tensor& input, const KernelIndex& index, double scale);

/// What a leaf compares: rows (and bias) as they are, or their random Fourier features; float32.
at::Tensor kernel_rows(const at::Tensor& rows, const OptionalTensor& bias, const KernelIndex& index);

at::Tensor kernel_log_prob_reference(const at::Tensor& input, XS_KERNEL_INDEX_PARAMS, double scale, const at::Tensor& ids);

} // namespace xsoftmax
