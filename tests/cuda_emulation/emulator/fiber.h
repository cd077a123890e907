#pragma once

// A function with its own stack, which runs until it suspends itself and resumes where it left off.

#include <cstddef>
#include <cstdint>
#include <utility>

namespace emulator {

class Fiber {
 public:
  /// `function` starts when the fiber is first resumed. It must not return, because fibers are
  /// reused for the next block.
  explicit Fiber(void (*function)());
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Called by the scheduler; returns when the fiber suspends itself.
  void resume();
  void suspend(); ///< called by the fiber
  std::pair<uintptr_t, uintptr_t> stack() const; ///< begin and end address

 private:
  static void enter();

  void (*function_)();
  unsigned char* stack_;
  void* resume_point_ = nullptr; // where the fiber resumes
  void* driver_ = nullptr; // where the scheduler resumes
  // Stack information for AddressSanitizer.
  void* fake_stack_ = nullptr;
  const void* driver_stack_ = nullptr;
  size_t driver_stack_size_ = 0;
};

} // namespace emulator
