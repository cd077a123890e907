#pragma once

#include <xsoftmax/options.h>

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <string_view>

// Static samplers (static_sample.h) whose distribution follows the frequencies of a stream.

namespace xsoftmax {

/// Parses and checks the options of static_follow_; errors name `owner`.
samplers::FollowOptions follow_options(const char* owner, std::string_view text);

/// static_follow_(target, counted, excluded, step!, count!, total!, last!, seen!, tables!,
/// counts_options, options) -> (): runs once per training step of a sampler whose distribution
/// follows counts of a stream (streaming_counts.h, of dense ids).
///
/// Counts `counted` first: int64 [C] or [C, T], counted by its first column; the targets, possibly
/// also those of other processes; none: nothing is counted. If refresh_is_due(step), then updates
/// the tables in place from the current counts: with (1 - u) counts^power / sum + u / n over the n
/// classes not in `excluded`, int64 [K]. Finally increments step, int64 on the CPU. `target`, int64
/// of any shape, will be passed to static_sample afterwards and is checked here. counts_options:
/// StreamingOptions; options: FollowOptions. Raises TypeError, ValueError or, on the CPU,
/// IndexError before anything changes.
void static_follow_(const at::Tensor& target, const OptionalTensor& counted,
                    const at::Tensor& excluded, at::Tensor& step, at::Tensor& count,
                    at::Tensor& total, at::Tensor& last, at::Tensor& seen, at::TensorList tables,
                    std::string_view counts_options, std::string_view options);

} // namespace xsoftmax
