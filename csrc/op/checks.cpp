#include "op/checks.h"
#include "op/host_reads.h"
#include "op/shape_checks.h"

#include "op/optional.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>

namespace xsoftmax::check {
namespace {

// Returns the index of element number `flat` of a contiguous tensor as text, such as "[3, 7]".
std::string position(const at::Tensor& tensor, int64_t flat) {
  std::vector<int64_t> index(tensor.dim());
  for (int64_t axis = tensor.dim() - 1; axis >= 0; --axis) {
    index[axis] = flat % tensor.size(axis);
    flat /= tensor.size(axis);
  }
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < index.size(); ++i) {
    out << (i == 0 ? "" : ", ") << index[i];
  }
  out << ']';
  return out.str();
}

// Whether no two elements share memory, judged by the strides. May return false for unusual views
// that have no overlap.
bool apart(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.numel() < 2) {
    return true;
  }
  std::vector<int64_t> axes(tensor.dim());
  std::iota(axes.begin(), axes.end(), 0);
  std::sort(axes.begin(), axes.end(),
            [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
  int64_t reach = 0; // offset of the last element that the axes so far can address
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

} // namespace

void strided(const char* op, const char* arg, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": expected ", arg, " as a tensor, got None");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": expected ", arg,
                   " as a dense (strided) tensor, got layout ", tensor.layout());
  TORCH_CHECK_TYPE(!tensor.is_quantized() && !tensor.is_nested(), op, ": expected ", arg,
                   " as a dense (strided) tensor, got a ",
                   tensor.is_nested() ? "nested" : "quantized", " one");
}

void dim(const char* op, const char* arg, const at::Tensor& tensor, int64_t dim) {
  strided(op, arg, tensor);
  TORCH_CHECK_VALUE(tensor.dim() == dim, op, ": expected ", arg, " with ", dim, " dimension",
                    dim == 1 ? "" : "s", ", got shape ", tensor.sym_sizes());
  in_memory(op, arg, tensor);
}

void in_memory(const char* op, const char* arg, const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.has_storage() ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
      tensor.numel() <= int64_t(1) << 31) {
    return;
  }
  const double elements = double(tensor.storage().nbytes()) / double(tensor.element_size());
  TORCH_CHECK_VALUE(
      tensor.unsafeGetTensorImpl()->is_python_dispatch() || elements * 16 >= double(tensor.numel()),
      op, ": expected ", arg, " with memory for its elements, got a view of ", tensor.numel(),
      " elements (shape ", tensor.sizes(), ") on memory of ", int64_t(elements));
}

void size(const char* op, const char* arg, const at::Tensor& tensor, int64_t axis,
          const c10::SymInt& size, const char* why) {
  TORCH_CHECK_VALUE(tensor.sym_size(axis) == size, op, ": expected ", arg, " with size ", size,
                    " (", why, ") in dimension ", axis, ", got shape ", tensor.sym_sizes());
}

const char* name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kHalf: return "float16";
    case at::kLong: return "int64";
    case at::kInt: return "int32";
    case at::kShort: return "int16";
    case at::kChar: return "int8";
    case at::kByte: return "uint8";
    case at::kBFloat16: return "bfloat16";
    case at::kBool: return "bool";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: return c10::toString(dtype);
  }
}

void dtype(const char* op, const char* arg, const at::Tensor& tensor, at::ScalarType dtype) {
  strided(op, arg, tensor);
  const at::ScalarType found = tensor.scalar_type();
  if (found == dtype) [[likely]] {
    return;
  }
  // Suggest .long() for integers of another width and for ids that numpy or pandas turned into
  // floats, but not for bools: a mask is not a list of ids.
  const bool casts = dtype == at::kLong && found != at::kBool && !at::isComplexType(found);
  const bool is_name = std::string_view(arg).find(' ') == std::string_view::npos;
  TORCH_CHECK_TYPE(
      false, op, ": expected ", arg, " of dtype ", name(dtype), ", got ", name(found),
      casts ? std::string(": use ") + (is_name ? arg : "") + ".long()" : std::string());
}

void floating(const char* op, const char* arg, const at::Tensor& tensor) {
  strided(op, arg, tensor);
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      op, ": expected ", arg, " of dtype float32, float64, bfloat16 or float16, got ", name(dtype));
  in_memory(op, arg, tensor);
}

void same_dtype(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                const at::Tensor& reference) {
  const at::ScalarType found = tensor.scalar_type(), wanted = reference.scalar_type();
  if (found == wanted) [[likely]] {
    return;
  }
  // A table and the output of an encoder: the user may want to cast either one.
  const bool is_table = std::string_view(arg) == "weight" && std::string_view(other) == "input";
  TORCH_CHECK_TYPE(!is_table, op, ": expected input of the table's dtype ", name(found), ", got ",
                   name(wanted), ": cast the input, input.to(torch.", name(found),
                   "), or call loss.to(torch.", name(wanted), ")");
  TORCH_CHECK_TYPE(false, op, ": expected ", arg, " of ", other, "'s dtype ", name(wanted),
                   ", got ", name(found));
}

void int64(const char* op, const char* arg, const at::Tensor& tensor) {
  dtype(op, arg, tensor, at::kLong);
}

void same_device(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                 const at::Tensor& reference) {
  TORCH_CHECK_TYPE(tensor.defined() && reference.defined(), op, ": expected ",
                   tensor.defined() ? other : arg, " as a tensor, got None");
  TORCH_CHECK_TYPE(tensor.device() == reference.device(), op, ": expected ", arg, " on ", other,
                   "'s device ", reference.device(), ", got ", tensor.device());
}

void same_shape(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                const at::Tensor& reference) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == reference.sym_sizes(), op, ": expected ", arg,
                    " of the shape of ", other, ", ", reference.sym_sizes(), ", got ",
                    tensor.sym_sizes());
}

void broadcasts(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                const at::Tensor& reference) {
  bool fits = true;
  for (int64_t axis = 1; axis <= std::min(tensor.dim(), reference.dim()); ++axis) {
    const c10::SymInt size = tensor.sym_size(-axis), other_size = reference.sym_size(-axis);
    fits = fits && (size == other_size || size == 1 || other_size == 1);
  }
  TORCH_CHECK_VALUE(fits, op, ": expected ", arg, " of a shape that broadcasts with that of ",
                    other, ", ", reference.sym_sizes(), ", got ", tensor.sym_sizes());
}

at::Tensor readable(const at::Tensor& tensor) {
  if (!tensor._is_zerotensor() && !tensor.is_neg() && tensor.is_contiguous()) {
    return tensor;
  }
  return (tensor._is_zerotensor() ? tensor.clone() : tensor.resolve_neg()).contiguous();
}

bool is_plain(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda()) && !at::isTensorSubclassLike(tensor) &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

namespace { std::atomic<bool> host_readable = true; } // namespace

void let_host_read(bool reads) { host_readable = reads; }
bool host_can_read() { return host_readable.load(std::memory_order_relaxed); }

namespace {

bool is_plain_on_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() && is_plain(tensor) && !tensor._is_zerotensor() && !tensor.is_neg();
}

} // namespace

bool can_read(const at::Tensor& tensor) { return host_can_read() && is_plain_on_cpu(tensor); }

bool has_gradient(const at::Tensor& tensor) {
  return tensor.requires_grad() || tensor._fw_grad(0).defined();
}

// Reads CPU scalars directly even if host_can_read() is false: modules keep these scalars on the
// CPU.
int64_t int64_item(const at::Tensor& tensor) {
  return is_plain_on_cpu(tensor) ? *tensor.const_data_ptr<int64_t>() : tensor.item<int64_t>();
}

void add_to_item(const at::Tensor& tensor, int64_t amount) {
  if (!can_read(tensor)) {
    tensor.add_(amount);
    return;
  }
  *tensor.mutable_data_ptr<int64_t>() += amount;
  tensor.unsafeGetTensorImpl()->bump_version();
}

void strided_tensors(const char* op,
                     std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors) {
  for (const auto& [name, tensor] : tensors) {
    strided(op, name, *tensor);
  }
}

void linear(const char* op, const at::Tensor& input, const at::Tensor& weight,
            const std::optional<at::Tensor>& bias) {
  dim(op, "input", input, 2);
  dim(op, "weight", weight, 2);
  floating(op, "input", input);
  same_dtype(op, "weight", weight, "input", input);
  same_device(op, "weight", weight, "input", input);
  size(op, "weight", weight, 1, input.sym_size(1), "the width of input");
  if (is_defined(bias)) {
    dim(op, "bias", *bias, 1);
    same_dtype(op, "bias", *bias, "input", input);
    same_device(op, "bias", *bias, "input", input);
    size(op, "bias", *bias, 0, weight.sym_size(0), "the rows of weight");
  }
}

void writable(const char* op, const char* arg, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(!tensor.is_neg() && !tensor.is_conj(), op, ": expected ", arg,
                   ", which is written to, as a plain tensor, got a negative or conjugate view");
  TORCH_CHECK_TYPE(!tensor._is_zerotensor(), op, ": expected ", arg,
                   ", which is written to, with memory for its elements, got a zero tensor without "
                   "memory");
  TORCH_CHECK_VALUE(apart(tensor), op, ": expected ", arg,
                    ", which is written to, with separate memory for each element, got one whose "
                    "elements share memory (shape ",
                    tensor.sym_sizes(), ", strides ", tensor.sym_strides(), ")");
}

void class_ids(const char* op, const char* arg, const at::Tensor& ids, int64_t num_classes,
               std::optional<int64_t> ignore_index) {
  in_memory(op, arg, ids);
  const at::Tensor flat = readable(ids);
  const int64_t* id = flat.const_data_ptr<int64_t>();
  const int64_t count = flat.numel();
  for (int64_t i = 0; i < count; ++i) {
    // One unsigned comparison also catches negative ids.
    if (uint64_t(id[i]) >= uint64_t(num_classes) &&
        !(ignore_index.has_value() && id[i] == *ignore_index)) [[unlikely]] {
      TORCH_CHECK_INDEX(false, op, ": expected ", arg, " in [0, ", num_classes, ")",
                        !ignore_index.has_value() ? ""
                            : *ignore_index == -1 ? " or -1"
                                                  : " or ignore_index",
                        ", got ", id[i], " at ", position(flat, i));
    }
  }
}

void offsets(const char* op, const char* arg, const at::Tensor& offsets, int64_t total) {
  const at::Tensor flat = readable(offsets);
  const int64_t* offset = flat.const_data_ptr<int64_t>();
  const int64_t count = flat.numel();
  TORCH_CHECK_VALUE(offset[0] == 0, op, ": expected ", arg, "[0] to be 0, got ", offset[0]);
  bool decreases = false; // a first pass without branches; a second one only to report an error
  for (int64_t i = 1; i < count; ++i) {
    decreases |= offset[i] < offset[i - 1];
  }
  for (int64_t i = 1; decreases && i < count; ++i) {
    TORCH_CHECK_VALUE(offset[i] >= offset[i - 1], op, ": expected ", arg, " that never fall, got ",
                      offset[i], " after ", offset[i - 1], " at [", i, "]");
  }
  TORCH_CHECK_VALUE(offset[count - 1] == total, op, ": expected ", arg, " that end at ", total,
                    " (the number of ids), got ", offset[count - 1]);
}

} // namespace xsoftmax::check
