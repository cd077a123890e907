#pragma once

#include "op/wanted_gradients.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <tuple>

// The gradients of (input [Q, D], weight [N, D], bias [N] or none) in the backward passes of
// operators whose first arguments these are.

namespace xsoftmax {

/// Returns the wanted gradients as the result of the backward pass of an operator with `arguments`
/// arguments.
inline torch::autograd::variable_list as_grads(
    const std::tuple<at::Tensor, at::Tensor, at::Tensor>& gradients, std::array<bool, 3> wanted,
    size_t arguments) {
  torch::autograd::variable_list result(arguments);
  result[0] = wanted[0] ? std::get<0>(gradients) : at::Tensor();
  result[1] = wanted[1] ? std::get<1>(gradients) : at::Tensor();
  result[2] = wanted[2] ? std::get<2>(gradients) : at::Tensor();
  return result;
}

/// Returns gradients as a Meta kernel does, with 0 rows where they are not wanted.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> gradients_meta(const at::Tensor& input,
                                                                     const at::Tensor& weight,
                                                                     at::ScalarType dtype,
                                                                     std::array<bool, 3> wanted) {
  const c10::SymInt none(0), classes = weight.sym_size(0), features = weight.sym_size(1);
  const auto options = input.options().dtype(dtype);
  return {at::empty_symint({wanted[0] ? input.sym_size(0) : none, features}, options),
          at::empty_symint({wanted[1] ? classes : none, features}, options),
          at::empty_symint({wanted[2] ? classes : none}, options)};
}

} // namespace xsoftmax
