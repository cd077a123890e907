#pragma once

#include <xsoftmax/samplers.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

// What the loss modules share.

namespace xsoftmax::nn {

/// input's shape with another last dimension.
std::vector<int64_t> with_last(const at::Tensor& input, int64_t last);
/// input [*, D] as [Q, D].
at::Tensor as_rows(const at::Tensor& input);
/// The estimator for "mean_of_logs" or "log_of_mean".
std::string cane_estimator(const char* name, const std::string& noise_reduction);

/// Properties of a loss that noise_outside checks a sampler against.
struct NoiseOptions {
  int64_t num_noises, num_classes;
  int64_t dim;                ///< of queries
  bool bias;                  ///< of the table
  at::Tensor candidates = {}; ///< where they are always the same
  bool follows_table = true;  ///< false: there is no class table that a sampler could follow
};

/// Returns draws from outside a set for each query: by a sampler of private independent draws that
/// draws every class outside the candidates, or by one that is made by name, with four tries for each
/// noise. None and "uniform": uniform draws.
samplers::ComplementSampler noise_outside(const char* owner, const samplers::SamplerOrName& sampler, const NoiseOptions& request);

} // namespace xsoftmax::nn
