#include "traffic.h"

#include "machine.h"

#include <link.h>
#include <pthread.h>

#include <algorithm>

namespace emulator {

thread_local TrafficWatch traffic_watch;

namespace { constexpr uintptr_t kSector = 32; } // namespace

Traffic& Traffic::operator+=(const Traffic& other) {
  const std::pair<Bytes*, const Bytes*> parts[] = {{&requested, &other.requested},
                                                   {&per_block, &other.per_block},
                                                   {&per_launch, &other.per_launch}};
  for (const auto& [to, from] : parts) {
    to->read += from->read;
    to->written += from->written;
  }
  return *this;
}

TrafficCounter::Sectors::Slot& TrafficCounter::Sectors::slot(uintptr_t sector) {
  const size_t mask = slots_.size() - 1;
  size_t at = (sector * 0x9E3779B97F4A7C15u >> 20) & mask;
  while (slots_[at].generation == generation_ && slots_[at].sector != sector) {
    at = (at + 1) & mask;
  }
  return slots_[at];
}

uint8_t& TrafficCounter::Sectors::operator[](uintptr_t sector) {
  Slot* found = &slot(sector);
  if (found->generation != generation_) {
    if (2 * ++size_ > slots_.size()) {
      grow();
      found = &slot(sector);
    }
    *found = {sector, generation_, 0};
  }
  return found->done;
}

void TrafficCounter::Sectors::grow() {
  std::vector<Slot> before(2 * slots_.size());
  before.swap(slots_);
  for (const Slot& old : before) {
    if (old.generation == generation_) {
      slot(old.sector) = old;
    }
  }
}

void TrafficCounter::begin_launch(std::vector<std::pair<uintptr_t, uintptr_t>> own_ranges) {
  others_ = memory_of_the_program();
  others_.insert(others_.end(), own_ranges.begin(), own_ranges.end());
  std::sort(others_.begin(), others_.end());
  launch_.clear();
  traffic_ = {};
}

bool TrafficCounter::is_global(uintptr_t at) const {
  const auto after = std::upper_bound(others_.begin(), others_.end(), std::pair(at, ~uintptr_t(0)));
  return (after == others_.begin() || at >= (after - 1)->second) && !is_shared(at);
}

void TrafficCounter::access(uintptr_t at, size_t size, bool write) {
  const uint8_t done = write ? kWritten : kRead;
  const auto field = write ? &Bytes::written : &Bytes::read;
  for (uintptr_t sector = at / kSector; sector <= (at + size - 1) / kSector; ++sector) {
    uint8_t& in_block = block_[sector];
    if (in_block == 0 && !is_global(at)) {
      in_block = kNotGlobal;
    }
    if (in_block == kNotGlobal) {
      return;
    }
    if ((in_block & done) == 0) {
      in_block |= done;
      traffic_.per_block.*field += kSector;
      uint8_t& in_launch = launch_[sector];
      traffic_.per_launch.*field += (in_launch & done) == 0 ? kSector : 0;
      in_launch |= done;
    }
  }
  traffic_.requested.*field += int64_t(size);
}

std::vector<std::pair<uintptr_t, uintptr_t>> memory_of_the_program() {
  std::vector<std::pair<uintptr_t, uintptr_t>> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (const auto& part = info->dlpi_phdr[i]; part.p_type == PT_LOAD) {
            const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
            static_cast<decltype(&found)>(to)->emplace_back(begin, begin + part.p_memsz);
          }
        }
        return 0;
      },
      &found);
  pthread_attr_t attributes;
  void* stack = nullptr;
  size_t size = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &size);
  pthread_attr_destroy(&attributes);
  found.emplace_back(uintptr_t(stack), uintptr_t(stack) + size);
  return found;
}

} // namespace emulator

// ------------------------------------------------------------------------------------------------
// functions that compiled kernels call

namespace {

inline void record_access(const volatile void* address, size_t size, bool write) {
  const emulator::TrafficWatch& traffic_watch = emulator::traffic_watch;
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (traffic_watch.counter != nullptr && size > 0 &&
      !(at >= traffic_watch.stack_begin && at < traffic_watch.stack_end)) {
    traffic_watch.counter->access(at, size, write);
  }
}

} // namespace

extern "C" {

#define XS_ACCESSES(size)                                                        \
  void __tsan_read##size(void* at) { record_access(at, size, false); }           \
  void __tsan_write##size(void* at) { record_access(at, size, true); }           \
  void __tsan_unaligned_read##size(void* at) { record_access(at, size, false); } \
  void __tsan_unaligned_write##size(void* at) { record_access(at, size, true); } \
  void __tsan_volatile_read##size(void* at) { record_access(at, size, false); }  \
  void __tsan_volatile_write##size(void* at) { record_access(at, size, true); }

XS_ACCESSES(1)
XS_ACCESSES(2)
XS_ACCESSES(4)
XS_ACCESSES(8)
XS_ACCESSES(16)
void __tsan_read_range(void* at, size_t size) { record_access(at, size, false); }
void __tsan_write_range(void* at, size_t size) { record_access(at, size, true); }

// The rest is irrelevant, but atomics must work: host code in the same file uses some.
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

#define XS_ATOMICS(bits, T)                                                                        \
  T __tsan_atomic##bits##_load(const volatile T* at, int) {                                        \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile T* at, T x, int) {                                     \
    __atomic_store_n(at, x, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                                \
  T __tsan_atomic##bits##_exchange(volatile T* at, T x, int) {                                     \
    return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST);                                           \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* at, T x, int) {                                    \
    return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_sub(volatile T* at, T x, int) {                                    \
    return __atomic_fetch_sub(at, x, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_and(volatile T* at, T x, int) {                                    \
    return __atomic_fetch_and(at, x, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_or(volatile T* at, T x, int) {                                     \
    return __atomic_fetch_or(at, x, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_xor(volatile T* at, T x, int) {                                    \
    return __atomic_fetch_xor(at, x, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T x, int, int) { \
    return __atomic_compare_exchange_n(at, expected, x, false, __ATOMIC_SEQ_CST,                   \
                                       __ATOMIC_SEQ_CST);                                          \
  }                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* expected, T x, int, int) {   \
    return __atomic_compare_exchange_n(at, expected, x, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

XS_ATOMICS(8, uint8_t)
XS_ATOMICS(16, uint16_t)
XS_ATOMICS(32, uint32_t)
XS_ATOMICS(64, uint64_t)

} // extern "C"
