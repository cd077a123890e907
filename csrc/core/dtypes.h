#pragma once

#include "core/simd.h"

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace xsoftmax {

/// The dtype in which sums over tensors of `dtype` are held: float32 for the 16-bit types, else itself.
inline at::ScalarType opmath_dtype(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype; }

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}
template <typename T>
const T* const_data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

/// Calls function(T{}) with the storage type of a dtype that check::floating has passed: float, double, Bf16 or F16.
template <typename Function>
decltype(auto) dispatch_floating(at::ScalarType dtype, Function&& function) {
  switch (dtype) {
    case at::kDouble: return function(double{});
    case at::kBFloat16: return function(Bf16{});
    case at::kHalf: return function(F16{});
    default: return function(float{});
  }
}

/// The same for the dtype of sums, opmath_dtype: float or double.
template <typename Function>
decltype(auto) dispatch_sums(at::ScalarType dtype, Function&& function) {
  return dtype == at::kDouble ? function(double{}) : function(float{});
}

} // namespace xsoftmax
