#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// The state of xsoftmax.TwoTowerLoss (two_tower_loss.h): its memory of earlier items, and what
// creates, updates and resizes it.

namespace xsoftmax {

/// two_tower_state(owner, options, counted_ids) -> (temperature float64, vectors, ids and numbers
/// of the memory)
///
/// Checks all options and creates the state, for the constructor of the loss. counted_ids: the
/// number of ids that have counts; none if ids are open or not counted. Errors name owner:
/// ValueError.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> two_tower_state(
    std::string owner, std::string_view options, std::optional<int64_t> counted_ids);

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

} // namespace xsoftmax
