#pragma once

// The emulated device; language.h defines CUDA C++ in terms of it.
//
// The threads of a block are fibers of one host thread. A fiber runs until it reaches a barrier or
// a warp intrinsic, or ends; then the first one in the order (order.h) that can continue runs.
// Blocks run one after another, in the same kind of order. Behaviour that a device leaves undefined
// throws, and the launch fails with the message. The emulator is stricter than CUDA in two ways:
// all threads of a block must reach the same __syncthreads, and all lanes of a mask must reach the
// same place without having ended. Kernels that mean anything else say so in a mask.

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

/// The values of threadIdx and so on for the running thread.
struct BuiltIn {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
extern BuiltIn built_in;

/// Reports behaviour that the device leaves undefined: throws.
[[noreturn]] void undefined(const Where& where, const std::string& what);

/// Waits for all threads of the block; returns the number of threads whose `predicate` is true.
int barrier(const char* name, bool predicate, const Where& where);

/// A value that lanes exchange: 16 bytes, enough for every type that CUDA shuffles.
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
  Bits value;       ///< the value of this lane
  int argument = 0; ///< the lane or distance of a shuffle
  int width = 32;
};
/// Computes the result of a lane from the values of all lanes. Values of lanes outside the mask are
/// unset.
using Combine = Bits (*)(const WarpCall& call, const Bits* values);
/// Waits for the lanes of call.mask and returns combine(call, values of all lanes).
Bits warp(WarpCall call, Combine combine);

/// Returns the block's variable with this `key`. Creates it when the first thread asks for it,
/// filled with garbage and with guards on both sides.
void* shared_variable(const void* key, const char* names, size_t size, size_t alignment);
/// Returns the dynamic shared memory of the launch, aligned as on the device. An error if the
/// launch has none.
void* dynamic_shared(const Where& where = Where::current());

/// Allows launches of this kernel, in this file, that many bytes of dynamic shared memory. Returns
/// false if no device has that much.
bool allow_shared(const Where& where, std::string_view kernel, int bytes);
/// Counts launches of kernels that are not emulated.
void count_launches(const char* name, int64_t launches);

/// Whether a graph is being captured (cuda_emulator::set_capturing).
bool is_capturing();
/// Makes the end of a capture fail because of a `call` that CUDA does not allow during captures.
void break_capture(const char* call);
void* allocate_on_host(size_t bytes);
void free_on_host(void* data);

/// Whether the address is in the block's shared memory.
bool is_shared(uintptr_t at);

template <typename T>
T& shared(const char* names) {
  static const char key = 0;
  return *static_cast<T*>(shared_variable(&key, names, sizeof(T), alignof(T)));
}

/// K<<<grid, block, shared bytes, stream>>>(arguments...) becomes Launch(where, "K", grid, block,
/// ...).of(K)(arguments...).
class Launch {
 public:
  template <typename... Stream>
  Launch(const Where& where, const char* kernel, dim3 grid, dim3 block, size_t shared = 0,
         const Stream&... /*everything is in order*/)
      : where(where), kernel(kernel), grid(grid), block(block), shared(shared) {}

  template <typename Kernel>
  auto of(Kernel kernel) const {
    // Parameters are copied at the launch, and again for each thread. They are on the stack of the
    // host, which is not device memory.
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
