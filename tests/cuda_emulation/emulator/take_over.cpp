// Sends CPU tensors the way of CUDA tensors.
//
//   cuda_emulator::take_over() -> str[]   from now on each operator of xsoftmax runs, for CPU tensors, what it runs for CUDA tensors: its
//                                         CUDA kernel, emulated, or else its composite. Returns the operators that have neither.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;

class Detour;
thread_local std::vector<const Detour*> under_way; // operators that run as on CUDA
thread_local bool at_home = false;                 // within a CPU kernel

/// A composite may copy its arguments to the CPU and call its operator again. Here that call looks like the first; it is for the CPU
/// kernel, as is all that happens within.
class Detour : public c10::OperatorKernel {
 public:
  explicit Detour(c10::SafeKernelFunction cpu) : cpu_(std::move(cpu)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
    if (at_home || std::find(under_way.begin(), under_way.end(), this) != under_way.end()) {
      const auto leave = c10::make_scope_exit([before = at_home] { at_home = before; });
      at_home = true;
      cpu_.callBoxed(op, DispatchKeySet(DispatchKey::CPU), stack);
      return;
    }
    under_way.push_back(this);
    const auto leave = c10::make_scope_exit([] { under_way.pop_back(); });
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CUDA), stack);
  }

 private:
  c10::SafeKernelFunction cpu_; // what CPU tensors ran before
};

/// Torch warns of kernels that are replaced: here they are meant to be.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<std::string> take_over() {
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard quiet(&none);
  // Never freed: the kernels stay for as long as the process runs.
  static auto* const library = new torch::Library(torch::Library::IMPL, "xsoftmax", DispatchKey::CPU, __FILE__, __LINE__);
  std::vector<std::string> neither;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!name.name.starts_with("xsoftmax::") || !op.has_value() || !op->hasKernelForDispatchKey(DispatchKey::CPU)) {
      continue; // one without a CPU kernel of its own runs its composite on any device
    }
    const std::string stem = name.name.substr(name.name.find("::") + 2);
    if (op->hasKernelForDispatchKey(DispatchKey::CUDA) || op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)) {
      auto detour = std::make_unique<Detour>(op->getComputedKernelForDispatchKey(DispatchKey::CPU));
      library->impl(stem.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(detour)));
    } else {
      neither.push_back(stem);
    }
  }
  std::sort(neither.begin(), neither.end());
  return neither;
}

/// ATen has products of 16-bit matrices with a wider result for CUDA only.
at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }
at::Tensor& mm_dtype_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype, at::Tensor& out) {
  TORCH_CHECK(out.scalar_type() == dtype, "mm: expected out of dtype ", dtype, ", got ", out.scalar_type());
  return out.copy_(mm_dtype(a, b, dtype));
}

} // namespace

TORCH_LIBRARY_FRAGMENT(cuda_emulator, m) { m.def("take_over() -> str[]", take_over); }

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", mm_dtype);
  m.impl("mm.dtype_out", mm_dtype_out);
}
