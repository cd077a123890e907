#pragma once

#include "op/optional.h"

#include <xsoftmax/options.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>

// The training step of xsoftmax.TwoTowerLoss: tower_loss with the items of the batch as candidates,
// corrected for how often each item is a candidate. `options` is TwoTowerOptions; `counts_options`
// is StreamingOptions (proposal/stream/streaming_counts.h). two_tower_memory.h creates and updates
// its state, two_tower_topk.h finds the best items.
//
// State:
//   temperature   0-dim, floating
//   counts        count, total, last and seen of the items; none without correction
//   memory        none, or vectors [M, D], ids int64 [M] and an int64 [2] with the number of items
//                 and of calls so far. The item number k is at index k % M.

namespace xsoftmax {

/// check_two_tower(query, item, item_id, negatives, weight, memory, counted, options) -> ()
///
/// Checks the arguments of a call, except for the values of ids. Ranks call it before they exchange
/// anything. counted: whether frequencies are corrected. Errors: TypeError, ValueError.
void check_two_tower(const at::Tensor& query, const at::Tensor& item, const at::Tensor& item_id,
                     at::TensorList negatives, const OptionalTensor& weight, at::TensorList memory,
                     bool counted, std::string_view options);

/// two_tower_loss_(query, item, item_id, negatives, everyone, weight, temperature, counts!,
/// memory!, updated, counts_options, options) -> loss
///
/// query and item [Q, D], item_id int64 [Q], weight [Q] or none. negatives: none, or a list of
/// vectors and ids: [S, D] and [S], sampled uniformly from all items; or [Q, P, D] and [Q, P],
/// private to each query. everyone: none, or the vectors and ids of the items of all processes,
/// which then are the candidates instead of item and item_id; negatives [S, D] are also those of
/// all processes. updated: whether to add the batch to counts and to memory.
///
///     # of equal ids only the first is a candidate; the memory is ordered from newest to oldest
///     ids = cat([item_id, ids of negatives, ids of memory])
///     # k: other items in the batch and in memory; S: uniform negatives
///     p = 1 - (1 - q)^k (1 - 1 / num_items)^S
///     loss = tower_loss(similar(query) / temperature, similar(item), item_id, vectors,
///                       [(ids, log p)], weight)
///
/// The expected count of an item is 1 higher for a query that has it as a private negative. Counts
/// are read after this batch was added, the memory before. Everything is checked before anything is
/// written. Errors: TypeError, ValueError, on the CPU IndexError.
at::Tensor two_tower_loss_(const at::Tensor& query, const at::Tensor& item,
                           const at::Tensor& item_id, at::TensorList negatives,
                           at::TensorList everyone, const OptionalTensor& weight,
                           const at::Tensor& temperature, at::TensorList counts,
                           at::TensorList memory, std::array<bool, 2> updated,
                           std::string_view counts_options, std::string_view options);

} // namespace xsoftmax
