#pragma once

#include "scores/row_gradient.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace xsoftmax {

// candidate_scores: rows of a class table against queries.
//
//     scores[:, :P] = (input[:, None, :] * weight[private_ids]).sum(-1) + bias[private_ids]
//     scores[:, P:] = input @ weight[shared_ids].T + bias[shared_ids]
//
// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; private_ids [Q, P] and shared_ids [S], either may be none:
// int64 in [0, N), repeats allowed. Returns [Q, P + S] in float32, or float64 for float64 inputs.
//
// Backward: grad_input [Q, D] and one row-sparse gradient for weight (and bias) with R = Q P + S rows whatever the ids are: rows
// [R] sorted, values [R, D]; the gradient of a class is summed into its first row, its other rows are zero. As the `.grad` of
// weight: sparse COO with these rows (sparse_grad), or dense.

/// Shared by every kernel of the op and of its backward.
void check_candidate_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids);
void check_candidate_scores_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                     const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids);

/// The composites in ATen calls: any device, and the oracle of the tests. output_mask: input, weight, bias.
at::Tensor candidate_scores_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                      const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids,
                                      bool sparse_grad);
RowGradients candidate_scores_backward_reference(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                 const std::optional<at::Tensor>& private_ids,
                                                 const std::optional<at::Tensor>& shared_ids, std::array<bool, 3> output_mask);

} // namespace xsoftmax
