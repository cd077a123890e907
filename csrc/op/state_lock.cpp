#include "op/state_lock.h"

#include <array>
#include <cstdint>

namespace xsoftmax {

std::shared_mutex& state_lock(const at::Tensor& part) {
  static std::array<std::shared_mutex, 256> locks;
  const void* address = part.has_storage()
      ? static_cast<const void*>(part.storage().unsafeGetStorageImpl())
      : part.unsafeGetTensorImpl();
  return locks[uint64_t(reinterpret_cast<uintptr_t>(address)) * 0x9E3779B97F4A7C15u >> 56];
}

} // namespace xsoftmax
