#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace xsoftmax {

// linear_topk: the k most probable classes of each query under the softmax of a linear layer, its logits [Q, N] never in memory.
//
//     F.log_softmax(F.linear(input, weight, bias), -1).topk(k)
//
// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; 0 <= k <= N. Returns values [Q, k], log-probabilities in float32
// (float64 for float64 inputs), falling, and indices [Q, k]; of equal logits the lower class comes first. A query whose softmax is no
// number (a NaN or +inf among its logits, or -inf only) has values of NaN at classes 0 .. k - 1. Neither output takes part in
// autograd.

using TopK = std::tuple<at::Tensor, at::Tensor>; ///< values, indices

/// Shared by every kernel of the op.
void check_linear_topk(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const c10::SymInt& k);

/// The composite in ATen calls: any device, and the oracle of the tests.
TopK linear_topk_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymInt k);

} // namespace xsoftmax
