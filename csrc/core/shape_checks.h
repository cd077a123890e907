#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <utility>

namespace xsoftmax::check {

/// `arg` has the shape of `reference`, the argument `other`. Works on symbolic and meta tensors.
void same_shape(const char* op, const char* arg, const at::Tensor& tensor, const char* other, const at::Tensor& reference);

/// `arg` broadcasts with `reference`: from the last dimension on, sizes are equal or one of them is 1.
void broadcasts(const char* op, const char* arg, const at::Tensor& tensor, const char* other, const at::Tensor& reference);

/// Returns `tensor` as it stands in memory when its values are read there: contiguous, and resolved where it is a
/// negative view or zeros without memory, as composites may be called with.
at::Tensor readable(const at::Tensor& tensor);

/// Whether `tensor` is memory of a CPU or a CUDA device, and nothing records or replaces the operators that are called.
bool is_plain(const at::Tensor& tensor);

/// Whether the program may look at the values of `tensor` here: it is plain memory of the CPU. False for zero tensors, which have no memory, and for
/// negated views, whose memory holds the negatives.
bool can_read(const at::Tensor& tensor);

/// Whether autograd, in either mode, looks for derivatives by `tensor`.
bool has_gradient(const at::Tensor& tensor);

/// The int64 number that `tensor` is. Waits for its device.
int64_t number_of(const at::Tensor& tensor);

/// Adds `amount` to the int64 number that `tensor` is.
void add_to_number(const at::Tensor& tensor, int64_t amount);
/// Every one of `tensors` is plain memory (check::strided). For what comes before an operator's own checks, as an
/// autograd::Function does, which takes no None.
void given_tensors(const char* op, std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors);

} // namespace xsoftmax::check
