#pragma once

#include <xsoftmax/options.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// The contract of the operator is in xsoftmax/ops.h.
//
// Forward and backward pass process the classes in blocks. The forward pass saves the largest logit
// and the log of the sum of e^(logit - largest) of each query (`normalizer` [2, Q]); the backward
// pass recomputes the logits of a block and turns them into their gradient. As many logits of the
// first classes as fit into a fixed number of bytes are saved instead of recomputed
// (`saved_logits`, without bias, or with it if the options transform the logits), so that a small
// table needs each product only once.
//
// If the gradient of each loss is known up to a common factor, as for a mean or a sum, the
// gradients are computed together with the loss, and the backward pass only multiplies them by the
// factor. This applies to float32 and float64, and on CUDA to 16-bit dtypes also. The CUDA kernels
// then compute each product only once: they process as many queries at a time as fit into the
// workspace (512 MB by default) together with the gradients, and save no logits. 16-bit gradients
// stay float32 until the factor is known, because float16 could underflow before a gradient
// scaler's factor is applied; one pass scales and casts them.

/// (loss [Q], normalizer, saved_logits)
using CrossEntropyState = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
/// The gradients of (input, weight, bias). Those that are not needed have 0 rows.
using LinearGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// (loss [Q], gradients of input, weight and bias), all in the dtype of the loss.
using CrossEntropyWithGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Returns the number of leading classes whose logits are saved for the backward pass.
c10::SymInt saved_classes(const c10::SymInt& queries, const c10::SymInt& classes,
                          at::ScalarType dtype);

/// Check the arguments of the operators; every kernel calls them. `options` is CrossEntropyOptions
/// as text; each function returns it parsed.
CrossEntropyOptions check_linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                               const std::optional<at::Tensor>& bias,
                                               const at::Tensor& target,
                                               const std::optional<at::Tensor>& class_weight,
                                               std::string_view options);
CrossEntropyOptions check_linear_cross_entropy_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& target,
    const std::optional<at::Tensor>& class_weight, const at::Tensor& normalizer,
    const at::Tensor& saved_logits, std::string_view options);
CrossEntropyOptions check_linear_cross_entropy_with_gradients(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& target,
    const std::optional<at::Tensor>& class_weight, std::string_view options);

/// Composites in ATen calls: they run on any device and are the oracle of the tests. The loss of a
/// query is multiplied by the class weight of its target, and 0 if ignored. save_logits: whether a
/// backward pass follows.
CrossEntropyState linear_cross_entropy_forward_reference(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& target, const std::optional<at::Tensor>& class_weight,
    std::string_view options, bool save_logits);
/// grad [Q]: gradient of the losses. output_mask: whether to compute the gradients of input, weight
/// and bias.
LinearGradients linear_cross_entropy_backward_reference(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& target,
    const std::optional<at::Tensor>& class_weight, const at::Tensor& normalizer,
    const at::Tensor& saved_logits, std::string_view options, std::array<bool, 3> output_mask);
/// Calls the forward operator, then the backward operator.
CrossEntropyWithGradients linear_cross_entropy_with_gradients_composite(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& target,
    const std::optional<at::Tensor>& class_weight, std::string_view options,
    std::array<bool, 3> output_mask);

} // namespace xsoftmax
