#pragma once

// The shared memory of the running block.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

class SharedMemory {
 public:
  void begin_block(size_t dynamic_bytes);
  /// Frees all of it. Returns a description of a write just outside a variable, or "".
  std::string end_block();

  void* variable(const void* key, const char* names, size_t size, size_t alignment);
  void* dynamic() const {
    return variables_.empty() || variables_[0].key != this ? nullptr : variables_[0].memory;
  }
  size_t bytes() const { return bytes_; }
  bool holds(uintptr_t at) const;

 private:
  struct Variable {
    const void* key;
    const char* names;
    size_t size;
    size_t margin;
    unsigned char* base;
    unsigned char* memory;
  };
  std::vector<Variable> variables_;
  size_t bytes_ = 0;
  unsigned blocks_ = 0;
};

} // namespace emulator
