#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// Every op checks its input in one function that all its kernels call. Messages read `op: expected WHAT, got WHAT`. Shapes and values
// raise ValueError, dtypes and devices TypeError, class ids out of range IndexError (RuntimeError in TorchScript).
// All of these work on symbolic and meta tensors, except class_ids, which reads values and is for CPU kernels.

namespace xsoftmax::check {

/// `arg` is plain memory: neither sparse nor quantized nor nested. Operators are given no other (csrc/core/guards.cpp); methods of classes may be.
void strided(const char* op, const char* arg, const at::Tensor& tensor);
/// `arg` has `dim` dimensions and is in_memory.
void dim(const char* op, const char* arg, const at::Tensor& tensor, int64_t dim);
/// `arg` is no view that shows a little memory more than 2^31 times: reading it all would not end. CPU tensors only; others pass.
void in_memory(const char* op, const char* arg, const at::Tensor& tensor);
/// Dimension `axis` of `arg` has `size` elements; `why` names what the size comes from.
void size(const char* op, const char* arg, const at::Tensor& tensor, int64_t axis, const c10::SymInt& size, const char* why);
/// As torch names it in Python: "float32".
const char* name(at::ScalarType dtype);
void dtype(const char* op, const char* arg, const at::Tensor& tensor, at::ScalarType dtype);
/// float32, float64, bfloat16 or float16.
void floating(const char* op, const char* arg, const at::Tensor& tensor);
void same_dtype(const char* op, const char* arg, const at::Tensor& tensor, const char* other, const at::Tensor& reference);
/// Class ids and offsets are int64.
void int64(const char* op, const char* arg, const at::Tensor& tensor);
void same_device(const char* op, const char* arg, const at::Tensor& tensor, const char* other, const at::Tensor& reference);
/// `input` [Q, D] and `weight` [N, D] (+ `bias` [N]) of one floating dtype on one device.
void linear(const char* op, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
/// Every id lies in [0, num_classes). Where `ignore_index` is given, that value passes as well. CPU tensors only.
void class_ids(const char* op, const char* arg, const at::Tensor& ids, int64_t num_classes, std::optional<int64_t> ignore_index = std::nullopt);
/// `offsets` [Q + 1] starts at 0, never falls and ends at `total`. CPU tensors only.
void offsets(const char* op, const char* arg, const at::Tensor& offsets, int64_t total);

} // namespace xsoftmax::check
