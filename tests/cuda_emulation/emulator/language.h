#pragma once

// The parts of CUDA C++ that kernels use, for a C++ compiler. Precompiled, and included before
// every translated source (translate.py). A missing part fails to compile: add it here.

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/macros/Macros.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "machine.h"

#define __CUDACC__ 1 // only below: the headers above belong to a CPU build of torch
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __builtin_assume(condition) ((void)0)
#define threadIdx (::emulator::built_in.thread)
#define blockIdx (::emulator::built_in.block)
#define blockDim (::emulator::built_in.block_dim)
#define gridDim (::emulator::built_in.grid_dim)
constexpr int warpSize = 32;

#undef CUDA_KERNEL_ASSERT
#undef CUDA_KERNEL_ASSERT_MSG
#define CUDA_KERNEL_ASSERT(condition)                                \
  ((condition) ? void()                                              \
               : ::emulator::undefined(::emulator::Where::current(), \
                                       "device-side assert: `" #condition "` does not hold"))
#define CUDA_KERNEL_ASSERT_MSG(condition, message) CUDA_KERNEL_ASSERT((condition) && message)

// -------------------------------------------------------------------------------------------------
// barriers and warps

#define XS_WHERE const ::emulator::Where& where = ::emulator::Where::current()

inline void __syncthreads(XS_WHERE) { ::emulator::barrier("__syncthreads", false, where); }
inline int __syncthreads_count(int predicate, XS_WHERE) {
  return ::emulator::barrier("__syncthreads_count", predicate != 0, where);
}
inline int __syncthreads_or(int predicate, XS_WHERE) {
  return ::emulator::barrier("__syncthreads_or", predicate != 0, where) > 0;
}
inline int __syncthreads_and(int predicate, XS_WHERE) {
  return ::emulator::barrier("__syncthreads_and", predicate == 0, where) == 0;
}

namespace emulator {

inline Bits nothing(const WarpCall&, const Bits*) { return {}; }

/// A shuffle. From is a function of (call, first lane of the group, position in the group) that
/// returns the lane to read.
template <typename From, typename T>
T shuffle(const char* name, unsigned mask, const T& value, int argument, int width,
          const Where& where) {
  const WarpCall mine{name, where, mask, 0, to_bits(value), argument, width};
  return from_bits<T>(warp(mine, [](const WarpCall& call, const Bits* values) {
    const int group = int(call.lane) / call.width * call.width;
    const int from = From{}(call, group, int(call.lane) - group);
    if ((call.mask >> from & 1) == 0) {
      undefined(call.where,
                std::string(call.name) + ": lane " + std::to_string(call.lane) + " reads lane " +
                    std::to_string(from) + ", which is not in the mask,");
    }
    return values[from];
  }));
}

struct FromLane {
  int operator()(const WarpCall& call, int group, int) const {
    return group + (call.argument & (call.width - 1));
  }
};
struct FromXor {
  int operator()(const WarpCall& call, int group, int) const {
    const int from = int(call.lane) ^ call.argument;
    return from < group + call.width ? from & 31 : int(call.lane);
  }
};
struct FromBelow {
  int operator()(const WarpCall& call, int, int place) const {
    return int(call.lane) - (place >= call.argument ? call.argument : 0);
  }
};
struct FromAbove {
  int operator()(const WarpCall& call, int, int place) const {
    return int(call.lane) + (place + call.argument < call.width ? call.argument : 0);
  }
};

/// Combines the values of all lanes of the mask. Join is a function of (result so far, lane, this
/// lane's value, another lane's value).
template <typename Join, typename T>
uint64_t vote(const char* name, unsigned mask, const T& value, const Where& where) {
  const WarpCall mine{name, where, mask, 0, to_bits(value), 0, 32};
  return warp(mine,
              [](const WarpCall& call, const Bits* values) {
                uint64_t result = Join::start;
                for (unsigned lane = 0; lane < 32; ++lane) {
                  if ((call.mask >> lane & 1) != 0) {
                    result =
                        Join{}(result, lane, from_bits<T>(call.value), from_bits<T>(values[lane]));
                  }
                }
                return Bits{{result, 0}};
              })
      .word[0];
}

struct Equal {
  static constexpr uint64_t start = 0;
  template <typename T>
  uint64_t operator()(uint64_t result, unsigned lane, const T& mine, const T& other) const {
    return result | uint64_t(std::memcmp(&mine, &other, sizeof(T)) == 0) << lane;
  }
};
struct Holds {
  static constexpr uint64_t start = 0;
  uint64_t operator()(uint64_t result, unsigned lane, bool, bool other) const {
    return result | uint64_t(other) << lane;
  }
};
struct Sum {
  static constexpr uint64_t start = 0;
  template <typename T>
  uint64_t operator()(uint64_t result, unsigned, T, T other) const {
    return uint64_t(T(T(result) + other));
  }
};
struct Least {
  static constexpr uint64_t start = ~uint64_t(0);
  template <typename T>
  uint64_t operator()(uint64_t result, unsigned, T, T other) const {
    return result == start ? uint64_t(uint32_t(other))
                           : uint64_t(uint32_t(std::min(T(result), other)));
  }
};
struct Greatest {
  static constexpr uint64_t start = ~uint64_t(0);
  template <typename T>
  uint64_t operator()(uint64_t result, unsigned, T, T other) const {
    return result == start ? uint64_t(uint32_t(other))
                           : uint64_t(uint32_t(std::max(T(result), other)));
  }
};

} // namespace emulator

inline void __syncwarp(unsigned mask = ~0u, XS_WHERE) {
  ::emulator::warp({"__syncwarp", where, mask, 0, {}, 0, 32}, ::emulator::nothing);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, XS_WHERE) {
  return ::emulator::shuffle<::emulator::FromLane>("__shfl_sync", mask, value, lane, width, where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, XS_WHERE) {
  return ::emulator::shuffle<::emulator::FromXor>("__shfl_xor_sync", mask, value, lanes, width,
                                                  where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, XS_WHERE) {
  return ::emulator::shuffle<::emulator::FromBelow>("__shfl_up_sync", mask, value, int(lanes),
                                                    width, where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, XS_WHERE) {
  return ::emulator::shuffle<::emulator::FromAbove>("__shfl_down_sync", mask, value, int(lanes),
                                                    width, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, XS_WHERE) {
  return unsigned(
      ::emulator::vote<::emulator::Holds>("__ballot_sync", mask, predicate != 0, where));
}
inline int __any_sync(unsigned mask, int predicate, XS_WHERE) {
  return ::emulator::vote<::emulator::Holds>("__any_sync", mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, XS_WHERE) {
  return ::emulator::vote<::emulator::Holds>("__all_sync", mask, predicate != 0, where) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, XS_WHERE) {
  return unsigned(::emulator::vote<::emulator::Equal>("__match_any_sync", mask, value, where));
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value, XS_WHERE) {
  return T(::emulator::vote<::emulator::Sum>("__reduce_add_sync", mask, value, where));
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value, XS_WHERE) {
  return T(::emulator::vote<::emulator::Least>("__reduce_min_sync", mask, value, where));
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value, XS_WHERE) {
  return T(::emulator::vote<::emulator::Greatest>("__reduce_max_sync", mask, value, where));
}
inline unsigned __activemask() = delete; // undefined which lanes run together

// -------------------------------------------------------------------------------------------------
// memory

template <typename T> T __ldg(const T* from) { return *from; }
template <typename T> T __ldcs(const T* from) { return *from; }
template <typename T> T __ldcg(const T* from) { return *from; }
template <typename T> void __stcs(T* to, std::type_identity_t<T> value) { *to = value; }
template <typename T> T __ldlu(const T* from) { return *from; }
template <typename T> T __ldca(const T* from) { return *from; }
template <typename T> void __stcg(T* to, std::type_identity_t<T> value) { *to = value; }
template <typename T> void __stwt(T* to, std::type_identity_t<T> value) { *to = value; }
template <typename T> void __stwb(T* to, std::type_identity_t<T> value) { *to = value; }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __threadfence_block() {}

// No two threads run at the same time, so plain updates are atomic.
template <typename T, typename Function>
T change(T* at, Function&& next) {
  const T old = *at;
  *at = next(old);
  return old;
}
template <typename T> T atomicAdd(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T old) { return T(old + x); });
}
template <typename T> T atomicSub(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T old) { return T(old - x); });
}
template <typename T> T atomicMax(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T old) { return std::max(old, x); });
}
template <typename T> T atomicMin(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T old) { return std::min(old, x); });
}
template <typename T> T atomicOr(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T old) { return T(old | x); });
}
template <typename T> T atomicAnd(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T old) { return T(old & x); });
}
template <typename T> T atomicXor(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T old) { return T(old ^ x); });
}
template <typename T> T atomicExch(T* at, std::type_identity_t<T> x) {
  return change(at, [=](T) { return x; });
}
template <typename T> T atomicCAS(T* at, std::type_identity_t<T> expected,
                                  std::type_identity_t<T> x) {
  return change(at, [=](T old) { return old == expected ? x : old; });
}

// -------------------------------------------------------------------------------------------------
// arithmetic

using std::max;
using std::min;
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(unsigned(x)) + 1; }
inline int __ffsll(long long x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1;
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) {
    sum += int(int8_t(a >> i)) * int(int8_t(b >> i));
  }
  return sum;
}
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) {
    result |= (x >> i & 1) << (31 - i);
  }
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
__extension__ inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1 / std::sqrt(x); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0; } // NaN gives 0
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };

// -------------------------------------------------------------------------------------------------
// host

// Runtime calls of the host other than launches. Work is done when a call returns, so streams and
// events have nothing to do.
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout
};

/// A launch has at most 48 KB of shared memory, including variables that the kernel declares. This
/// call allows a kernel more dynamic bytes. The kernel is identified by its file and its text in
/// the launch; `text` begins with the latter.
template <typename Kernel>
cudaError_t set_emulated_attribute(const ::emulator::Where& where, std::string_view text, Kernel*,
                                   cudaFuncAttribute attribute, int value) {
  return attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
          ::emulator::allow_shared(where, text.substr(0, text.rfind(", cudaFuncAttribute")), value)
      ? cudaSuccess
      : cudaErrorInvalidValue;
}
#define cudaFuncSetAttribute(...) \
  set_emulated_attribute(::emulator::Where::current(), #__VA_ARGS__, __VA_ARGS__)
template <typename Stream>
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, const Stream&) {
  ::emulator::count_launches("cudaMemsetAsync", 1);
  std::memset(to, value, size);
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
template <typename Stream>
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            const Stream&) {
  ::emulator::count_launches("cudaMemcpyAsync", 1);
  std::memmove(to, from, size);
  return cudaSuccess;
}
/// Memory of the host that kernels address is any memory. To free it or to wait for the device ends
/// a capture with an error.
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
inline cudaError_t cudaHostAlloc(void** data, size_t size, unsigned) {
  *data = ::emulator::allocate_on_host(size);
  return *data ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaHostGetDevicePointer(void** mapped, void* host, unsigned) {
  return *mapped = host, cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* data) {
  ::emulator::break_capture("cudaFreeHost");
  ::emulator::free_on_host(data);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  ::emulator::break_capture("cudaDeviceSynchronize");
  return cudaSuccess;
}
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
template <typename Stream>
cudaError_t cudaStreamIsCapturing(const Stream&, cudaStreamCaptureStatus* status) {
  *status =
      ::emulator::is_capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "error"; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerMultiprocessor };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
/// A small device with the shared memory of compute capability 9.0, so that grids limited to its
/// size use their stride loop.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : 228 * 1024, cudaSuccess;
}
