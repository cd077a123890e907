#pragma once

#include "core/optional.h"

#include <xsoftmax/loss_options.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// A step of two towers, xsoftmax.TwoTowerLoss: tower_loss whose candidates are the items of the batch, and how often each is among them. `options` is
// TwoTowerOptions, `counts_options` those of the counts of a stream (samplers/streaming_counts.h).
//
// State:
//   temperature   0-dim, floating
//   counts        none, where nothing is corrected, or count, total, last and seen of the items
//   memory        none, or vectors [M, D], ids int64 [M] and int64 [2]: how many items and calls there were so far. Item k stands at k % M.

namespace xsoftmax {

/// two_tower_state(owner, options, counted_ids) -> (temperature float64, vectors and ids of memory, their number): what a constructor does. All options are
/// checked; counted_ids: how many ids there are counts of, none where ids are open or not counted. Errors name owner: ValueError.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> two_tower_state(std::string owner, std::string_view options, std::optional<int64_t> counted_ids);

/// check_two_tower(query, item, item_id, negatives, weight, memory, counted, options) -> (): whatever can be wrong with a call but for the values of ids; what
/// ranks ask before they exchange anything. counted: whether frequencies are corrected. Errors: TypeError, ValueError.
void check_two_tower(const at::Tensor& query, const at::Tensor& item, const at::Tensor& item_id, at::TensorList negatives, const OptionalTensor& weight,
                     at::TensorList memory, bool counted, std::string_view options);

/// two_tower_loss_(query, item, item_id, negatives, everyone, weight, temperature, counts!, memory!, updated, counts_options, options) -> loss
///
/// query and item [Q, D], item_id int64 [Q], weight [Q] or none. negatives: none, or vectors and ids: [S, D] and [S], drawn uniformly from all items; or
/// [Q, P, D] and [Q, P] of each query. everyone: none, or the vectors and ids of the items of all processes, in whose place [Q, D] and [Q] then stand;
/// negatives [S, D] are those of all, too. updated: whether counts and memory take the batch in.
///
///     ids = cat([item_id, ids of negatives, ids of memory, the newest first])          # the first of equal ones is a candidate
///     p = 1 - (1 - q)^k (1 - 1 / num_items)^S                                          # k: others in the batch and in memory; S: uniform negatives
///     loss = tower_loss(similar(query) / temperature, similar(item), item_id, vectors, [(ids, log p)], weight)
///
/// with 1 added to the count of an item where it is a negative of a query. Counts are read with this batch in them, memory without it. Everything is
/// checked before anything is written. Errors: TypeError, ValueError, on the CPU IndexError.
at::Tensor two_tower_loss_(const at::Tensor& query, const at::Tensor& item, const at::Tensor& item_id, at::TensorList negatives, at::TensorList everyone,
                           const OptionalTensor& weight, const at::Tensor& temperature, at::TensorList counts, at::TensorList memory,
                           std::array<bool, 2> updated, std::string_view counts_options, std::string_view options);

/// two_tower_memory(memory, warmup) -> (vectors [M, D], ids [M], filled bool [M], number int64 []):
/// what is remembered, the newest first, so that of an item's vectors that one is a candidate. An
/// operator, since Inductor moves reads by ATen behind an operator that writes.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> two_tower_memory(at::TensorList memory, int64_t warmup);

/// two_tower_update_(ids, items, counts!, memory!, counts_options) -> (): what a step writes; counts and memory that are none stay.
void two_tower_update_(const at::Tensor& ids, const at::Tensor& items, at::TensorList counts, at::TensorList memory, std::string_view counts_options);

/// two_tower_resized(owner, memory, num_items, open, options) -> (memory, options)
///
/// Returns the state of a loss over `num_items` items, in new tensors: the options with that number where they have one,
/// and the memory without the items that are gone. A memory that loses none stays as it is; else its items move to the
/// front, oldest first. open: whether any int64 is an id, so that none goes. Counts follow by streaming_resize_.
/// Errors name owner: ValueError, TypeError.
std::tuple<std::vector<at::Tensor>, std::string> two_tower_resized(std::string owner, at::TensorList memory, int64_t num_items, bool open,
                                                                   std::string_view options);

/// two_tower_topk(query, item_vectors, temperature, k, exclude, options) -> (values [*, k], ids int64 [*, k])
///
///     scores = similar(query) @ similar(item_vectors).T / temperature
///     values, ids = log_softmax(scores, -1).topk(k)                # equal scores: the lower id first
///
/// query [*, D], item_vectors [N, D], floating; 0 <= k <= N; exclude int64 [*, E] or none, as exclude_topk takes it.
/// It is computed and returned in float32, or float64 where a tensor is float64, under autocast as well. [*, N] is not in
/// memory; a copy of item_vectors is, where they are normalised or of another dtype. Has no gradient.
/// Errors: TypeError, ValueError, on the CPU IndexError.
std::tuple<at::Tensor, at::Tensor> two_tower_topk(const at::Tensor& query, const at::Tensor& item_vectors, const at::Tensor& temperature, c10::SymInt k,
                                                  const OptionalTensor& exclude, std::string_view options);

} // namespace xsoftmax
