#pragma once

#include <ATen/core/Tensor.h>

#include <shared_mutex>

namespace xsoftmax {

/// Returns the lock of a state that is plain tensors, found by the memory of one of them: the same
/// for all calls with this tensor or a view of it. States may share a lock; they wait for each
/// other then, so hold one at a time.
std::shared_mutex& state_lock(const at::Tensor& part);

} // namespace xsoftmax
