#pragma once

#include <xsoftmax/adaptive_options.h>

#include "core/optional.h"
#include "samplers/adaptive_family.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

// MIDX (Lian et al., "Inverted multi-index sampled softmax"): the classes stand in K x K cells, and a class is drawn by the scores
// of its cell's two codewords. The index is what the sampler knows of the class table, as plain tensors in this order:
//
//   codewords1 [K, D1], codewords2 [K, D2]  float32. Product: D1 + D2 = D, a row w ~ [c1; c2], a query z = [z1; z2]. Residual: D1 = D2 = D,
//                                           w ~ c1 + c2, z1 = z2 = z.
//   cell     int32 [N]     k1 K + k2; -1: never drawn
//   order    int64 [A]     the A classes that are drawn, cell after cell, by rising id
//   start    int64 [K^2+1] where the classes of each cell begin in `order`
//   mass     float64 [K, K] the weights in each cell, summed: how many classes, where none are given
//   log_weight float32 [N], prefix float64 [A], heaviest float64 [K^2]: only where classes weigh differently (a bias, the spread form): log of
//                          the weight of a class, the weights of a cell summed up to each slot of `order`, and the largest in each cell
//   touched  bool [N]      classes scored since they were coded; only where update_every > 0
//   two tables of the form: spread float32 [N] and query_square float64 [] (spread); table float32 [N, D] and table_bias float32 [N] (exact)
//   recent, step  int64 []
//
// With a class's weight w_i, so w_i = e^{b_i} for a bias b,
//
//     q(i | z) = w_i e^{z1.c1[k1] + z2.c2[k2]} / Z,    Z = sum_{k1, k2} mass[k1, k2] e^{z1.c1[k1] + z2.c2[k2]}           (Theorem 2)
//
// where a codeword's score counts as no less than the best one's of its codebook less kMidxRange: so no class has probability 0. This is exact
// for what is drawn whatever the class table has become since.
//
// The spread form weighs each class by e^{|r|^2 query_square / 2 D} as well, r being what the codewords leave of its row and query_square a
// running mean of |z|^2: the mean of e^{z.r} were r Gaussian. spread holds |r|^2.
//
// With the option `slots` = A classes are numbered by their slots, 0 ... A - 1, where all weigh alike: cell and order have size 0, and `start` says
// all there is. So a table that is split over processes is drawn from by tables of K^2 (xsoftmax.distributed).
//
// midx_index(owner, num_classes, dim, exclude, options) -> index: all classes in one cell.
//
// midx_codebooks(seed, rows float32 [P, D], codewords1, codewords2, iterations, warm) -> (codewords1, codewords2, inertia1, inertia2): K-means on
// training rows, from the present codewords on where `warm`; inertia float64 [], what is left in the end.
// midx_training_slots(seed, drawn, points) -> int64 [min(drawn, points)]: which slots of `order` a refresh by that seed trains on.

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
  static int64_t least_dim(const MidxOptions& options) { return options.kind == "pq" ? 2 : 1; }
  static std::vector<at::Tensor> make(const at::Tensor& is_drawn, int64_t dim, const MidxOptions& options);
  // midx_refresh.cpp
  static std::vector<at::Tensor> resized(const at::Tensor& is_drawn, const OptionalTensor& rows, const OptionalTensor& bias, const MidxIndex& index,
                                         const MidxOptions& options);
  static std::vector<at::Tensor> gained(const OptionalTensor& rows, const OptionalTensor& bias, int64_t added, const MidxIndex& index,
                                        const MidxOptions& options);
  static void leave_out(MidxIndex& index, int64_t count);
  static at::Tensor refresh(const char* op, const ClassTable& table, const MidxIndex& index, const MidxOptions& options,
                            const std::optional<at::Generator>& generator);
  static void between_refreshes(const char* op, const at::Tensor& weight, const OptionalTensor& bias, const MidxIndex& index, const MidxOptions& options);
  // midx_index_cuda.cu
  static void between_refreshes_cuda(const char* op, const at::Tensor& weight, const OptionalTensor& bias, const MidxIndex& index, const MidxOptions& options);
  // midx_sample.cpp
  /// Of independent draws.
  static bool has_reference(const MidxOptions& options) { return !options.is_distinct() && options.form != "exact"; }
  static at::Tensor log_count_reference(const at::Tensor& queries, const at::Tensor& ids, const MidxIndex& index, const MidxOptions& options);
  // midx_sample_cpu.cpp
  static at::Tensor log_count_cpu(const at::Tensor& queries, const at::Tensor& ids, const MidxIndex& index, const MidxOptions& options);
  static PrivateDraws sample_cpu(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const Targets& targets,
                                 const MidxIndex& index, const MidxOptions& options);
  // midx_sample_cuda.cu
  static at::Tensor log_count_cuda(const at::Tensor& queries, const at::Tensor& ids, const MidxIndex& index, const MidxOptions& options);
  static PrivateDraws sample_cuda(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, const MidxIndex& index,
                                  const MidxOptions& options);
};

/// How far below the best codeword of a codebook a score may be: of two of them, and squared, e^score is still a float64 above 0.
constexpr double kMidxRange = 170;
/// How far below the largest log weight another may be: a class keeps its digits beside it in the running sums of a cell.
constexpr double kMidxWeightRange = 20;
/// Codewords of a codebook: cells are numbered by int32.
constexpr int64_t kMidxMostCodewords = 1024;

/// Two codebooks of one shape that go with rows of width `features`; says which kind.
bool check_codebooks(const char* op, const at::Tensor& codewords1, const at::Tensor& codewords2, const c10::SymInt& features);

// midx_encode(rows [n, D], codewords1, codewords2) -> (cell int32 [n], error float32 [n]): the nearest codeword of the first codebook,
// then the one of the second that is nearest to the remainder; the squared distance of the row from their sum (residual) or from the two
// laid end to end (product).
using MidxCodes = std::tuple<at::Tensor, at::Tensor>;
MidxCodes midx_encode(const at::Tensor& rows, const at::Tensor& codewords1, const at::Tensor& codewords2);

// midx_cells(cell, log_weight, codewords, num_drawn) -> (order, start, mass, prefix, heaviest): the tables that follow from cell and
// log_weight, as above; the last two have size 0 without weights. num_drawn: how many entries of `cell` are not -1.
using MidxCells = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
MidxCells midx_cells(const at::Tensor& cell, const OptionalTensor& log_weight, int64_t codewords, c10::SymInt num_drawn);
// Their composites in ATen calls: any device, and the oracle of the tests.
MidxCodes midx_encode_reference(const at::Tensor& rows, const at::Tensor& codewords1, const at::Tensor& codewords2);
MidxCells midx_cells_reference(const at::Tensor& cell, const OptionalTensor& log_weight, int64_t codewords, c10::SymInt num_drawn);

void check_midx_cells(const at::Tensor& cell, const OptionalTensor& log_weight, int64_t codewords, const c10::SymInt& num_drawn);

} // namespace xsoftmax
