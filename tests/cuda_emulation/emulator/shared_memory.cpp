#include "shared_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" {
// Defined if the process runs with AddressSanitizer, which then reports such accesses itself,
// including reads.
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* at, size_t size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* at, size_t size);
}

namespace emulator {
namespace {

constexpr unsigned char kGuard = 0x5C;
constexpr size_t kMargin = 128;

} // namespace

void SharedMemory::begin_block(size_t dynamic_bytes) {
  bytes_ = 0;
  ++blocks_;
  if (dynamic_bytes > 0) {
    variable(this, "the dynamic shared memory", dynamic_bytes, 128);
  }
}

void* SharedMemory::variable(const void* key, const char* names, size_t size, size_t alignment) {
  for (const Variable& known : variables_) {
    if (known.key == key) {
      return known.memory;
    }
  }
  const size_t margin = std::max(kMargin, alignment),
               total = (margin + size + margin + margin - 1) / margin * margin;
  auto* base = static_cast<unsigned char*>(std::aligned_alloc(margin, total));
  if (base == nullptr) {
    throw std::bad_alloc();
  }
  unsigned char* memory = base + margin;
  std::memset(base, kGuard, total);
  // Two kinds of garbage: NaN and -1, or huge numbers. A comparison with one kind may not notice
  // the other.
  std::memset(memory, blocks_ % 2 == 1 ? 0xFF : 0x7B, size);
  if (__asan_poison_memory_region) {
    __asan_poison_memory_region(base, margin);
    __asan_poison_memory_region(memory + size, margin);
  }
  variables_.push_back({key, names, size, margin, base, memory});
  bytes_ += size;
  return memory;
}

bool SharedMemory::holds(uintptr_t at) const {
  return std::any_of(variables_.begin(), variables_.end(), [at](const Variable& variable) {
    return at >= uintptr_t(variable.base) &&
        at < uintptr_t(variable.memory + variable.size + variable.margin);
  });
}

std::string SharedMemory::end_block() {
  std::string found;
  for (const Variable& variable : variables_) {
    const unsigned char *begin = variable.memory, *end = begin + variable.size;
    if (__asan_unpoison_memory_region) {
      __asan_unpoison_memory_region(variable.base, 2 * variable.margin + variable.size);
    }
    const auto written = [](unsigned char byte) { return byte != kGuard; };
    const auto* below = std::find_if(variable.base, variable.memory, written);
    const auto* above = std::find_if(end, end + variable.margin, written);
    if (below != begin || above != end + variable.margin) {
      const std::ptrdiff_t distance =
          above != end + variable.margin ? above - begin : below - begin;
      found = "byte " + std::to_string(distance) + " from the beginning of shared variable " +
          variable.names + " was written to, which has " + std::to_string(variable.size) + " bytes";
    }
    std::free(variable.base);
  }
  variables_.clear();
  return found;
}

} // namespace emulator
