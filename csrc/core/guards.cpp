// What every operator of the library is kept from, whoever wrote it and whatever it checks itself:
//
// - tensors that are no plain memory (sparse, quantized, nested, MKL-DNN), which a composite for all devices would be called with as well;
// - writing to a tensor whose values are not what its memory holds (a negative or conjugate view), whose elements share memory, or that shares
//   memory with another argument.
//
// What writes has no derivative: it runs as if nothing recorded one, so a parameter that requires a gradient cannot stop it half-way.
//
// Tensors of the first kind, and negative and conjugate views, reach kernels of keys of their own, so that ordinary calls pay nothing; that
// of changed versions checks what is written to. They are registered here for all operators that the library has by then: this file's
// static objects are made after those of all others, which cmake/sources.cmake sees to.

#include "core/checks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;
using c10::DispatchKey;

/// Calls visit(argument, tensor) for the tensors of a call, those in lists as well.
template <typename Visit>
void for_tensors(const c10::OperatorHandle& op, torch::jit::Stack& stack, const Visit& visit) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
    if (value.isTensor() && value.toTensor().defined()) {
      visit(arguments[i], value.toTensor());
    } else if (value.isList()) { // of tensors, some of them perhaps none
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) {
          visit(arguments[i], element.toTensor());
        }
      }
    }
  }
}

/// Puts replacement(tensor) in the place of the tensors of a call, those in lists as well.
template <typename Replacement>
void replace_tensors(const c10::OperatorHandle& op, torch::jit::Stack& stack, const Replacement& replacement) {
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

bool written(const c10::Argument& argument) { return argument.alias_info() != nullptr && argument.alias_info()->isWrite(); }

std::string name_of(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.substr(name.find("::") + 2);
}

bool dense(const Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested(); }

void refuse_layout(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) { check::strided(name_of(op).c_str(), argument.name().c_str(), tensor); });
  TORCH_CHECK_TYPE(false, name_of(op), ": expected dense tensors, got one of another kind");
}

/// Negative and conjugate views are read by their values, and not written to.
void refuse_views(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    TORCH_CHECK_TYPE(!written(argument) || !(tensor.is_neg() || tensor.is_conj()), name_of(op), ": expected ", argument.name(),
                     ", which is written to, as it stands in memory, got a negative or conjugate view");
  });
  replace_tensors(op, *stack, [](const Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); });
  op.callBoxed(stack);
}

/// Tensors of zeros without memory, as forward derivatives make them, are read as zeros, and not written to.
void refuse_zeros(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    TORCH_CHECK_TYPE(!written(argument) || !tensor._is_zerotensor(), name_of(op), ": expected ", argument.name(),
                     ", which is written to, with memory for its elements, got a tensor of zeros without memory");
  });
  replace_tensors(op, *stack, [](const Tensor& tensor) { return tensor._is_zerotensor() ? tensor.clone() : tensor; });
  op.callBoxed(stack);
}

/// Whether no two elements share memory, as far as can be told from strides: of all but the strangest views it can.
bool apart(const Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.numel() < 2) {
    return true;
  }
  std::vector<int64_t> axes(tensor.dim());
  std::iota(axes.begin(), axes.end(), 0);
  std::sort(axes.begin(), axes.end(), [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
  int64_t reach = 0; // from the first element of what the axes so far span to its last
  for (const int64_t axis : axes) {
    if (tensor.size(axis) > 1) {
      if (tensor.stride(axis) <= reach) {
        return false;
      }
      reach += tensor.stride(axis) * (tensor.size(axis) - 1);
    }
  }
  return true;
}

/// Where a tensor's elements lie.
struct Extent {
  const char *begin, *end;
  const Tensor* tensor;
  const c10::Argument* argument;
};

/// Adds that of a tensor that is plain memory.
void add_extent(std::vector<Extent>& extents, const c10::Argument& argument, const Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!dense(tensor) || impl->is_python_dispatch() || !tensor.has_storage() || impl->has_symbolic_sizes_strides() || tensor.numel() == 0 || tensor.is_meta() ||
      tensor.unsafeGetTensorImpl()->storage().data() == nullptr) {
    return;
  }
  const char* begin = static_cast<const char*>(impl->storage().data()) + tensor.storage_offset() * int64_t(tensor.element_size());
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    last += (tensor.size(axis) - 1) * tensor.stride(axis);
  }
  extents.push_back({begin, begin + (last + 1) * int64_t(tensor.element_size()), &tensor, &argument});
}

/// That what is written to shares no memory with another argument, as far as can be told without looking at each element.
void check_shared_memory(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  std::vector<Extent> extents;
  for_tensors(op, stack, [&](const c10::Argument& argument, const Tensor& tensor) { add_extent(extents, argument, tensor); });
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < extents.size(); ++i) {
    for (size_t j = i + 1; j < extents.size() && extents[j].begin < extents[i].end; ++j) {
      const bool first = written(*extents[i].argument), second = written(*extents[j].argument);
      if (!first && !second) {
        continue;
      }
      const at::MemOverlapStatus status = at::get_overlap_status(*extents[i].tensor, *extents[j].tensor);
      TORCH_CHECK_VALUE(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, name_of(op), ": expected ",
                        extents[first ? i : j].argument->name(), ", which is written to, with memory that no other tensor shares, got that of ",
                        extents[first ? j : i].argument->name());
    }
  }
}

/// Checks what is written to, and raises its version, so that autograd notices a backward pass through a value that a step has overwritten.
void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    TORCH_CHECK_VALUE(!written(argument) || !dense(tensor) || apart(tensor), name_of(op), ": expected ", argument.name(),
                      ", which is written to, with memory for each element, got one whose elements share memory (shape ", tensor.sym_sizes(), ", strides ",
                      tensor.sym_strides(), ")");
  });
  for_tensors(op, *stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    TORCH_CHECK_TYPE(!written(argument) || !tensor.is_inference() || c10::InferenceMode::is_enabled(), name_of(op), ": expected ", argument.name(),
                     ", which is written to, as a tensor that may be written to here, got one made under inference_mode");
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

class Guards {
 public:
  Guards() {
    std::vector<c10::OperatorHandle> all, writing, composite;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (name.name.starts_with("xsoftmax::") && op.has_value()) {
        const auto& arguments = op->schema().arguments();
        all.push_back(*op);
        if (op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
          composite.push_back(*op);
        }
        if (std::any_of(arguments.begin(), arguments.end(), written)) {
          writing.push_back(*op);
        }
      }
    }
    for (const DispatchKey key :
         {DispatchKey::SparseCPU, DispatchKey::SparseCUDA, DispatchKey::SparseMeta, DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrCUDA,
          DispatchKey::SparseCsrMeta, DispatchKey::QuantizedCPU, DispatchKey::QuantizedCUDA, DispatchKey::QuantizedMeta, DispatchKey::NestedTensorCPU,
          DispatchKey::NestedTensorCUDA, DispatchKey::NestedTensorMeta, DispatchKey::MkldnnCPU}) {
      auto refusing = all; // an operator that takes such tensors has a kernel for them, as the steps of optimizers have for sparse gradients
      std::erase_if(refusing, [key](const auto& op) { return op.hasKernelForDispatchKey(key); });
      add<&refuse_layout>(key, refusing);
    }
    add<&refuse_layout>(DispatchKey::AutogradOther, composite); // which their kernels leave open beside those
    add<&refuse_layout>(DispatchKey::AutogradNestedTensor, all);
    add<&refuse_views>(DispatchKey::Negative, writing);
    add<&refuse_views>(DispatchKey::Conjugate, writing);
    add<&refuse_zeros>(DispatchKey::ZeroTensor, writing);
    // An operator that says itself when it has written, as settle_ does, keeps its kernel.
    std::erase_if(writing, [](const auto& op) { return op.hasKernelForDispatchKey(DispatchKey::ADInplaceOrView); });
    add<&bump_versions>(DispatchKey::ADInplaceOrView, writing);
  }

 private:
  template <auto kernel>
  void add(DispatchKey key, const std::vector<c10::OperatorHandle>& ops) {
    auto& library = *libraries_.emplace_back(std::make_unique<torch::Library>(torch::Library::IMPL, "xsoftmax", key, __FILE__, __LINE__));
    for (const c10::OperatorHandle& op : ops) {
      library.impl(name_of(op).c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
    }
  }

  std::vector<std::unique_ptr<torch::Library>> libraries_;
};

const Guards guards;

} // namespace
} // namespace xsoftmax
