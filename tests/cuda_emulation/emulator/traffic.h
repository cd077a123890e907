#pragma once

// Counts the bytes of global memory that kernels read and write. Kernels are compiled with
// -fsanitize=thread and linked without its runtime: the compiler then calls a function in
// traffic.cpp for each memory access that other threads may see.
//
// Global memory is everything except stacks, shared memory, launch parameters, static data and the
// emulator's own memory.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace emulator {

struct Bytes { int64_t read = 0, written = 0; };

struct Traffic {
  Bytes requested;      ///< all accesses of all threads, as compiled
  /// 32 for each sector of 32 bytes that a block touches, however often: the traffic between L2 and
  /// a block that misses nothing twice.
  Bytes per_block;
  /// The same for the whole launch: the traffic between memory and an unlimited L2.
  Bytes per_launch;
  Traffic& operator+=(const Traffic& other);
};

class TrafficCounter {
 public:
  /// `own_ranges`: begin and end addresses of the emulator's memory.
  void begin_launch(std::vector<std::pair<uintptr_t, uintptr_t>> own_ranges);
  void begin_block() { block_.clear(); }
  void access(uintptr_t at, size_t size, bool write);
  const Traffic& found() const { return traffic_; }

 private:
  /// How a sector was accessed.
  enum : uint8_t { kRead = 1, kWritten = 2, kNotGlobal = 4 };

  class Sectors {
   public:
    void clear() { ++generation_, size_ = 0; }
    uint8_t& operator[](uintptr_t sector);

   private:
    struct Slot {
      uintptr_t sector = 0;
      uint32_t generation = 0;
      uint8_t done = 0;
    };
    void grow();
    Slot& slot(uintptr_t sector);
    std::vector<Slot> slots_ = std::vector<Slot>(1 << 12);
    size_t size_ = 0;
    uint32_t generation_ = 1;
  };

  bool is_global(uintptr_t at) const;

  Sectors block_, launch_;
  // Sorted [begin, end) ranges that are not global memory.
  std::vector<std::pair<uintptr_t, uintptr_t>> others_;
  Traffic traffic_;
};

/// The counter for accesses of the calling thread, nullptr outside of kernels. The stack is the
/// running fiber's, which is not global memory.
struct TrafficWatch {
  TrafficCounter* counter = nullptr;
  uintptr_t stack_begin = 0, stack_end = 0;
};
extern thread_local TrafficWatch traffic_watch __attribute__((tls_model("initial-exec")));

/// Returns the static data of all loaded libraries and the stack of the calling thread.
std::vector<std::pair<uintptr_t, uintptr_t>> memory_of_the_program();

} // namespace emulator
