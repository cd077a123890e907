#pragma once

#include <xsoftmax/options.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// The contract of the operator is in xsoftmax/ops.h.

using TopK = std::tuple<at::Tensor, at::Tensor>; ///< (values, indices)

/// Checks the arguments; every kernel calls it. `options` is LogitOptions as text, returned parsed.
LogitOptions check_linear_topk(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, const c10::SymInt& k,
                               std::string_view options);

/// Composite in ATen calls: runs on any device and is the oracle of the tests.
TopK linear_topk_reference(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias, c10::SymInt k,
                           std::string_view options);

} // namespace xsoftmax
