#pragma once

#include "proposal/adaptive_tensors.h"
#include "proposal/midx/midx_index.h"

namespace xsoftmax {

// Operators that update an index (midx_index.h) to the current class table, in place. adaptive.h
// has the contract that all families share. Classes can be drawn if they are in `order`.
//
// midx_refresh_(weight, bias, step!, index!, options, generator) -> stats float64 [5]
//   Trains new codebooks by K-means (kmeans.h) on train_points randomly chosen rows, starting from
//   the present codewords after the first time, then encodes every row. With learnable codewords,
//   K-means runs only the first time. stats: the mean squared distance of a row from its codewords,
//   the mean squared norm of a row, the final inertia of each codebook, and the number of non-empty
//   cells.
//
// midx_update_(weight, bias, rows, step!, index!, options) -> ()
//   Encodes the rows `rows` int64 [R] again with the present codewords, and reads the whole bias.
//
// midx_step_(weight, bias, step!, index!, options, generator) -> ()
//   Runs one training step: refreshes the index if that is due; otherwise updates the touched
//   classes at multiples of update_every. The exact form copies the table at every step.
//
// midx_note_(touched!, query_square!, step, queries, target, ids) -> ()
//   Records what a training step contributes to the next refresh or update. Sets touched (no-op if
//   its size is 0) for the targets and the draws of the queries that are not ignored. query_square,
//   if given, is updated as the running mean of |z|^2 over those queries, for the last 100 steps or
//   so.
//
// On CUDA, midx_update_, midx_note_ and a step without a refresh read no value back: a row that is
// not finite keeps its code until the next refresh, which raises.

/// Check the arguments of midx_update_ and midx_note_.
MidxIndex checked_midx_update(const at::Tensor& weight, const OptionalTensor& bias,
                              const at::Tensor& rows, const at::Tensor& step, at::TensorList others,
                              std::string_view options);
void check_midx_note(const at::Tensor& touched, const OptionalTensor& query_square,
                     const at::Tensor& step, const at::Tensor& queries,
                     const OptionalTensor& target, const at::Tensor& ids);

/// Returns the log weight of each class relative to the largest one that can be drawn, clamped to
/// [-kMidxWeightRange, 0]; nullopt if classes have equal weights. `spread`: the new values.
/// Non-finite numbers count as the smallest.
OptionalTensor midx_class_weights(const ClassTable& table, const MidxIndex& index,
                                  const OptionalTensor& spread);
/// Writes the tables that follow from `cell` and `log_weight`, and log_weight itself, and sets
/// recent to 0. Raises before it writes if a cell is out of range or their number is not that of
/// the classes that can be drawn.
void rebuild_midx_layout(const MidxIndex& index, const at::Tensor& cell,
                         const OptionalTensor& log_weight);
/// The same with the index's own cell and log_weight.
void rebuild_midx_layout(const MidxIndex& index);
/// Copies the current table into the index; only the exact form stores it.
void midx_copy_table(const ClassTable& table, const MidxIndex& index);
/// Returns the running mean after a step whose queries have the mean square `mean`; the old value
/// if the result is not finite.
at::Tensor midx_next_query_square(const at::Tensor& query_square, const at::Tensor& mean,
                                  const at::Tensor& step);

} // namespace xsoftmax
