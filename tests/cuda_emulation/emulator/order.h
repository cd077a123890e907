#pragma once

// The order in which threads and blocks run.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace emulator {

class Order {
 public:
  /// Sets the order: "forward", "reverse", or the seed of random orders.
  void set(const std::string& name);
  /// Returns blocks from first to last.
  std::vector<uint32_t> blocks(uint32_t count);
  /// Returns the threads of one block from first to last.
  std::vector<uint32_t> threads(uint32_t count);

 private:
  enum class Kind { Forward, Reverse, Random };
  std::vector<uint32_t> straight(uint32_t count) const;

  Kind kind_ = Kind::Forward;
  std::mt19937 random_;
};

} // namespace emulator
