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

} // namespace xsoftmax
