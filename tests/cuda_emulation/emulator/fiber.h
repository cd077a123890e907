#pragma once

// A function with a stack of its own, which runs until it suspends itself and is resumed where it left off.

#include <cstddef>
#include <cstdint>
#include <utility>

namespace emulator {

class Fiber {
 public:
  explicit Fiber(void (*function)()); ///< runs when first resumed, and must not return: fibers are kept for the next block
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();  ///< called by whoever drives the fibers: returns when the fiber suspends itself
  void suspend(); ///< called by the fiber
  std::pair<uintptr_t, uintptr_t> stack() const; ///< from and to

 private:
  static void enter();

  void (*function_)();
  unsigned char* stack_;
  void* own_ = nullptr;    // where it goes on
  void* driver_ = nullptr; // where the driver goes on
  // What AddressSanitizer wants to know of stacks.
  void* fake_stack_ = nullptr;
  const void* driver_stack_ = nullptr;
  size_t driver_stack_size_ = 0;
};

} // namespace emulator
