#pragma once

#include <xsoftmax/loss_options.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// The contract of the op is in xsoftmax/ops.h.
//
// Works through the classes in blocks, forward and backward: the forward pass keeps the largest logit and the log of the sum of
// e^(logit - largest) of each query (`normalizer` [2, Q]), the backward pass computes the logits of a block again and turns them into
// their gradient. The logits of the first classes are kept instead (`saved_logits`, without bias, or with it where the options transform
// them), as many as fit into a fixed number of bytes: a small table needs no product twice.
//
// Where the gradient that reaches the loss is known beforehand but for a factor, as it is for a mean or a sum, float32 and float64
// gradients are made with the loss, and the backward pass only multiplies them by the factor. So are those of 16 bits on CUDA, where no product is then
// taken twice: kernels there work through rows of queries, as many as fit into a workspace of 512 MB, and keep no logits. The gradients stay float32 until the
// factor has come: those of float16 could lose what a gradient scaler's factor saves, and one pass turns them into 16 bits.

using CrossEntropyState = std::tuple<at::Tensor, at::Tensor, at::Tensor>;    ///< loss [Q], normalizer, saved_logits
using LinearGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>; ///< of input, weight, bias; no rows where not wanted

/// loss [Q], then LinearGradients in the dtype of the loss
using CrossEntropyWithGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// How many of the first classes have their logits saved for the backward pass.
c10::SymInt saved_classes(const c10::SymInt& queries, const c10::SymInt& classes, at::ScalarType dtype);

/// Shared by every kernel of the forward and the backward op. `options`: CrossEntropyOptions as text, which each returns parsed.
CrossEntropyOptions check_linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                               const at::Tensor& target, const std::optional<at::Tensor>& class_weight, std::string_view options);
CrossEntropyOptions check_linear_cross_entropy_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                        const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                                        const std::optional<at::Tensor>& class_weight, const at::Tensor& normalizer,
                                                        const at::Tensor& saved_logits, std::string_view options);
CrossEntropyOptions check_linear_cross_entropy_with_gradients(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                              const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                                              const std::optional<at::Tensor>& class_weight, std::string_view options);

/// The composites in ATen calls: any device, and the oracle of the tests. loss: of each query, weighted by the class weight of its
/// target, 0 where ignored. save_logits: whether a backward pass will follow.
CrossEntropyState linear_cross_entropy_forward_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                                         const at::Tensor& target, const std::optional<at::Tensor>& class_weight, std::string_view options,
                                                         bool save_logits);
/// grad [Q]: of the losses; output_mask: input, weight, bias.
LinearGradients linear_cross_entropy_backward_reference(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                        const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                                        const std::optional<at::Tensor>& class_weight, const at::Tensor& normalizer,
                                                        const at::Tensor& saved_logits, std::string_view options, std::array<bool, 3> output_mask);
/// The forward op, then the backward op.
CrossEntropyWithGradients linear_cross_entropy_with_gradients_composite(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                                        const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                                                        const std::optional<at::Tensor>& class_weight, std::string_view options,
                                                                        std::array<bool, 3> output_mask);

} // namespace xsoftmax
