#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// Optional tensor arguments of ops. An undefined tensor counts as absent, because that is how
// autograd saves an absent tensor.

namespace xsoftmax {

using OptionalTensor = std::optional<at::Tensor>;

inline bool is_defined(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}
inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

} // namespace xsoftmax
