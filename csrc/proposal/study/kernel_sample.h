#pragma once

#include <xsoftmax/options.h>

#include "proposal/adaptive_family.h"

namespace xsoftmax {

// Samples in proportion to a kernel of query and class, by a binary tree whose nodes hold the sum
// of their classes' features (Blanc and Rendle, "Adaptive sampled softmax with kernel based
// sampling", ICML 2018): O(F log N) per draw with F features.
//
// Sphere (no `directions`): K(z, w) = scale (z.w)^2 + 1. The features are the products of pairs of
// elements, F = E (E + 1) / 2.
//
// Random Fourier features (`directions` [R, E]; Rawat et al., "Sampled softmax with random Fourier
// features", NeurIPS 2019): K(z, w) = max(phi(z).phi(w), scale), F = 2 R, with
// phi(x) = [cos Ux', sin Ux'] / sqrt(R), x' = x / |x|. The sum of a node cannot clamp the terms of
// its classes one by one, so the sum itself is clamped to at least scale times its number of
// classes.
//
// If the table has a bias, it is the last column of its rows, E = D + 1, and the last column of
// queries is 1.
//
// A draw descends from the root to a leaf, choosing a child in proportion to the (clamped) sums,
// then chooses a class of the leaf in proportion to K. q is exactly the product of these
// probabilities; for the sphere it is K(z, w_i) / sum_j K(z, w_j).
//
// The index over A classes:
//
//   directions  float32 [R, E]; absent for the sphere
//   rows        float32 [A, E or 2 R]: the vectors that a leaf compares with the query
//   sums        float32 [2 L, F]: a heap with the root at node 1 and the children of n at 2 n and
//               2 n + 1. L is a power of two. L + l is leaf l, which has the rows from
//               floor(l A / L) to floor((l + 1) A / L).
//   order       int64 [A]: the class of each row
//   place       int64 [N]: the row of each class; -1 if it is never drawn
//   recent, step
//
// kernel_index draws random directions from torch's default generator. kernel_sample draws private
// sets with replacement; query q reads Philox blocks (q, 0 ...). kernel_log_count takes O(F log N)
// per pair. kernel_refresh_ needs no seed and returns no statistics, float64 [0]. adaptive.h has
// the contract that all families share.

using samplers::KernelOptions;

struct KernelIndex : AdaptiveIndex {
  KernelIndex(const char* op, at::TensorList index, const KernelOptions& options);
  OptionalTensor directions;
  at::Tensor rows, sums, place;

  bool sphere() const { return !is_defined(directions); }
  int64_t classes() const { return rows.size(0); }
  int64_t leaves() const { return sums.size(0) / 2; }
  /// Returns the first row of a leaf; for leaf L, the number of rows.
  int64_t leaf_begin(int64_t leaf) const { return leaf * classes() / leaves(); }
};

struct KernelFamily {
  static constexpr const char* name = "kernel";
  static constexpr int64_t num_statistics = 0;
  using Options = KernelOptions;
  using Index = KernelIndex;
  static void check_options(const char* op, const KernelOptions& options);
  static int64_t min_dim(const KernelOptions&) { return 1; }
  static std::vector<at::Tensor> make(const at::Tensor& is_drawn, int64_t dim,
                                      const KernelOptions& options);
  static std::vector<at::Tensor> resized(const at::Tensor& is_drawn, const OptionalTensor& rows,
                                         const OptionalTensor& bias, const KernelIndex& index,
                                         const KernelOptions& options);
  static std::vector<at::Tensor> gained(const OptionalTensor& rows, const OptionalTensor& bias,
                                        int64_t added, const KernelIndex& index,
                                        const KernelOptions& options);
  static void exclude_last(KernelIndex& index, int64_t count);
  static at::Tensor refresh(const char* op, const ClassTable& table, const KernelIndex& index,
                            const KernelOptions& options,
                            const std::optional<at::Generator>& generator);
  static bool has_reference(const KernelOptions&) { return true; }
  static at::Tensor log_count_reference(const at::Tensor& queries, const at::Tensor& ids,
                                        const KernelIndex& index, const KernelOptions& options);
  static at::Tensor log_count_cpu(const at::Tensor& queries, const at::Tensor& ids,
                                  const KernelIndex& index, const KernelOptions& options);
  static PrivateDraws sample_cpu(const at::Tensor& seed, const at::Tensor& queries,
                                 const OptionalTensor& target, const Targets& targets,
                                 const KernelIndex& index, const KernelOptions& options);
  // kernel_sample_cuda.cu
  static at::Tensor log_count_cuda(const at::Tensor& queries, const at::Tensor& ids,
                                   const KernelIndex& index, const KernelOptions& options);
  static PrivateDraws sample_cuda(const at::Tensor& seed, const at::Tensor& queries,
                                  const OptionalTensor& target, const KernelIndex& index,
                                  const KernelOptions& options);
};

/// Returns the products of pairs of elements [n, E (E + 1) / 2], in the order of triu_indices.
at::Tensor kernel_pairs(const at::Tensor& rows);
/// Returns what leaves compare, in float32: the rows (with the bias), or their Fourier features.
at::Tensor kernel_rows(const at::Tensor& rows, const OptionalTensor& bias,
                       const KernelIndex& index);

} // namespace xsoftmax
