#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace xsoftmax {

/// Maximum number of slices in for_slices.
constexpr int64_t kSlices = 16;
inline int64_t slice_width(int64_t size) {
  return std::max<int64_t>(1, (size + kSlices - 1) / kSlices);
}

/// Splits [0, size) into slices and calls task(begin, size) for each, below autograd. Slices run on
/// several threads if `on` is a CPU tensor; otherwise there is one slice. Each task's ATen calls
/// use one thread, and the slices do not depend on the number of threads, so the results do not
/// either.
template <typename Task>
void for_slices(const at::Tensor& on, int64_t size, const Task& task) {
  if (!on.is_cpu()) {
    return task(0, size);
  }
  const int64_t width = slice_width(size);
  at::parallel_for(0, kSlices, 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t i = first; i < last && i * width < size; ++i) {
      task(i * width, std::min(width, size - i * width));
    }
  });
}

} // namespace xsoftmax
