#pragma once

// The emulated device, for language.h, which gives it the words of CUDA C++.
//
// The threads of a block are fibers of one thread of the host. One runs until it comes to a barrier or a warp intrinsic, or ends; of those
// that can go on, the first in the order goes next (order.h). Blocks run one after another, in the same kind of order. What a device leaves undefined throws,
// and the launch fails with its message. In two things the emulator is stricter than CUDA: all threads of a block must come to the same __syncthreads, and all
// lanes of a mask to the same place, none of them ended. Kernels that mean anything else say so in a mask.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>

struct uint3 { unsigned x = 0, y = 0, z = 0; };
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulator {

using Where = std::source_location;

/// What the running thread reads as threadIdx and so on.
struct BuiltIn {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
extern BuiltIn built_in;

/// The running thread did what the device leaves undefined: throws.
[[noreturn]] void undefined(const Where& where, const std::string& what);

/// Waits for all threads of the block; returns for how many of them `predicate` holds.
int barrier(const char* name, bool predicate, const Where& where);

/// A value that lanes exchange: 16 bytes hold every type that CUDA shuffles.
struct Bits { uint64_t word[2] = {}; };
template <typename T>
Bits to_bits(const T& value) {
  static_assert(sizeof(T) <= sizeof(Bits) && std::is_trivially_copyable_v<T>);
  Bits bits;
  std::memcpy(bits.word, &value, sizeof(T));
  return bits;
}
template <typename T>
T from_bits(const Bits& bits) {
  T value;
  std::memcpy(&value, bits.word, sizeof(T));
  return value;
}

/// A call of a warp intrinsic.
struct WarpCall {
  const char* name = "";
  Where where;
  unsigned mask = 0;
  unsigned lane = 0;
  Bits value;       ///< what this lane brings
  int argument = 0; ///< the lane or distance of a shuffle
  int width = 32;
};
/// What a lane gets, from what all lanes brought (those outside of the mask: nothing).
using Combine = Bits (*)(const WarpCall& call, const Bits* values);
/// Waits for the lanes of call.mask.
Bits warp(WarpCall call, Combine combine);

/// A block's variable, found by `key`, or made when its first thread comes to it: garbage, with guards on both sides.
void* shared_variable(const void* key, const char* names, size_t size, size_t alignment);
/// The bytes that the launch asks for, aligned as on the device. An error where it asks for none.
void* dynamic_shared(const Where& where = Where::current());

/// From now on launches of this kernel, in this file, may ask for so many bytes of dynamic shared memory; false: no device has so many.
bool allow_shared(const Where& where, std::string_view kernel, int bytes);
/// Whether the address is in shared memory of the block.
bool is_shared(uintptr_t at);

template <typename T>
T& shared(const char* names) {
  static const char key = 0;
  return *static_cast<T*>(shared_variable(&key, names, sizeof(T), alignof(T)));
}

/// K<<<grid, block, shared bytes, stream>>>(arguments...) is Launch(where, "K", grid, block, ...).of(K)(arguments...).
class Launch {
 public:
  template <typename... Stream>
  Launch(const Where& where, const char* kernel, dim3 grid, dim3 block, size_t shared = 0, const Stream&... /*everything is in order*/)
      : where(where), kernel(kernel), grid(grid), block(block), shared(shared) {}

  template <typename Kernel>
  auto of(Kernel kernel) const {
    // Parameters are copied at the launch, and for each thread. All of it lies on the stack of the host, which is no memory of the device.
    return [this, kernel](auto... arguments) {
      const auto thread = [&] { kernel(arguments...); };
      run(std::ref(thread));
    };
  }

  Where where;
  const char* kernel;
  dim3 grid, block;
  size_t shared;

 private:
  void run(const std::function<void()>& thread) const;
};

} // namespace emulator
