// Sends CPU tensors the way of CUDA tensors.
//
//   cuda_emulator::take_over() -> str[]   from now on each operator of xsoftmax runs, for CPU tensors, what it runs for CUDA tensors: its
//                                         CUDA kernel, emulated, or else its composite. Returns the operators that have neither.
//   cuda_emulator::findings() -> str[]    "operator: what it did" of each that since has done what an operator must not do on a device: wait for it, by an
//                                         operator of ATen that tells the host a value; copy its arguments to the CPU; add in an order that
//                                         is not fixed. What a kernel's host code reads from memory by itself is not seen.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;

class Detour;
thread_local std::vector<const Detour*> under_way; // operators that run as on CUDA
thread_local bool at_home = false;                 // within a CPU kernel

std::mutex findings_mutex;
std::set<std::string> findings_seen;

// Of the operator that runs as on CUDA.
void found(const std::string& what);

/// A composite may copy its arguments to the CPU and call its operator again. Here that call looks like the first; it is for the CPU
/// kernel, as is all that happens within.
class Detour : public c10::OperatorKernel {
 public:
  /// cpu: what CPU tensors ran before: a kernel for the CPU, or else the composite.
  Detour(std::string name, bool on_cpu, c10::SafeKernelFunction cpu) : name_(std::move(name)), on_cpu_(on_cpu), cpu_(std::move(cpu)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
    const bool again = std::find(under_way.begin(), under_way.end(), this) != under_way.end();
    if (at_home || (again && on_cpu_)) {
      if (!at_home) {
        found("runs the CPU's kernel");
      }
      const auto leave = c10::make_scope_exit([before = at_home] { at_home = before; });
      at_home = true;
      cpu_.callBoxed(op, DispatchKeySet(DispatchKey::CPU), stack);
      return;
    }
    under_way.push_back(this);
    const auto leave = c10::make_scope_exit([] { under_way.pop_back(); });
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CUDA), stack);
  }

  const std::string& name() const { return name_; }

 private:
  const std::string name_;
  const bool on_cpu_;
  c10::SafeKernelFunction cpu_;
};

// Whether the composites run in the place of the kernels: the oracle of tests, and no user's step.
bool by_composites() {
  static const auto impl = c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::get_impl", "").typed<std::string()>();
  return impl.call() == "reference";
}

void found(const std::string& what) {
  if (!under_way.empty() && !at_home && !by_composites()) {
    const std::lock_guard lock(findings_mutex);
    findings_seen.insert(under_way.back()->name() + ": " + what);
  }
}

std::vector<std::string> findings() {
  const std::lock_guard lock(findings_mutex);
  return {findings_seen.begin(), findings_seen.end()};
}

enum class Fault { Waits, UnorderedSum };

/// An operator of ATen that is as it should be on a CPU, not on CUDA.
class Watch : public c10::OperatorKernel {
 public:
  Watch(std::string name, Fault fault, c10::SafeKernelFunction cpu) : name_(std::move(name)), fault_(fault), cpu_(std::move(cpu)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
    const at::Tensor& self = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
    if (fault_ == Fault::Waits) {
      found("waits (" + name_ + ")");
    } else if (self.is_floating_point()) {
      found("adds in any order (" + name_ + ")");
    }
    cpu_.callBoxed(op, keys, stack);
  }

 private:
  const std::string name_;
  const Fault fault_;
  c10::SafeKernelFunction cpu_;
};

// Those whose result is on the host, or as long as values say; and those that add by atomics, or scan in parts that come as they come.
constexpr std::pair<const char*, Fault> kWatched[] = {
    {"_local_scalar_dense", Fault::Waits}, {"nonzero", Fault::Waits}, {"masked_select", Fault::Waits}, {"equal", Fault::Waits},
    {"bincount", Fault::Waits}, {"_unique2", Fault::Waits}, {"unique_dim", Fault::Waits}, {"unique_consecutive", Fault::Waits},
    {"unique_dim_consecutive", Fault::Waits}, {"cumsum", Fault::UnorderedSum}, {"cumsum_", Fault::UnorderedSum}, {"index_add", Fault::UnorderedSum},
    {"index_add_", Fault::UnorderedSum}, {"scatter_add", Fault::UnorderedSum}, {"scatter_add_", Fault::UnorderedSum}};

void watch() {
  static auto* const library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CPU, __FILE__, __LINE__);
  for (const auto& [name, fault] : kWatched) {
    const std::string full = std::string("aten::") + name;
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "");
    auto cpu = op.getComputedKernelForDispatchKey(DispatchKey::CPU);
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Watch>(full, fault, std::move(cpu))));
  }
}

/// Torch warns of kernels that are replaced: here they are meant to be.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<std::string> take_over() {
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard quiet(&none);
  // Never freed: the kernels stay for as long as the process runs.
  static auto* const library = new torch::Library(torch::Library::IMPL, "xsoftmax", DispatchKey::CPU, __FILE__, __LINE__);
  watch();
  std::vector<std::string> neither;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!name.name.starts_with("xsoftmax::") || !op.has_value()) {
      continue;
    }
    const bool on_cpu = op->hasKernelForDispatchKey(DispatchKey::CPU), anywhere = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    const bool on_cuda = op->hasKernelForDispatchKey(DispatchKey::CUDA);
    if (!on_cpu && !on_cuda && !anywhere) {
      continue; // made of other operators
    }
    const std::string stem = name.name.substr(name.name.find("::") + 2);
    if (on_cuda || anywhere) {
      auto detour = std::make_unique<Detour>(stem, on_cpu, op->getComputedKernelForDispatchKey(DispatchKey::CPU));
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

TORCH_LIBRARY_FRAGMENT(cuda_emulator, m) {
  m.def("take_over() -> str[]", take_over);
  m.def("findings() -> str[]", findings);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", mm_dtype);
  m.impl("mm.dtype_out", mm_dtype_out);
}
