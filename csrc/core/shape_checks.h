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
/// Every one of `tensors` is plain memory (check::strided). For what comes before an operator's own checks, as an
/// autograd::Function does, which takes no None.
void given_tensors(const char* op, std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors);

} // namespace xsoftmax::check
