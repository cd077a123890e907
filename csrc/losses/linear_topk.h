#pragma once

#include <xsoftmax/loss_options.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// The contract of the op is in xsoftmax/ops.h.

using TopK = std::tuple<at::Tensor, at::Tensor>; ///< values, indices

/// Shared by every kernel of the op. Returns `options`, LogitOptions as text, parsed.
LogitOptions check_linear_topk(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const c10::SymInt& k,
                               std::string_view options);

/// The composite in ATen calls: any device, and the oracle of the tests.
TopK linear_topk_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymInt k, std::string_view options);

} // namespace xsoftmax
