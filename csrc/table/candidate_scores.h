#pragma once

#include "table/row_gradient.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

// The contract of the operator is in xsoftmax/ops.h.

namespace xsoftmax {

/// Check the arguments of the operator and of its backward. Every kernel calls them.
void check_candidate_scores(const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& private_ids,
                            const std::optional<at::Tensor>& shared_ids);
void check_candidate_scores_backward(const at::Tensor& grad, const at::Tensor& input,
                                     const at::Tensor& weight,
                                     const std::optional<at::Tensor>& private_ids,
                                     const std::optional<at::Tensor>& shared_ids,
                                     const std::optional<at::Tensor>& scale);

/// Calls the backward operator through the dispatcher.
///
/// grad [Q, P + S]: the gradients of the scores. scale: [] or [Q], of grad's dtype; multiplies
/// grad. A query with scale 0 adds nothing, even if its grad or input is not finite; a gradient of
/// exactly 0 stays 0 with a finite input, even if scale is not finite. output_mask: whether
/// to compute the gradients of input, weight and bias. dense: returns values [N, D] and bias values
/// [N], one row per row of the table, and rows [0].
RowGradients candidate_scores_backward(const at::Tensor& grad, const at::Tensor& input,
                                       const at::Tensor& weight,
                                       const std::optional<at::Tensor>& private_ids,
                                       const std::optional<at::Tensor>& shared_ids,
                                       std::array<bool, 3> output_mask,
                                       const std::optional<at::Tensor>& scale = std::nullopt,
                                       bool dense = false);

/// Returns a scale, [] or [Q], expanded to [Q].
at::Tensor expand_to_queries(const at::Tensor& scale, const c10::SymInt& queries);

/// Returns Q P + S, the number of rows of the row-sparse gradient.
c10::SymInt candidate_rows(const std::optional<at::Tensor>& private_ids,
                           const std::optional<at::Tensor>& shared_ids);

/// Composites in ATen calls. They run on any device and are the oracle of the tests.
at::Tensor candidate_scores_reference(const at::Tensor& input, const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias,
                                      const std::optional<at::Tensor>& private_ids,
                                      const std::optional<at::Tensor>& shared_ids,
                                      std::optional<bool> sparse_grad);
RowGradients candidate_scores_backward_reference(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids,
    std::array<bool, 3> output_mask, const std::optional<at::Tensor>& scale, bool dense);

} // namespace xsoftmax
