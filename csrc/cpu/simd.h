#pragma once

// Scalar building blocks for *.simd.cpp files, written so that the compiler vectorises the loops
// that call them at the width of the file's instruction set. Everything is `static inline`, so that
// each instruction set has its own copy.

#include "random/philox.h" // XS_HOST_DEVICE

#include <cstdint>

// CUDA files also have their own copy.
#if defined(__CUDACC__) && !defined(XS_ISA)
#define XS_ISA on_device
#endif

namespace xsoftmax {

// Storage of the 16-bit types, with the layout of c10's types. Arithmetic is in float.
struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

template <typename T> struct OpMath { using type = T; };
template <> struct OpMath<Bf16> { using type = float; };
template <> struct OpMath<F16> { using type = float; };
template <typename T> using opmath = typename OpMath<T>::type;

} // namespace xsoftmax

#ifdef XS_ISA
namespace xsoftmax::XS_ISA {

// Size of a vector register. Values of wider types (vector_size) go through memory, and are
// compared and selected one element at a time.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <typename To, typename From>
XS_HOST_DEVICE static inline To bit_cast(From from) {
  return __builtin_bit_cast(To, from);
}

static inline float load(float x) { return x; }
static inline double load(double x) { return x; }
static inline float load(Bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

// Converts exactly, including subnormals: a product rebases the exponent of normal numbers, and a
// subtraction from a fixed binade that of subnormals.
static inline float load(F16 x) {
  const uint32_t w = uint32_t(x.bits) << 16;
  const uint32_t sign = w & 0x80000000u;
  const uint32_t twice = w + w;
  const float normal = bit_cast<float>((twice >> 4) + (0xE0u << 23)) * bit_cast<float>(0x7800000u);
  const float subnormal = bit_cast<float>((twice >> 17) | (126u << 23)) - 0.5f;
  const uint32_t magnitude =
      twice < (1u << 27) ? bit_cast<uint32_t>(subnormal) : bit_cast<uint32_t>(normal);
  return bit_cast<float>(sign | magnitude);
}

static inline void store(float* to, float x) { *to = x; }
static inline void store(double* to, double x) { *to = x; }

// Rounds to nearest, ties to even. NaN stays NaN.
static inline void store(Bf16* to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  to->bits = uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// Rounds to nearest, ties to even. NaN stays NaN.
static inline void store(F16* to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = bits & 0x80000000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u; // NaN
  } else if (magnitude >= 0x477FF000u) {
    half = 0x7C00u; // rounds past the largest half: infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the rounded 10-bit fraction in the low bits.
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  to->bits = uint16_t((sign >> 16) | half);
}

// Maps floats to integers in the same order, because a maximum of integers vectorises, and one of
// floats does not if NaN must be handled. A positive NaN is above infinity and becomes the maximum.
// A negative NaN is missed here, but still reaches the sum.
XS_HOST_DEVICE static inline int32_t ordered(float x) {
  const int32_t bits = bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
XS_HOST_DEVICE static inline int64_t ordered(double x) {
  const int64_t bits = bit_cast<int64_t>(x);
  return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF);
}
XS_HOST_DEVICE static inline float from_ordered(int32_t key) {
  return bit_cast<float>(key ^ ((key >> 31) & 0x7FFFFFFF));
}
XS_HOST_DEVICE static inline double from_ordered(int64_t key) {
  return bit_cast<double>(key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF));
}

// Returns e^x to 2 ulp, for x after subtraction of a maximum. Below -87.3 it returns 0 (also for
// -inf), above 88 it returns e^88, and NaN stays NaN. Uses Cody-Waite reduction and a polynomial of
// degree 6, without branches, so that loops vectorise.
XS_HOST_DEVICE static inline float exponential(float x) {
  float y = x < -87.3f ? -87.3f : x;
  y = y > 88.0f ? 88.0f : y;
  // Rounds to the nearest integer: the offset makes the sum positive before truncation. Unsigned,
  // because a NaN may become any integer.
  const uint32_t n = uint32_t(int32_t(y * 1.44269504088896341f + 128.5f)) - 128u;
  const float k = float(int32_t(n));
  const float r = (y - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float value = p * bit_cast<float>((n + 127u) << 23);
  return x < -87.3f ? 0.0f : value;
}

// Returns e^x in float64, likewise: 0 below -708, e^709 above 709, polynomial of degree 13.
XS_HOST_DEVICE static inline double exponential(double x) {
  double y = x < -708.0 ? -708.0 : x;
  y = y > 709.0 ? 709.0 : y;
  const uint32_t n = uint32_t(int32_t(y * 0x1.71547652b82fep+0 + 1024.5)) - 1024u;
  const double k = double(int32_t(n));
  const double r = (y - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r * r + r + 1.0;
  const double value = p * bit_cast<double>(uint64_t(n + 1023u) << 52);
  return x < -708.0 ? 0.0 : value;
}

} // namespace xsoftmax::XS_ISA
#endif
