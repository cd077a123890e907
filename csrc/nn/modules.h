#pragma once

#include <xsoftmax/samplers.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

// Helpers shared by the loss modules.

namespace xsoftmax::nn {

/// Returns input's shape with its last dimension replaced.
std::vector<int64_t> replace_last_dim(const at::Tensor& input, int64_t last);
/// Reshapes input [*, D] to [Q, D].
at::Tensor as_rows(const at::Tensor& input);
/// Returns the estimator's name for "mean_of_logs" or "log_of_mean".
std::string cane_estimator(const char* name, const std::string& noise_reduction);

/// Properties of a loss that make_noise_sampler checks a sampler against.
struct NoiseOptions {
  int64_t num_noises, num_classes;
  int64_t dim;                ///< of the queries
  bool bias;                  ///< whether the table has a bias
  at::Tensor candidates = {}; ///< if they are the same for all queries
  bool follows_table = true;  ///< false: no class table for a sampler to follow
};

/// Returns a sampler that draws from outside a set for each query. A sampler object must draw
/// private samples with replacement and reach every class outside the candidates. A sampler made
/// from a name makes four tries per noise sample. None and "uniform" draw uniformly.
samplers::ComplementSampler make_noise_sampler(const char* owner,
                                               const samplers::SamplerOrName& sampler,
                                               const NoiseOptions& request);

} // namespace xsoftmax::nn
