#pragma once

#include "op/find_op.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace xsoftmax {

/// Returns `count` uniform draws from [0, n), int64 [count] on the device of `seed`, without
/// synchronising with it. Draw i is uniform_below(seed, query, i, n) or, if `distinct` (without
/// replacement), RandomPermutation(seed, query, n)(i).
inline at::Tensor uniform_draws(const at::Tensor& seed, int64_t query, int64_t n, int64_t count,
                                bool distinct) {
  using Size = c10::SymInt;
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, Size, Size, std::optional<Size>, Size, bool)>(
          "xsoftmax::uniform_sample");
  return op.call(seed, 0, n, query + 1, count, distinct).select(0, query);
}

} // namespace xsoftmax
