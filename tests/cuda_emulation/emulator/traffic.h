#pragma once

// Counts the bytes of global memory that kernels read and write. Kernels are compiled with -fsanitize=thread and linked without its runtime:
// the compiler then calls a function, defined in traffic.cpp, for each access to memory that may be seen from outside of the thread.
//
// Global memory is what is none of these: stacks, shared memory, parameters of the launch, static data, what belongs to the emulator.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace emulator {

struct Bytes { int64_t read = 0, written = 0; };

struct Traffic {
  Bytes asked;      ///< all accesses of all threads, as the compiled kernel makes them
  Bytes per_block;  ///< 32 for each sector of 32 bytes that a block touches, however often: what passes between L2 and a block that misses nothing twice
  Bytes per_launch; ///< the same for the whole launch: what passes between memory and an L2 without end
  Traffic& operator+=(const Traffic& other);
};

class TrafficCounter {
 public:
  /// `own`: memory of the emulator, from and to.
  void begin_launch(std::vector<std::pair<uintptr_t, uintptr_t>> own);
  void begin_block() { block_.clear(); }
  void access(uintptr_t at, size_t size, bool write);
  const Traffic& found() const { return found_; }

 private:
  /// What was done with a sector.
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
  std::vector<std::pair<uintptr_t, uintptr_t>> others_; // from and to, sorted: what is not global
  Traffic found_;
};

/// What counts the accesses of the calling thread, nullptr outside of kernels. The stack is that of the running fiber, which is not global.
struct Watch {
  TrafficCounter* counter = nullptr;
  uintptr_t stack_begin = 0, stack_end = 0;
};
extern thread_local Watch watch __attribute__((tls_model("initial-exec")));

/// Static data of all that is loaded, and the stack of the calling thread.
std::vector<std::pair<uintptr_t, uintptr_t>> memory_of_the_program();

} // namespace emulator
