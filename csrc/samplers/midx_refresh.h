#pragma once

#include "samplers/adaptive.h"
#include "samplers/midx_index.h"

namespace xsoftmax {

// Ops that bring an index (midx_index.h) up to date with the class table, in place; adaptive.h has what all families share. The classes in
// `order` are those that are drawn.
//
// midx_refresh_(weight, bias, step!, index!, options, generator) -> stats float64 [5]: new codebooks by K-means (kmeans.h) over train_points rows,
// drawn at random, from the present codewords on after the first time; then every row is coded. Learnable codewords: only the first time
// by K-means. stats: the mean squared distance of a row from its codewords, the mean squared length of a row, the inertia that K-means left
// for each codebook, and the number of cells in use.
//
// midx_update_(weight, bias, rows, step!, index!, options) -> (): codes the rows `rows` int64 [R] again, under the codewords that are there; all
// biases.
//
// midx_step_(weight, bias, step!, index!, options, generator) -> (): one training step. Refreshes where that is due; else, at multiples of
// update_every, updates the classes that are touched. The exact form takes in the table at every step.
//
// midx_note_(touched!, query_square!, step, queries, target, ids) -> (): what a training step tells the next refresh or update. In touched (of
// size 0: none) the classes drawn for queries that count and their targets are marked; query_square, where given, is the running mean of |z|^2
// over those queries, of the last 100 steps or so.
//
// On CUDA neither midx_update_ nor midx_note_ nor a step that refreshes nothing looks at a value: a row that is not finite keeps its code until a
// refresh, which refuses it.

/// The arguments of midx_update_ and midx_note_, checked.
MidxIndex checked_midx_update(const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& rows, const at::Tensor& step, at::TensorList others,
                              std::string_view options);
void check_midx_note(const at::Tensor& touched, const OptionalTensor& query_square, const at::Tensor& step, const at::Tensor& queries,
                     const OptionalTensor& target, const at::Tensor& ids);

/// log of each class's weight, from the largest of those that are drawn down to kMidxWeightRange below it; none where classes weigh the same.
/// `spread`: as it is about to be. Numbers that are not finite count as the least.
OptionalTensor midx_class_weights(const ClassTable& table, const MidxIndex& index, const OptionalTensor& spread);
/// Overwrites what follows from `cell` and `log_weight`, and log_weight itself; no class is recent then. Refuses cells
/// that are out of range, or not as many as are drawn, before it writes.
void midx_lay_out(const MidxIndex& index, const at::Tensor& cell, const OptionalTensor& log_weight);
/// The same by the index's cell and log_weight.
void midx_lay_out(const MidxIndex& index);
/// The exact form draws by the table of the day.
void midx_copy_table(const ClassTable& table, const MidxIndex& index);
/// The running mean after a step whose queries have a mean square `mean`; what it was where that is not finite.
at::Tensor midx_next_query_square(const at::Tensor& query_square, const at::Tensor& mean, const at::Tensor& step);

} // namespace xsoftmax
