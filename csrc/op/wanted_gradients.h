#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <array>

namespace xsoftmax {

/// Returns which gradients of (input, weight, bias), the first arguments of an operator, a backward
/// pass needs. Autograd does not number a bias that is absent.
inline std::array<bool, 3> wanted_gradients(const torch::autograd::AutogradContext& ctx,
                                            bool has_bias) {
  return {ctx.needs_input_grad(0), ctx.needs_input_grad(1), has_bias && ctx.needs_input_grad(2)};
}

} // namespace xsoftmax
