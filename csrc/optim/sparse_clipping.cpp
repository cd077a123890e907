#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

// torch.nn.utils.clip_grad_norm_, get_total_norm and clip_grad_value_ (and their C++ counterparts)
// call operators that torch does not implement for sparse tensors. These kernels raise errors that
// name the function to use for row-sparse gradients.

namespace xsoftmax {
namespace {

void refuse_norm(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": expected a dense tensor, got a sparse one. To clip row-sparse "
                              "gradients, use xs.clip_grad_norm_ "
                              "(xsoftmax::clip_grad_norm_ in C++) in the place of "
                              "torch.nn.utils.clip_grad_norm_ and get_total_norm, "
                              "or make the loss with sparse_grad=False");
}

void refuse_clamp(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": expected a dense tensor, got a sparse one. To clip row-sparse gradients, clip by norm, "
      "with "
      "xs.clip_grad_norm_ (xsoftmax::clip_grad_norm_ in C++), in the place of "
      "torch.nn.utils.clip_grad_value_, or make the loss with sparse_grad=False");
}

// Skips operators that a later version of torch implements.
template <auto* refuse>
void refuse_where_missing(torch::Library& m, const char* name, c10::DispatchKey key) {
  const auto op = c10::Dispatcher::singleton().findOp({std::string("aten::") + name, ""});
  if (op.has_value() && !op->hasKernelForDispatchKey(key)) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<refuse>());
  }
}

void refuse_clipping(torch::Library& m, c10::DispatchKey key) {
  refuse_where_missing<refuse_norm>(m, "linalg_vector_norm", key);
  // Called by clip_grad_norm_ in C++ for the infinity norm.
  refuse_where_missing<refuse_norm>(m, "max", key);
  refuse_where_missing<refuse_clamp>(m, "clamp_", key);
  refuse_where_missing<refuse_clamp>(m, "clamp_min_", key);
  refuse_where_missing<refuse_clamp>(m, "clamp_max_", key);
}

TORCH_LIBRARY_IMPL(aten, SparseCPU, m) { refuse_clipping(m, c10::DispatchKey::SparseCPU); }
TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) { refuse_clipping(m, c10::DispatchKey::SparseCUDA); }

} // namespace
} // namespace xsoftmax
