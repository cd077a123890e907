#pragma once

#include "scores/candidate_scores.h"

namespace xsoftmax {

// ragged_scores: candidate_scores with a number of private candidates of its own for each query.
//
//     query = torch.repeat_interleave(torch.arange(Q), offsets.diff())
//     scores = (input[query] * weight[ids]).sum(-1) + bias[ids]
//
// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; ids [T] int64 in [0, N), those of query q at offsets[q] ..
// offsets[q + 1] - 1; offsets [Q + 1] int64 from 0 to T, never falling. Returns [T] in float32, or float64 for float64 inputs.
// Backward as that of candidate_scores, with R = T rows.

void check_ragged_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const at::Tensor& ids, const at::Tensor& offsets);
void check_ragged_scores_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& ids,
                                  const at::Tensor& offsets);

at::Tensor ragged_scores_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                   const at::Tensor& ids, const at::Tensor& offsets, bool sparse_grad);
RowGradients ragged_scores_backward_reference(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                              const at::Tensor& ids, const at::Tensor& offsets, std::array<bool, 3> output_mask);

} // namespace xsoftmax
