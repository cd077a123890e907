#pragma once

#include "op/optional.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <initializer_list>

namespace xsoftmax {

/// Runs an op with autocast disabled, so that its arguments keep their dtypes. This is the autocast
/// kernel of inner ops, whose outer op has already chosen the dtypes, and of backward ops, which
/// may also run inside an autocast region, where products of float32 gradients would be computed in
/// lower precision.
inline void disable_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

/// Registers disable_autocast for several ops, in a block that registers autocast kernels.
inline void disable_autocast(torch::Library& library, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    library.impl(op, torch::CppFunction::makeFromBoxedFunction<disable_autocast>());
  }
}

/// The operands of a product with a class table, cast to the autocast dtype as F.linear does. Sums
/// stay in float32.
struct CastOperands {
  at::Tensor input, weight;
  OptionalTensor bias;

  CastOperands(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
    const auto device = input.device().type();
    const auto dtype = at::autocast::get_autocast_dtype(device);
    this->input = at::autocast::cached_cast(dtype, input, device);
    this->weight = at::autocast::cached_cast(dtype, weight, device);
    this->bias =
        is_defined(bias) ? OptionalTensor(at::autocast::cached_cast(dtype, *bias, device)) : bias;
  }
};

} // namespace xsoftmax

/// Opens a block that registers autocast kernels in `m`, for the CPU and for CUDA.
#define XSOFTMAX_AUTOCAST(m) XSOFTMAX_AUTOCAST_(C10_CONCATENATE(register_autocast_, C10_UID), m)
#define XSOFTMAX_AUTOCAST_(define, m)                                      \
  static void define(torch::Library& m);                                   \
  TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, library) { define(library); }  \
  TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, library) { define(library); } \
  void define(torch::Library& m)
