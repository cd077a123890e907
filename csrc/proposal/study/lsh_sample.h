#pragma once

#include <xsoftmax/options.h>

#include "proposal/adaptive_family.h"

namespace xsoftmax {

// Samples by locality-sensitive hashing (SimHash; Charikar, 2002). Each of T tables assigns B sign
// bits to a class and to a query: the sides of B random planes on which the vector lies. A draw
// picks a table in which the query's bucket is not empty, then a class of that bucket:
//
//     q(i | z) = u / A + (1 - u) / T' sum_t [h_t(i) = h_t(z)] / |bucket_t(z)|
//
// where T' is the number of tables with a non-empty bucket; if there are none, q = 1 / A. With
// u > 0, each of the A classes can be drawn. This is the probability given the planes, not its mean
// over planes.
//
// The index:
//
//   planes  float32 [T B, E]: E = D, or D + 1 with a bias. The bias is then the last column of the
//           rows, and the last column of queries is 1.
//   code    int32 [N, T]: the bits of a class in each table; all -1 if the class is never drawn
//   order   int64 [A, T]: column t contains the classes sorted by their code in table t
//   start   int64 [T, 2^B + 1]: the offset of each code in that column
//   recent, step
//
// lsh_index draws random planes from torch's default generator. lsh_sample draws private sets with
// replacement; query q reads Philox blocks (q, 0 ...). lsh_log_count takes O(T) per pair.
// lsh_refresh_ hashes all classes again and needs no seed; its statistics float64 [1] are the share
// of the classes in the fullest bucket. adaptive.h has the contract that all families share.

using samplers::LshOptions;

constexpr int64_t kMaxLshBits = 20;

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
  static int64_t min_dim(const LshOptions&) { return 1; }
  static std::vector<at::Tensor> make(const at::Tensor& is_drawn, int64_t dim,
                                      const LshOptions& options);
  static std::vector<at::Tensor> resized(const at::Tensor& is_drawn, const OptionalTensor& rows,
                                         const OptionalTensor& bias, const LshIndex& index,
                                         const LshOptions& options);
  static std::vector<at::Tensor> gained(const OptionalTensor& rows, const OptionalTensor& bias,
                                        int64_t added, const LshIndex& index,
                                        const LshOptions& options);
  static void exclude_last(LshIndex& index, int64_t count);
  static at::Tensor refresh(const char* op, const ClassTable& table, const LshIndex& index,
                            const LshOptions& options,
                            const std::optional<at::Generator>& generator);
  static bool has_reference(const LshOptions&) { return true; }
  static at::Tensor log_count_reference(const at::Tensor& queries, const at::Tensor& ids,
                                        const LshIndex& index, const LshOptions& options);
  static at::Tensor log_count_cpu(const at::Tensor& queries, const at::Tensor& ids,
                                  const LshIndex& index, const LshOptions& options);
  static PrivateDraws sample_cpu(const at::Tensor& seed, const at::Tensor& queries,
                                 const OptionalTensor& target, const Targets& targets,
                                 const LshIndex& index, const LshOptions& options);
  // lsh_sample_cuda.cu
  static at::Tensor log_count_cuda(const at::Tensor& queries, const at::Tensor& ids,
                                   const LshIndex& index, const LshOptions& options);
  static PrivateDraws sample_cuda(const at::Tensor& seed, const at::Tensor& queries,
                                  const OptionalTensor& target, const LshIndex& index,
                                  const LshOptions& options);
};

/// Returns the code of each row in each table, int64 [n, T].
at::Tensor lsh_codes(const at::Tensor& rows, const OptionalTensor& bias, const at::Tensor& planes,
                     int64_t tables);

} // namespace xsoftmax
