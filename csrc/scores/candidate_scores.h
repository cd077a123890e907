#pragma once

#include "scores/row_gradient.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

// The contract of the op is in xsoftmax/ops.h.

namespace xsoftmax {

/// Shared by every kernel of the op and of its backward.
void check_candidate_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids);
void check_candidate_scores_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& private_ids,
                                     const std::optional<at::Tensor>& shared_ids, const std::optional<at::Tensor>& scale);

/// The gradients for those of the scores, grad [Q, P + S], times scale, [] or [Q] and of its dtype, where given; by the dispatcher. A gradient of a score that
/// is 0 stays 0, whatever it is times. output_mask: input, weight, bias. dense: rows [0], values [N, D] and bias values [N], for each row of the table.
RowGradients candidate_scores_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& private_ids,
                                       const std::optional<at::Tensor>& shared_ids, std::array<bool, 3> output_mask,
                                       const std::optional<at::Tensor>& scale = std::nullopt, bool dense = false);

/// The same as one number for each query, [Q].
at::Tensor of_queries(const at::Tensor& scale, const c10::SymInt& queries);

/// Q P + S, the rows of a row-sparse gradient.
c10::SymInt candidate_rows(const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids);

/// The composites in ATen calls: any device, and the oracle of the tests.
at::Tensor candidate_scores_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                      const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids,
                                      std::optional<bool> sparse_grad);
RowGradients candidate_scores_backward_reference(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                 const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids,
                                                 std::array<bool, 3> output_mask, const std::optional<at::Tensor>& scale, bool dense);

} // namespace xsoftmax
