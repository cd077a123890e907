#pragma once

#include "op/optional.h"

#include <xsoftmax/options.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// The training step of xsoftmax.TwoTowerLoss: tower_loss with the items of the batch as candidates,
// corrected for how often each item is a candidate. `options` is TwoTowerOptions; `counts_options`
// is StreamingOptions (proposal/stream/streaming_counts.h).
//
// State:
//   temperature   0-dim, floating
//   counts        count, total, last and seen of the items; none without correction
//   memory        none, or vectors [M, D], ids int64 [M] and an int64 [2] with the number of items
//                 and of calls so far. The item number k is at index k % M.

namespace xsoftmax {

/// two_tower_state(owner, options, counted_ids) -> (temperature float64, vectors, ids and numbers
/// of the memory)
///
/// Checks all options and creates the state, for the constructor of the loss. counted_ids: the
/// number of ids that have counts; none if ids are open or not counted. Errors name owner:
/// ValueError.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> two_tower_state(
    std::string owner, std::string_view options, std::optional<int64_t> counted_ids);

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

/// two_tower_memory(memory, warmup) -> (vectors [M, D], ids [M], filled bool [M], number int64 [])
///
/// Returns the items in memory, newest first, so that the newest vector of an item is the
/// candidate. It is an operator because Inductor may move reads by ATen calls after an operator
/// that writes.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> two_tower_memory(at::TensorList memory,
                                                                            int64_t warmup);

/// two_tower_update_(ids, items, counts!, memory!, counts_options) -> ()
///
/// Adds the items of a step to counts and memory; either may be none.
void two_tower_update_(const at::Tensor& ids, const at::Tensor& items, at::TensorList counts,
                       at::TensorList memory, std::string_view counts_options);

/// two_tower_resized(owner, memory, num_items, open, options) -> (memory, options)
///
/// Returns the state of a loss over `num_items` items, in new tensors: the options with the new
/// number, if they have num_items, and the memory without the removed items. If items are removed,
/// the others move to the front, oldest first. open: whether any int64 is a valid id, so that no
/// item is removed. Counts are resized by streaming_resize_. Errors name owner: ValueError,
/// TypeError.
std::tuple<std::vector<at::Tensor>, std::string> two_tower_resized(std::string owner,
                                                                   at::TensorList memory,
                                                                   int64_t num_items, bool open,
                                                                   std::string_view options);

/// two_tower_topk(query, item_vectors, temperature, k, exclude, options) -> (values [*, k], ids
/// int64 [*, k])
///
///     scores = similar(query) @ similar(item_vectors).T / temperature
///     values, ids = log_softmax(scores, -1).topk(k)    # equal scores: lower id first
///
/// query [*, D], item_vectors [N, D], floating; 0 <= k <= N; exclude int64 [*, E] or none, as in
/// exclude_topk. Computes and returns float32, or float64 if a tensor is float64, also under
/// autocast. [*, N] is never in memory; a copy of item_vectors is, if they are normalised or cast.
/// Has no gradient. Errors: TypeError, ValueError, on the CPU IndexError.
std::tuple<at::Tensor, at::Tensor> two_tower_topk(const at::Tensor& query,
                                                  const at::Tensor& item_vectors,
                                                  const at::Tensor& temperature, c10::SymInt k,
                                                  const OptionalTensor& exclude,
                                                  std::string_view options);

} // namespace xsoftmax
