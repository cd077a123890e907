#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace xsoftmax {

/// int64 [count] on seed's device, whose value nobody waits for: uniform_below(seed, query, i, n), or of distinct ones
/// RandomPermutation(seed, query, n)(i).
inline at::Tensor uniform_draws(const at::Tensor& seed, int64_t query, int64_t n, int64_t count, bool distinct) {
  using Size = c10::SymInt;
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("xsoftmax::uniform_sample", "")
                             .typed<at::Tensor(const at::Tensor&, Size, Size, std::optional<Size>, Size, bool)>();
  return op.call(seed, 0, n, query + 1, count, distinct).select(0, query);
}

} // namespace xsoftmax
