#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// Returns gradient * factor, for a backward function whose forward computed `gradient` from
/// `source`. Autograd does not know of that dependence: a second derivative raises here, where a
/// plain product would silently treat `gradient` as independent of `source`.
at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& factor,
                          const at::Tensor& source);

} // namespace xsoftmax
