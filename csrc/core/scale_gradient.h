#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// gradient * factor in a backward function whose forward made `gradient` from `source`. Autograd does not know that it did: asked for
/// the second derivative, this raises, where a product would pass for independent of source.
at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& factor, const at::Tensor& source);

} // namespace xsoftmax
