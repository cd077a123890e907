#pragma once

#include <xsoftmax/options.h>

#include "op/optional.h"
#include "proposal/adaptive_family.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

// MIDX (Lian et al., "Inverted multi-index sampled softmax") assigns the classes to K x K cells and
// samples a class from the scores of its cell's two codewords. The index stores what the sampler
// knows about the class table, as plain tensors in this order:
//
//   codewords1  float32 [K, D1], codewords2 float32 [K, D2]
//               Product: D1 + D2 = D, a row w ~ [c1; c2], a query z = [z1; z2].
//               Residual: D1 = D2 = D, w ~ c1 + c2, z1 = z2 = z.
//   cell        int32 [N]: k1 K + k2; -1 if the class is never drawn
//   order       int64 [A]: the A classes that can be drawn, sorted by cell, then by id
//   start       int64 [K^2 + 1]: the offset of each cell in `order`
//   mass        float64 [K, K]: the sum of the weights in each cell (without weights, the number
//               of classes)
//   log_weight  float32 [N], prefix float64 [A], heaviest float64 [K^2]
//               Only if classes have different weights (a bias, the spread form): the log weight
//               of each class, the running sum of weights within each cell for every slot of
//               `order`, and the largest weight in each cell.
//   touched     bool [N]: the classes scored since they were last encoded; only if update_every > 0
//   Two more tables for some forms:
//               spread: spread float32 [N], query_square float64 []
//               exact: table float32 [N, D], table_bias float32 [N]
//   recent, step  int64 []
//
// A table that is not needed has size 0. With w_i the weight of a class, e^{b_i} for a bias b,
//
//     q(i | z) = w_i e^{z1.c1[k1] + z2.c2[k2]} / Z                                    (Theorem 2)
//     Z = sum_{k1, k2} mass[k1, k2] e^{z1.c1[k1] + z2.c2[k2]}
//
// A codeword's score is clamped to at least the best score of its codebook minus kMidxRange, so no
// class has probability 0. q is the exact distribution of the draws, even if the class table has
// changed since the last refresh.
//
// The spread form also multiplies each class's weight by e^{|r|^2 query_square / 2 D}, where r is
// the residual of its row (row minus codewords) and query_square a running mean of |z|^2. This is
// the mean of e^{z.r} if r is Gaussian. spread holds |r|^2.
//
// With the option `slots` = A, classes are numbered by their slots 0 ... A - 1 and all have the
// same weight. cell and order have size 0, and `start` alone describes the layout. A table that is
// split over processes is sampled this way from tables of size K^2 (xsoftmax.distributed).
//
// midx_index(owner, num_classes, dim, exclude, options) -> index
//   Returns an index with all classes in one cell.
//
// midx_codebooks(seed, rows float32 [P, D], codewords1, codewords2, iterations, warm)
//     -> (codewords1, codewords2, inertia1, inertia2)
//   Runs K-means on training rows, starting from the given codewords if `warm`. inertia float64 []
//   is the final inertia.
//
// midx_training_slots(seed, drawn, points) -> int64 [min(drawn, points)]
//   Returns the slots of `order` on which a refresh with that seed trains.

namespace xsoftmax {

using samplers::MidxOptions;

struct MidxIndex : AdaptiveIndex {
  MidxIndex(const char* op, at::TensorList index, const MidxOptions& options);

  at::Tensor codewords1, codewords2, cell, start, mass;
  OptionalTensor log_weight, prefix, heaviest, touched, spread, query_square, table, table_bias;
  bool residual;
};

struct MidxFamily {
  static constexpr const char* name = "midx";
  static constexpr int64_t num_statistics = 5;
  using Options = MidxOptions;
  using Index = MidxIndex;
  // midx_index.cpp
  static void check_options(const char* op, const MidxOptions& options);
  static int64_t min_dim(const MidxOptions& options) { return options.kind == "pq" ? 2 : 1; }
  static std::vector<at::Tensor> make(const at::Tensor& is_drawn, int64_t dim,
                                      const MidxOptions& options);
  // midx_refresh.cpp
  static std::vector<at::Tensor> resized(const at::Tensor& is_drawn, const OptionalTensor& rows,
                                         const OptionalTensor& bias, const MidxIndex& index,
                                         const MidxOptions& options);
  static std::vector<at::Tensor> gained(const OptionalTensor& rows, const OptionalTensor& bias,
                                        int64_t added, const MidxIndex& index,
                                        const MidxOptions& options);
  static void exclude_last(MidxIndex& index, int64_t count);
  static at::Tensor refresh(const char* op, const ClassTable& table, const MidxIndex& index,
                            const MidxOptions& options,
                            const std::optional<at::Generator>& generator);
  static void update_between_refreshes(const char* op, const at::Tensor& weight,
                                       const OptionalTensor& bias, const MidxIndex& index,
                                       const MidxOptions& options);
  // midx_index_cuda.cu
  static void update_between_refreshes_cuda(const char* op, const at::Tensor& weight,
                                            const OptionalTensor& bias, const MidxIndex& index,
                                            const MidxOptions& options);
  // midx_sample.cpp
  /// The reference covers draws with replacement.
  static bool has_reference(const MidxOptions& options) {
    return !options.is_distinct() && options.form != "exact";
  }
  static at::Tensor log_count_reference(const at::Tensor& queries, const at::Tensor& ids,
                                        const MidxIndex& index, const MidxOptions& options);
  // midx_sample_cpu.cpp
  static at::Tensor log_count_cpu(const at::Tensor& queries, const at::Tensor& ids,
                                  const MidxIndex& index, const MidxOptions& options);
  static PrivateDraws sample_cpu(const at::Tensor& seed, const at::Tensor& queries,
                                 const OptionalTensor& target, const Targets& targets,
                                 const MidxIndex& index, const MidxOptions& options);
  // midx_sample_cuda.cu
  static at::Tensor log_count_cuda(const at::Tensor& queries, const at::Tensor& ids,
                                   const MidxIndex& index, const MidxOptions& options);
  static PrivateDraws sample_cuda(const at::Tensor& seed, const at::Tensor& queries,
                                  const OptionalTensor& target, const MidxIndex& index,
                                  const MidxOptions& options);
};

/// The largest distance of a score below the best one of its codebook. The sum of two such scores,
/// doubled, still has an exponential above 0 in float64.
constexpr double kMidxRange = 170;
/// The largest distance of a log weight below the largest one. It limits the loss of precision of
/// small weights in the running sums of a cell.
constexpr double kMidxWeightRange = 20;
/// The maximum number of codewords per codebook, because cells are numbered in int32.
constexpr int64_t kMaxCodewords = 1024;

/// Checks that two codebooks have the same K and fit rows of width `features`. Returns true if
/// they are residual, false if they are product codebooks.
bool check_codebooks(const char* op, const at::Tensor& codewords1, const at::Tensor& codewords2,
                     const c10::SymInt& features);

// midx_encode(rows [n, D], codewords1, codewords2) -> (cell int32 [n], error float32 [n])
//   Assigns each row to the nearest codeword of the first codebook, then to the codeword of the
//   second codebook that is nearest to the remainder. error is the squared distance of the row from
//   the sum (residual) or the concatenation (product) of the two codewords.
using MidxCodes = std::tuple<at::Tensor, at::Tensor>;
MidxCodes midx_encode(const at::Tensor& rows, const at::Tensor& codewords1,
                      const at::Tensor& codewords2);

// midx_cells(cell, log_weight, codewords, num_drawn) -> (order, start, mass, prefix, heaviest)
//   Computes the tables that follow from cell and log_weight, as above. prefix and heaviest have
//   size 0 without weights. num_drawn: the number of entries of `cell` that are not -1.
using MidxCells = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
MidxCells midx_cells(const at::Tensor& cell, const OptionalTensor& log_weight, int64_t codewords,
                     c10::SymInt num_drawn);
// The composites in ATen calls: for any device, and the test oracle.
MidxCodes midx_encode_reference(const at::Tensor& rows, const at::Tensor& codewords1,
                                const at::Tensor& codewords2);
MidxCells midx_cells_reference(const at::Tensor& cell, const OptionalTensor& log_weight,
                               int64_t codewords, c10::SymInt num_drawn);

void check_midx_cells(const at::Tensor& cell, const OptionalTensor& log_weight, int64_t codewords,
                      const c10::SymInt& num_drawn);

} // namespace xsoftmax
