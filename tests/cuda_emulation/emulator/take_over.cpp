// Sends CPU tensors down the path of CUDA tensors.
//
// cuda_emulator::take_over() -> str[]: makes each operator of xsoftmax run, for CPU tensors, what
// it runs for CUDA tensors: its CUDA kernel, emulated, or else its composite. Returns the operators
// that have neither.
//
// cuda_emulator::findings() -> Dict(str, int): returns "operator: what it did", and how often, for
// each operator that has since done something that it must not do on a device: wait for it, through
// an ATen operator that gives the host a value; copy its arguments to the CPU; or add in an order
// that is not fixed. It does not see what a kernel's host code reads from memory directly, nor what
// ATen's own backward does between operators of the library.
//
// cuda_emulator::unaligned_matrices() -> int: returns how many operands of 16-bit products had rows
// that are not aligned to 16 bytes.
//
// cuda_emulator::let_host_read(bool): with False, the library does not read values of CPU tensors,
// as if they were on a device.
//
// cuda_emulator::lies_on_host(Tensor): marks a tensor that stays on the host when the others move
// to a device. Reading its value does not wait.

#include "op/host_reads.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;

class RedirectedKernel;
thread_local std::vector<const RedirectedKernel*>
    running_operators; // running operators that take the CUDA path
thread_local bool in_cpu_kernel = false; // within a CPU kernel

std::mutex findings_mutex;
std::map<std::string, int64_t> findings_seen;
std::vector<at::Tensor> on_host; // kept alive, so that no other tensor reuses their memory

// Records a finding for the operator that runs as on CUDA.
void record_finding(const std::string& what);

/// A composite may copy its arguments to the CPU and call its operator again. Here that call looks
/// like the first one, but it must run the CPU kernel, as must everything inside.
class RedirectedKernel : public c10::OperatorKernel {
 public:
  /// cpu: the kernel that CPU tensors ran before: a CPU kernel, or else the composite.
  RedirectedKernel(std::string name, bool on_cpu, c10::SafeKernelFunction cpu)
      : name_(std::move(name)), on_cpu_(on_cpu), cpu_(std::move(cpu)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
    const bool is_nested = std::find(running_operators.begin(), running_operators.end(), this) !=
        running_operators.end();
    if (in_cpu_kernel || (is_nested && on_cpu_)) {
      if (!in_cpu_kernel) {
        record_finding("runs the CPU's kernel");
      }
      const auto restore =
          c10::make_scope_exit([before = in_cpu_kernel] { in_cpu_kernel = before; });
      in_cpu_kernel = true;
      cpu_.callBoxed(op, DispatchKeySet(DispatchKey::CPU), stack);
      return;
    }
    running_operators.push_back(this);
    const auto restore = c10::make_scope_exit([] { running_operators.pop_back(); });
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CUDA), stack);
  }

  const std::string& name() const { return name_; }

 private:
  const std::string name_;
  const bool on_cpu_;
  c10::SafeKernelFunction cpu_;
};

// Whether composites run instead of kernels: used by tests as the oracle, never in a user's step.
bool runs_composites() {
  static const auto impl = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("xsoftmax::get_impl", "")
                               .typed<std::string()>();
  return impl.call() == "reference";
}

void record_finding(const std::string& what) {
  if (!running_operators.empty() && !in_cpu_kernel && !runs_composites()) {
    const std::lock_guard lock(findings_mutex);
    ++findings_seen[running_operators.back()->name() + ": " + what];
  }
}

c10::Dict<std::string, int64_t> findings() {
  const std::lock_guard lock(findings_mutex);
  c10::Dict<std::string, int64_t> result;
  for (const auto& [finding, times] : findings_seen) {
    result.insert(finding, times);
  }
  return result;
}

void lies_on_host(const at::Tensor& tensor) {
  const std::lock_guard lock(findings_mutex);
  on_host.push_back(tensor);
}

bool is_on_host(const at::Tensor& tensor) {
  const std::lock_guard lock(findings_mutex);
  return std::any_of(on_host.begin(), on_host.end(),
                     [&](const at::Tensor& other) { return other.is_alias_of(tensor); });
}

enum class Fault { Synchronises, UnorderedSum };
using Stack = torch::jit::Stack;

struct WatchedOperator {
  const char* name;
  Fault fault;
  const char* overload = "";
  bool (*applies)(const Stack&) = [](const Stack&) { return true; }; // applies to these arguments
};

/// An ATen operator that is allowed on a CPU but not on CUDA.
class OperatorWatch : public c10::OperatorKernel {
 public:
  OperatorWatch(const WatchedOperator& watched, c10::SafeKernelFunction cpu)
      : watched_(watched), cpu_(std::move(cpu)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const at::Tensor& self = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
    const std::string name = std::string(" (aten::") + watched_.name + ")";
    if (watched_.fault == Fault::Synchronises && !is_on_host(self)) {
      record_finding("waits" + name);
    } else if (watched_.fault == Fault::UnorderedSum && self.is_floating_point() &&
               watched_.applies(*stack)) {
      record_finding("adds in any order" + name);
    }
    cpu_.callBoxed(op, keys, stack);
  }

 private:
  const WatchedOperator watched_;
  c10::SafeKernelFunction cpu_;
};

bool accumulates(const Stack& stack) { return stack.back().toBool(); }
bool rounds(const Stack& stack) { // minimum and maximum do not depend on the order
  const auto reduce = stack[stack.size() - 2].toStringView();
  return reduce != "amax" && reduce != "amin";
}

// Operators whose result is on the host or whose size depends on values, and operators that add
// with atomics or scan in parts that arrive in any order. Accumulating index_put_ and
// embedding_dense_backward are not listed: on CUDA they sort first and add in that order.
// repeat_interleave is not listed either: if it needs the size, it also reads a value here.
const WatchedOperator kWatched[] = {{"_local_scalar_dense", Fault::Synchronises},
                                    {"nonzero", Fault::Synchronises},
                                    {"masked_select", Fault::Synchronises},
                                    {"equal", Fault::Synchronises},
                                    {"bincount", Fault::Synchronises},
                                    {"_unique2", Fault::Synchronises},
                                    {"unique_dim", Fault::Synchronises},
                                    {"unique_consecutive", Fault::Synchronises},
                                    {"unique_dim_consecutive", Fault::Synchronises},
                                    {"cumsum", Fault::UnorderedSum},
                                    {"cumsum_", Fault::UnorderedSum},
                                    {"index_add", Fault::UnorderedSum},
                                    {"index_add_", Fault::UnorderedSum},
                                    {"scatter_add", Fault::UnorderedSum},
                                    {"scatter_add_", Fault::UnorderedSum},
                                    {"scatter_reduce", Fault::UnorderedSum, "two", rounds},
                                    {"scatter_reduce_", Fault::UnorderedSum, "two", rounds},
                                    {"put_", Fault::UnorderedSum, "", accumulates}};

void watch() {
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CPU, __FILE__, __LINE__);
  for (const WatchedOperator& watched : kWatched) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        (std::string("aten::") + watched.name).c_str(), watched.overload);
    auto cpu = op.getComputedKernelForDispatchKey(DispatchKey::CPU);
    const std::string overload = watched.overload,
                      name = watched.name + (overload.empty() ? "" : "." + overload);
    library->impl(name.c_str(),
                  torch::CppFunction::makeFromBoxedFunctor(
                      std::make_unique<OperatorWatch>(watched, std::move(cpu))));
  }
}

/// Suppresses torch's warnings about replaced kernels, which are intended here.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<std::string> take_over() {
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard warning_guard(&none);
  // Never freed: the kernels are needed as long as the process runs.
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "xsoftmax", DispatchKey::CPU, __FILE__, __LINE__);
  watch();
  std::vector<std::string> without_kernel;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!name.name.starts_with("xsoftmax::") || !op.has_value()) {
      continue;
    }
    const bool on_cpu = op->hasKernelForDispatchKey(DispatchKey::CPU),
               has_composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    const bool on_cuda = op->hasKernelForDispatchKey(DispatchKey::CUDA);
    if (!on_cpu && !on_cuda && !has_composite) {
      continue; // composed of other operators
    }
    const std::string stem = name.name.substr(name.name.find("::") + 2);
    if (on_cuda || has_composite) {
      auto redirected = std::make_unique<RedirectedKernel>(
          stem, on_cpu, op->getComputedKernelForDispatchKey(DispatchKey::CPU));
      library->impl(stem.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(redirected)));
    } else {
      without_kernel.push_back(stem);
    }
  }
  std::sort(without_kernel.begin(), without_kernel.end());
  return without_kernel;
}

/// Matrices of 16-bit products whose rows are not aligned to 16 bytes, which fast kernels need.
std::atomic<int64_t> unaligned = 0;
void note_alignment(const at::Tensor& matrix) {
  const int64_t row = matrix.stride(0) == 1 ? matrix.stride(1) : matrix.stride(0);
  unaligned += matrix.numel() > 0 &&
      (row * int64_t(matrix.element_size()) % 16 != 0 ||
       reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % 16 != 0);
}

/// ATen has 16-bit matrix products with a wider result only for CUDA.
at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  return at::mm(a.to(dtype), b.to(dtype));
}
at::Tensor& mm_dtype_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                         at::Tensor& out) {
  TORCH_CHECK(out.scalar_type() == dtype, "mm: expected out of dtype ", dtype, ", got ",
              out.scalar_type());
  for (const at::Tensor& matrix : {a, b, out}) {
    note_alignment(matrix);
  }
  return out.copy_(mm_dtype(a, b, dtype));
}
at::Tensor& addmm_dtype_out(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                            at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha,
                            at::Tensor& out) {
  TORCH_CHECK(self.scalar_type() == dtype && out.scalar_type() == dtype,
              "addmm: expected self and out of dtype ", dtype, ", got ", self.scalar_type(), ", ",
              out.scalar_type());
  for (const at::Tensor& matrix : {a, b, out}) {
    note_alignment(matrix);
  }
  return out.copy_(at::addmm(self, a.to(dtype), b.to(dtype), beta, alpha));
}

} // namespace

TORCH_LIBRARY_FRAGMENT(cuda_emulator, m) {
  m.def("take_over() -> str[]", take_over);
  m.def("let_host_read(bool reads) -> ()", xsoftmax::check::let_host_read);
  m.def("findings() -> Dict(str, int)", findings);
  m.def("unaligned_matrices() -> int", [] { return unaligned.load(); });
  m.def("lies_on_host(Tensor tensor) -> ()", lies_on_host);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", mm_dtype);
  m.impl("mm.dtype_out", mm_dtype_out);
  m.impl("addmm.dtype_out", addmm_dtype_out);
}
