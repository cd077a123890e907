#pragma once

#include <xsoftmax/samplers.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

// What the loss modules share.

namespace xsoftmax::nn {

/// Of at::Reduction; throws ValueError for another name.
int64_t reduction_code(const std::string& reduction);
/// 1-D ids in [0, num_classes), each once, sorted; checked.
at::Tensor different_ids(const char* name, const char* argument, const at::Tensor& ids, int64_t num_classes);
/// input's shape with another last dimension.
std::vector<int64_t> with_last(const at::Tensor& input, int64_t last);
/// A loss, a scalar or [*], whose gradient has that of the scalar `auxiliary` (undefined: none) beside it, once; its value is left as it is.
at::Tensor with_gradient_of(const at::Tensor& loss, const at::Tensor& auxiliary);
/// The estimator for "mean_of_logs" or "log_of_mean".
std::string cane_estimator(const char* name, const std::string& noise_reduction);
/// The given sampler, checked, or a uniform one.
std::shared_ptr<samplers::SamplerImpl> noise_or_uniform(const char* name, const std::shared_ptr<samplers::SamplerImpl>& sampler,
                                                        int64_t num_classes);
/// That the noise can be any class outside `candidates`, which are always the same, or none: one that is neither a candidate nor ever drawn
/// would learn nothing of how it compares with the others.
void check_draws_all(const char* name, samplers::SamplerImpl& sampler, const at::Tensor& candidates);

} // namespace xsoftmax::nn
