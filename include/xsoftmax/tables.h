#pragma once

// Class tables that lie in a file, for those that memory does not hold.

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace xsoftmax::tables {

/// Uniform in 1 / sqrt(D), as torch::nn::Linear begins; rows without a width as with one of 1.
void as_linear(torch::Tensor rows);

struct MappedOptions {
  torch::Dtype dtype = torch::kFloat32;
  /// Fills rows [B, D] in place, as functions of torch::nn::init do, called for a block of rows after the other, from the last to the first. Null: zeros,
  /// which cost no time.
  std::function<void(torch::Tensor)> init = as_linear;
  /// Called with (rows made, rows in all) between blocks; may throw to stop.
  std::function<void(int64_t, int64_t)> progress = nullptr;
};

/// A parameter [num_rows, width], or [num_rows] where there is no width, whose memory is the file `path`: made where there is none, opened where there is one,
/// which must be of this shape and dtype; made anew where a process was killed while it made it. See xsoftmax.tables in Python, whose files are the same.
///
///     const auto weight = xsoftmax::tables::mapped("classes.safetensors", 120'000'000, 64,
///         {.init = [](torch::Tensor rows) { torch::nn::init::normal_(rows, 0, .02); }});
///     xsoftmax::nn::SampledSoftmaxLoss loss(64, 120'000'000, sampler, {}, {.linear = xsoftmax::tables::linear(weight)});
torch::Tensor mapped(const std::string& path, int64_t num_rows, std::optional<int64_t> width = std::nullopt, const MappedOptions& options = {});

/// The parameter of a file that exists. writable: false maps a private copy, which many processes can do at a time. recover: also a file whose process died
/// while it was written to, which is whole again with the next flush.
torch::Tensor open(const std::string& path, bool writable = true, bool recover = false);

/// A Linear on the memory of a table [N, D], and of a bias [N] where there is one, for `linear` of a loss's options.
torch::nn::Linear linear(const torch::Tensor& weight, const torch::Tensor& bias = {});

/// Makes up what row optimizers owe the table, and waits until it and their state are on the disk. From then until the next step the files say that they are
/// whole.
void flush(const torch::Tensor& table);

/// Starts to read rows, and what row optimizers keep for them, without waiting: those of the next step while this one computes.
void prefetch(const torch::Tensor& table, const torch::Tensor& rows);

} // namespace xsoftmax::tables
