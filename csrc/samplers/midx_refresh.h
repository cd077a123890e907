#pragma once

#include "samplers/midx_index.h"

namespace xsoftmax {

// Ops that bring an index (midx_index.h) up to date with the class table, in place. The classes in `order` are those that are drawn; all
// other buffers are overwritten. weight [N, D], bias [N]: floating; bias goes with an index that has weights.
//
// spread float32 [N] and query_square float64 (0-dim), both or none, weigh each class by e^{|r|^2 query_square / 2 D} as well, r being what
// the codewords leave of its row: the mean of e^{z.r} over directions of r for Gaussian rests, where query_square = |z|^2. The ops write
// |r|^2 to `spread`. Such an index has weights, with or without a bias.
//
// midx_refresh_(seed, weight, bias, spread!, query_square, INDEX!, residual, iterations, points, warm) -> stats float64 [5]: new codebooks
// by K-means (kmeans.h) over `points` rows, drawn at random, from the present codewords on if `warm`; then every row is coded. stats: the
// mean squared distance of a row from its codewords, the mean squared length of a row, the inertia that K-means left for each codebook, and
// the number of cells in use.
//
// midx_update_(weight, bias, spread!, query_square, INDEX!, rows) -> (): codes the rows `rows` int64 [R] again, under the codewords that
// are there; all biases.
//
// midx_step_(seed, weight, bias, spread!, query_square, step!, touched!, INDEX!, residual, iterations, warm_iterations, points,
// refresh_every, update_every) -> (): one training step.
// Refreshes at step 0 (with `iterations` of K-means), then (with `warm_iterations`, from the present codewords) when `step` (int64, 0-dim)
// is a multiple of refresh_every, and before that at refresh_every / 32, / 16, ... / 2; else, at multiples of update_every, codes the rows
// r with touched[r] (bool [N], or none) again; then counts the step. 0: never.

#define XS_MIDX_INDEX_MUTABLE_SCHEMA                                                                                               \
  "Tensor(a!) codewords1, Tensor(b!) codewords2, Tensor(c!) cell, Tensor(d!) order, Tensor(e!) start, Tensor(f!) mass, "           \
  "Tensor(g!)? log_weight, Tensor(h!)? prefix, Tensor(i!)? heaviest"

/// Statistics of a refresh by the names that modules give them; the order of `stats`.
constexpr const char* kMidxStatNames[] = {"distortion", "mean_square", "inertia1", "inertia2", "cells"};

} // namespace xsoftmax
