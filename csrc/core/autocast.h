#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <initializer_list>

namespace xsoftmax {

/// Autocast kernel of ops that take what they are given: the inner parts of an op whose own autocast kernel has chosen the dtypes, and
/// backward ops, which may run inside a region of autocast as well, where products of float32 gradients would be taken down.
inline void below_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

/// The same for several ops, in a TORCH_LIBRARY_IMPL of an autocast key.
inline void below_autocast(torch::Library& library, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    library.impl(op, torch::CppFunction::makeFromBoxedFunction<below_autocast>());
  }
}

} // namespace xsoftmax
