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
/// Draws from outside a set for each query, by a sampler of private independent draws that draws every class outside `candidates` (which are
/// always the same; undefined: they are not), or uniform ones where it is null. dim: of queries.
samplers::ComplementSampler noise_outside(const char* name, const std::shared_ptr<samplers::SamplerImpl>& sampler, int64_t num_noises, int64_t num_classes,
                                          int64_t dim, const at::Tensor& candidates = {});

} // namespace xsoftmax::nn
