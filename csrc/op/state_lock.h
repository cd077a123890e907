#pragma once

#include <ATen/core/Tensor.h>

#include <shared_mutex>

namespace xsoftmax {

/// Returns the lock of a state that consists of plain tensors. The lock is found by the storage of
/// one of them, so `part` and its views share a lock. Different states may also share a lock, so
/// hold only one at a time.
std::shared_mutex& state_lock(const at::Tensor& part);

} // namespace xsoftmax
