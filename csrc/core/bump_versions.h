#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace c10 {
class OperatorHandle;
}

namespace xsoftmax {

/// The ADInplaceOrView kernel of the ops that change tensors and return nothing: raises the version of each tensor that the schema
/// says is written, so that autograd notices a backward pass through a value that a step has overwritten.
void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

} // namespace xsoftmax
