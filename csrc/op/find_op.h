#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace xsoftmax {

/// Returns the dispatcher's handle for an operator by its full name, such as
/// "xsoftmax::linear_topk".
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

} // namespace xsoftmax
