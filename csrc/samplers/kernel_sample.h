#pragma once

#include <xsoftmax/adaptive_options.h>

#include "samplers/adaptive_family.h"

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
// The index over A classes: directions [R, E] (absent for the sphere); rows float32 [A, E or 2 R], what a leaf compares with the query; sums
// float32 [2 L, F], a heap: node 1 is the root, 2 n and 2 n + 1 the children of n, L + l is leaf l (L a power of two), which holds the rows
// from floor(l A / L) to floor((l + 1) A / L); order int64 [A], the class of each row; place int64 [N], the row of each class, -1 for one
// that is never drawn; recent; step.
//
// kernel_index: directions at random, by torch's default generator. kernel_sample: independent private draws; query q reads Philox blocks
// (q, 0 ..). kernel_log_count: O(F log N) a pair. kernel_refresh_: no statistics, float64 [0]. Seeds are not needed; adaptive.h has what all
// families share.

using samplers::KernelOptions;

struct KernelIndex : AdaptiveIndex {
  KernelIndex(const char* op, at::TensorList index, const KernelOptions& options);
  OptionalTensor directions;
  at::Tensor rows, sums, place;

  bool sphere() const { return !given(directions); }
  int64_t classes() const { return rows.size(0); }
  int64_t leaves() const { return sums.size(0) / 2; }
  /// The first row of a leaf; of leaf L: the number of rows.
  int64_t leaf_begin(int64_t leaf) const { return leaf * classes() / leaves(); }
};

struct KernelFamily {
  static constexpr const char* name = "kernel";
  static constexpr int64_t num_statistics = 0;
  using Options = KernelOptions;
  using Index = KernelIndex;
  static void check_options(const char* op, const KernelOptions& options);
  static int64_t least_dim(const KernelOptions&) { return 1; }
  static std::vector<at::Tensor> make(const at::Tensor& is_drawn, int64_t dim, const KernelOptions& options);
  static std::vector<at::Tensor> resized(const at::Tensor& is_drawn, const OptionalTensor& rows, const OptionalTensor& bias, const KernelIndex& index,
                                         const KernelOptions& options);
  static std::vector<at::Tensor> gained(const OptionalTensor& rows, const OptionalTensor& bias, int64_t added, const KernelIndex& index,
                                        const KernelOptions& options);
  static void leave_out(KernelIndex& index, int64_t count);
  static at::Tensor refresh(const char* op, const ClassTable& table, const KernelIndex& index, const KernelOptions& options,
                            const std::optional<at::Generator>& generator);
  static bool has_reference(const KernelOptions&) { return true; }
  static at::Tensor log_count_reference(const at::Tensor& queries, const at::Tensor& ids, const KernelIndex& index, const KernelOptions& options);
  static at::Tensor log_count_cpu(const at::Tensor& queries, const at::Tensor& ids, const KernelIndex& index, const KernelOptions& options);
  static PrivateDraws sample_cpu(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const Targets& targets,
                                 const KernelIndex& index, const KernelOptions& options);
  // kernel_sample_cuda.cu
  static at::Tensor log_count_cuda(const at::Tensor& queries, const at::Tensor& ids, const KernelIndex& index, const KernelOptions& options);
  static PrivateDraws sample_cuda(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const KernelIndex& index,
                                  const KernelOptions& options);
};

/// Products of two elements [n, E (E + 1) / 2] in the order of triu_indices.
at::Tensor kernel_pairs(const at::Tensor& rows);
/// What a leaf compares: rows (and bias) as they are, or their random Fourier features; float32.
at::Tensor kernel_rows(const at::Tensor& rows, const OptionalTensor& bias, const KernelIndex& index);

} // namespace xsoftmax
