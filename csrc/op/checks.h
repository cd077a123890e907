#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

// Argument checks. Every op checks its arguments in one function that all its kernels call.
// Messages read `op: expected ..., got ...`. Wrong shapes and values raise ValueError, wrong dtypes
// and devices TypeError, and class ids out of range IndexError (RuntimeError in TorchScript). All
// checks accept symbolic and meta tensors, except class_ids and offsets, which read values and are
// for CPU kernels.

namespace xsoftmax {

inline constexpr double kInfinite = std::numeric_limits<double>::infinity();

} // namespace xsoftmax

namespace xsoftmax::check {

/// Checks that `arg` is a defined, dense tensor: not sparse, quantized or nested. Operators are
/// already guarded (csrc/op/guards.cpp); methods of classes need this check.
void strided(const char* op, const char* arg, const at::Tensor& tensor);
/// Checks that `arg` has `dim` dimensions, and applies strided() and in_memory().
void dim(const char* op, const char* arg, const at::Tensor& tensor, int64_t dim);
/// Checks that `arg` is not a huge expanded view: more than 2^31 elements on a storage of less than
/// 1/16 as many, which would take too long to read. Only CPU tensors are checked.
void in_memory(const char* op, const char* arg, const at::Tensor& tensor);
/// Checks that dimension `axis` of `arg` has `size` elements. `why` says in the message where that
/// size comes from.
void size(const char* op, const char* arg, const at::Tensor& tensor, int64_t axis,
          const c10::SymInt& size, const char* why);
/// Returns the dtype's name in Python, such as "float32".
const char* name(at::ScalarType dtype);
/// Checks that `arg` is dense and has this dtype.
void dtype(const char* op, const char* arg, const at::Tensor& tensor, at::ScalarType dtype);
/// Checks that `arg` is float32, float64, bfloat16 or float16, and applies strided() and
/// in_memory().
void floating(const char* op, const char* arg, const at::Tensor& tensor);
/// Checks that `arg` has the dtype of `reference`, which the message names `other`.
void same_dtype(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                const at::Tensor& reference);
/// Checks that `arg`, such as class ids or offsets, is int64.
void int64(const char* op, const char* arg, const at::Tensor& tensor);
/// Checks that `arg` is on the device of `reference`, which the message names `other`.
void same_device(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                 const at::Tensor& reference);
/// Checks that `input` [Q, D], `weight` [N, D] and, if given, `bias` [N] have one floating dtype
/// and one device.
void linear(const char* op, const at::Tensor& input, const at::Tensor& weight,
            const std::optional<at::Tensor>& bias);
/// Checks that an operator can write to the elements of `arg`, each once: that it is no negative or
/// conjugate view, that its elements have memory, and that no two share any.
void writable(const char* op, const char* arg, const at::Tensor& tensor);
/// Checks that every id is in [0, num_classes) or, if given, equals `ignore_index`. CPU tensors
/// only.
void class_ids(const char* op, const char* arg, const at::Tensor& ids, int64_t num_classes,
               std::optional<int64_t> ignore_index = std::nullopt);
/// Checks that `offsets` [Q + 1] starts at 0, never decreases and ends at `total`. CPU tensors
/// only.
void offsets(const char* op, const char* arg, const at::Tensor& offsets, int64_t total);

} // namespace xsoftmax::check
