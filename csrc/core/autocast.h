#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace xsoftmax {

/// Autocast kernel of ops that take what they are given: the inner parts of an op whose own autocast kernel has chosen the dtypes, and
/// backward ops, which may run inside a region of autocast as well, where products of float32 gradients would be taken down.
inline void below_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

} // namespace xsoftmax
