#pragma once

#include "cpu/simd.h"

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace xsoftmax {

/// Returns the dtype of sums over tensors of `dtype`: float32 for the 16-bit types, else `dtype`.
inline at::ScalarType opmath_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}
template <typename T>
const T* const_data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

/// Calls function(T{}), where T is the storage type of a dtype accepted by check::floating: float,
/// double, Bf16 or F16.
template <typename Function>
decltype(auto) dispatch_floating(at::ScalarType dtype, Function&& function) {
  switch (dtype) {
    case at::kDouble: return function(double{});
    case at::kBFloat16: return function(Bf16{});
    case at::kHalf: return function(F16{});
    default: return function(float{});
  }
}

/// Calls function(T{}), where T is float or double, for a dtype returned by opmath_dtype.
template <typename Function>
decltype(auto) dispatch_sums(at::ScalarType dtype, Function&& function) {
  return dtype == at::kDouble ? function(double{}) : function(float{});
}

} // namespace xsoftmax
