#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <utility>

namespace xsoftmax::check {

/// Checks that `arg` has the shape of `reference`, which the message names `other`. Accepts
/// symbolic and meta tensors.
void same_shape(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                const at::Tensor& reference);

/// Checks that `arg` broadcasts with `reference`: counted from the last dimension, sizes are equal
/// or one of them is 1.
void broadcasts(const char* op, const char* arg, const at::Tensor& tensor, const char* other,
                const at::Tensor& reference);

/// Returns `tensor` in a form whose memory holds its values: contiguous, with negative views
/// resolved and zero tensors (which have no memory) materialised. Composites may receive either.
at::Tensor readable(const at::Tensor& tensor);

/// Whether `tensor` is an ordinary CPU or CUDA tensor: not a tensor subclass, and no dispatch mode
/// or tracer intercepts the operators that are called.
bool is_plain(const at::Tensor& tensor);

/// Whether the host may read the values of `tensor` directly from memory: is_plain() and on CPU.
/// False for zero tensors, which have no memory, and for negative views, whose memory holds the
/// negated values.
bool can_read(const at::Tensor& tensor);

/// Whether autograd, in forward or reverse mode, differentiates with respect to `tensor`.
bool has_gradient(const at::Tensor& tensor);

/// Returns the value of a 0-dim int64 tensor. Synchronises with its device.
int64_t int64_item(const at::Tensor& tensor);

/// Adds `amount` to a 0-dim int64 tensor, in place.
void add_to_item(const at::Tensor& tensor, int64_t amount);
/// Applies check::strided to each of `tensors`. For code that runs before the operator's own
/// checks, such as an autograd::Function, which does not accept None.
void strided_tensors(const char* op,
                     std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors);

} // namespace xsoftmax::check
