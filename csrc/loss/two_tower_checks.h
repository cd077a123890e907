#pragma once

#include "proposal/stream/streaming_counts.h"

#include <xsoftmax/options.h>

#include <ATen/core/Tensor.h>

#include <string_view>

// Options and checks that the operators of xsoftmax.TwoTowerLoss share. Errors name `op`.

namespace xsoftmax {

/// Parses the options and checks that they are consistent.
TwoTowerOptions two_tower_options(const char* op, std::string_view text);

/// Returns the vectors [*, D] whose dot products are the similarities.
at::Tensor normalize_vectors(const at::Tensor& vectors, const TwoTowerOptions& options);

/// Returns whether the list has `parts` tensors. Throws unless it has that many or none.
bool has_parts(const char* op, const char* name, at::TensorList tensors, size_t parts);

/// Returns the state of the counts, without copies. counts: its 4 tensors.
StreamingState state_of(at::TensorList counts);

/// Returns whether there is a memory. Checks that its tensors are consistent.
bool check_memory_tensors(const char* op, at::TensorList memory);

/// Returns whether the memory has places. Checks that its vectors have the width of `items`.
bool check_memory(const char* op, at::TensorList memory, const at::Tensor& items);

/// Checks the temperature, a floating scalar on the CPU or on the device of `query`.
void check_temperature(const char* op, const at::Tensor& temperature, const at::Tensor& query);

} // namespace xsoftmax
