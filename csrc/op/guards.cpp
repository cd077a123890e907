#include "op/operators.h"

#include "op/checks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;
using c10::DispatchKey;

/// Calls visit(argument, tensor) for each tensor argument of a call, including those in lists.
template <typename Visit>
void for_tensors(const c10::OperatorHandle& op, torch::jit::Stack& stack, const Visit& visit) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
    if (value.isTensor() && value.toTensor().defined()) {
      visit(arguments[i], value.toTensor());
    } else if (value.isList()) { // elements may be None
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) {
          visit(arguments[i], element.toTensor());
        }
      }
    }
  }
}

/// Replaces each tensor argument of a call, including those in lists, by replacement(tensor).
template <typename Replacement>
void replace_tensors(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                     const Replacement& replacement) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = torch::jit::peek(stack, i, count);
    if (value.isTensor() && value.toTensor().defined()) {
      value = replacement(value.toTensor());
    } else if (value.isList()) {
      c10::impl::GenericList replaced(value.toList().elementType());
      for (const c10::IValue& element : value.toListRef()) {
        const bool tensor = element.isTensor() && element.toTensor().defined();
        replaced.push_back(tensor ? c10::IValue(replacement(element.toTensor())) : element);
      }
      value = replaced;
    }
  }
}

/// Whether the operator writes to this argument.
bool written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Returns the name without its namespace; valid as long as the operator.
const char* name_of(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.c_str() + name.find("::") + 2;
}

bool dense(const Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested();
}

void check_written(const c10::OperatorHandle& op, const c10::Argument& argument,
                   const Tensor& tensor) {
  if (written(argument) && dense(tensor)) {
    check::writable(name_of(op), argument.name().c_str(), tensor);
  }
}

void refuse_layout(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    check::strided(name_of(op), argument.name().c_str(), tensor);
  });
  TORCH_CHECK_TYPE(false, name_of(op), ": expected dense tensors, got one of another kind");
}

/// Resolves negative and conjugate views, and raises TypeError if the operator would write to one.
void refuse_views(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    check_written(op, argument, tensor);
  });
  replace_tensors(op, *stack,
                  [](const Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); });
  op.callBoxed(stack);
}

/// Materialises zero tensors without memory, which forward-mode autograd creates, and raises
/// TypeError if the operator would write to one.
void refuse_zeros(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    check_written(op, argument, tensor);
  });
  replace_tensors(op, *stack, [](const Tensor& tensor) {
    return tensor._is_zerotensor() ? tensor.clone() : tensor;
  });
  op.callBoxed(stack);
}

/// The memory range of a tensor's elements.
struct Extent {
  const char *begin, *end;
  const Tensor* tensor;
  const c10::Argument* argument;
};

/// Appends the memory range of a dense tensor; skips tensors without memory of their own.
void add_extent(std::vector<Extent>& extents, const c10::Argument& argument, const Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!dense(tensor) || impl->is_python_dispatch() || !tensor.has_storage() ||
      impl->has_symbolic_sizes_strides() || tensor.numel() == 0 || tensor.is_meta() ||
      tensor.unsafeGetTensorImpl()->storage().data() == nullptr) {
    return;
  }
  const char* begin = static_cast<const char*>(impl->storage().data()) +
      tensor.storage_offset() * int64_t(tensor.element_size());
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    last += (tensor.size(axis) - 1) * tensor.stride(axis);
  }
  extents.push_back(
      {begin, begin + (last + 1) * int64_t(tensor.element_size()), &tensor, &argument});
}

/// Raises ValueError if an argument that the operator writes to shares memory with another
/// argument. Pairs whose overlap cannot be determined from their strides pass.
void check_shared_memory(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  std::vector<Extent> extents;
  for_tensors(op, stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    add_extent(extents, argument, tensor);
  });
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < extents.size(); ++i) {
    for (size_t j = i + 1; j < extents.size() && extents[j].begin < extents[i].end; ++j) {
      const bool first = written(*extents[i].argument), second = written(*extents[j].argument);
      if (!first && !second) {
        continue;
      }
      const at::MemOverlapStatus status =
          at::get_overlap_status(*extents[i].tensor, *extents[j].tensor);
      TORCH_CHECK_VALUE(
          status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial,
          name_of(op), ": expected ", extents[first ? i : j].argument->name(),
          ", which is written to, with memory that no other tensor shares, got that of ",
          extents[first ? j : i].argument->name());
    }
  }
}

/// Checks the arguments that the operator writes to and increments their version counters, so that
/// autograd detects a backward pass through an overwritten value.
void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    check_written(op, argument, tensor);
  });
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    TORCH_CHECK_TYPE(
        !written(argument) || !tensor.is_inference() || c10::InferenceMode::is_enabled(),
        name_of(op), ": expected ", argument.name(),
        ", which is written to, as a tensor that is writable outside inference_mode, got one made "
        "under inference_mode");
  });
  check_shared_memory(op, *stack);
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    if (written(argument)) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  });
  const at::NoGradGuard no_grad;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

/// Collects the library's operators as they are defined.
class NewOperators final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    if (defined != nullptr && op.operator_name().name.starts_with("xsoftmax::")) {
      defined->push_back(op);
    }
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {}

  static inline std::vector<c10::OperatorHandle>* defined = nullptr; ///< while a file defines some
};

constexpr DispatchKey kOtherLayouts[] = {
    DispatchKey::SparseCPU,       DispatchKey::SparseCUDA,       DispatchKey::SparseMeta,
    DispatchKey::SparseCsrCPU,    DispatchKey::SparseCsrCUDA,    DispatchKey::SparseCsrMeta,
    DispatchKey::QuantizedCPU,    DispatchKey::QuantizedCUDA,    DispatchKey::QuantizedMeta,
    DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorCUDA, DispatchKey::NestedTensorMeta,
    DispatchKey::MkldnnCPU};

template <auto kernel>
void guard(torch::Library& m, const c10::OperatorHandle& op, DispatchKey key) {
  m.impl(name_of(op), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<kernel>()));
}

void guard_operator(torch::Library& m, const c10::OperatorHandle& op,
                    std::span<const OwnKernel> own_kernels) {
  const auto& arguments = op.schema().arguments();
  const std::string name = name_of(op);
  const auto has = [&](DispatchKey key) {
    return std::find(own_kernels.begin(), own_kernels.end(), OwnKernel(name, key)) !=
        own_kernels.end();
  };
  for (const DispatchKey key : kOtherLayouts) {
    if (!has(key)) {
      guard<&refuse_layout>(m, op, key);
    }
  }
  if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
    // Such kernels would also run for layouts without a key above.
    guard<&refuse_layout>(m, op, DispatchKey::AutogradOther);
  }
  guard<&refuse_layout>(m, op, DispatchKey::AutogradNestedTensor);
  if (std::any_of(arguments.begin(), arguments.end(), written)) {
    guard<&refuse_views>(m, op, DispatchKey::Negative);
    guard<&refuse_views>(m, op, DispatchKey::Conjugate);
    guard<&refuse_zeros>(m, op, DispatchKey::ZeroTensor);
    if (!has(DispatchKey::ADInplaceOrView)) {
      guard<&bump_versions>(m, op, DispatchKey::ADInplaceOrView);
    }
  }
}

} // namespace

void define_guarded(torch::Library& m, void (*define)(torch::Library&),
                    std::span<const OwnKernel> own_kernels) {
  // Added once and never removed: a new listener is first notified of every operator of torch.
  // `used` keeps the pointer, which nothing reads, so that the leak checker finds it.
  [[gnu::used]] static auto* const listening = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<NewOperators>()));
  (void)listening;
  std::vector<c10::OperatorHandle> defined;
  NewOperators::defined = &defined;
  define(m);
  NewOperators::defined = nullptr;
  for (const c10::OperatorHandle& op : defined) {
    guard_operator(m, op, own_kernels);
  }
}

} // namespace xsoftmax
