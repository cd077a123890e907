#pragma once

#include <xsoftmax/adaptive_options.h>

#include "samplers/adaptive_family.h"

namespace xsoftmax {

// Locality-sensitive hashing: T tables, in each of which a class and a query have B sign bits (on which side of B random planes a vector
// lies: SimHash; Charikar, 2002). A draw picks a table in which the query's bucket is not empty, and a class of that bucket:
//
//     q(i | z) = u / A + (1 - u) / T' sum_t [h_t(i) = h_t(z)] / |bucket_t(z)|,   T' tables whose bucket is not empty (none: 1 / A)
//
// u > 0 keeps every one of the A classes within reach. This is the probability given the planes, not its mean over planes.
//
// The index: planes float32 [T B, E], E = D, or D + 1 where the table has a bias, which is then the last column of its rows, and 1 of the
// queries; code int32 [N, T], the bits of a class in each table, -1 in all for a class that is never drawn; order int64 [A, T], in
// column t the classes by their code in table t; start int64 [T, 2^B + 1], where the classes of a code begin in it; recent; step.
//
// lsh_index: planes at random, by torch's default generator. lsh_sample: independent private draws; query q reads Philox blocks (q, 0 ..).
// lsh_log_count: O(T) a pair. lsh_refresh_: hashes all classes anew; statistics float64 [1]: the share of the classes that the fullest bucket
// holds. Seeds are not needed; adaptive.h has what all families share.

using samplers::LshOptions;

constexpr int64_t kLshMostBits = 20;

struct LshIndex : AdaptiveIndex {
  LshIndex(const char* op, at::TensorList index, const LshOptions& options);
  at::Tensor planes, code, start;
};

struct LshFamily {
  static constexpr const char* name = "lsh";
  static constexpr int64_t num_statistics = 1;
  using Options = LshOptions;
  using Index = LshIndex;
  static void check_options(const char* op, const LshOptions& options);
  static int64_t least_dim(const LshOptions&) { return 1; }
  static std::vector<at::Tensor> make(const at::Tensor& is_drawn, int64_t dim, const LshOptions& options);
  static std::vector<at::Tensor> resized(const at::Tensor& is_drawn, const OptionalTensor& rows, const OptionalTensor& bias, const LshIndex& index,
                                         const LshOptions& options);
  static std::vector<at::Tensor> gained(const OptionalTensor& rows, const OptionalTensor& bias, int64_t added, const LshIndex& index,
                                        const LshOptions& options);
  static void leave_out(LshIndex& index, int64_t count);
  static at::Tensor refresh(const char* op, const ClassTable& table, const LshIndex& index, const LshOptions& options,
                            const std::optional<at::Generator>& generator);
  static bool has_reference(const LshOptions&) { return true; }
  static at::Tensor log_count_reference(const at::Tensor& queries, const at::Tensor& ids, const LshIndex& index, const LshOptions& options);
  static at::Tensor log_count_cpu(const at::Tensor& queries, const at::Tensor& ids, const LshIndex& index, const LshOptions& options);
  static PrivateDraws sample_cpu(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const Targets& targets, const LshIndex& index,
                                 const LshOptions& options);
  // lsh_sample_cuda.cu
  static at::Tensor log_count_cuda(const at::Tensor& queries, const at::Tensor& ids, const LshIndex& index, const LshOptions& options);
  static PrivateDraws sample_cuda(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const LshIndex& index,
                                  const LshOptions& options);
};

/// The code of each row in each table, int64 [n, T].
at::Tensor lsh_codes(const at::Tensor& rows, const OptionalTensor& bias, const at::Tensor& planes, int64_t tables);

} // namespace xsoftmax
