#pragma once

// Gradients of batches that do not fit into memory.

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace xsoftmax {

/// A network and the tensors that it takes, of one first dimension.
struct CachedTower {
  std::function<torch::Tensor(const std::vector<torch::Tensor>&)> tower; ///< gives a row for each row of its inputs
  std::vector<torch::Tensor> inputs;
};

/// The gradients of loss(vectors), the vectors [Q, D] of each tower, with the activations of one chunk of one tower in memory: xsoftmax.cached_step
/// (Gao et al., 2021). Each tower runs over its chunks without gradient, the loss of all vectors gives the gradient of each, then each chunk runs again.
///
///     const auto value = xsoftmax::cached_step([&](const auto& vectors) { return loss(vectors[0], vectors[1], item_id); },
///                                              {{[&](const auto& x) { return query_tower(x[0]); }, {queries}},
///                                               {[&](const auto& x) { return item_tower(x[0]); }, {items}}}, 256);
///
/// Dropout drops the same in both passes. loss: a scalar. chunk_size: rows of a chunk, above 0. backward: begins the backward pass of the loss; null:
/// value.backward(). Returns the loss, without gradient. Throws ValueError for a chunk_size below 1, inputs of several batch sizes, and a tower that gives no
/// row for each of its inputs.
torch::Tensor cached_step(const std::function<torch::Tensor(const std::vector<torch::Tensor>&)>& loss, const std::vector<CachedTower>& towers,
                          int64_t chunk_size, const std::function<void(const torch::Tensor&)>& backward = nullptr);

} // namespace xsoftmax
