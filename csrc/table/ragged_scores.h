#pragma once

#include "table/candidate_scores.h"

// The contract of the operator is in xsoftmax/ops.h.

namespace xsoftmax {

void check_ragged_scores(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const at::Tensor& ids,
                         const at::Tensor& offsets);
void check_ragged_scores_backward(const at::Tensor& grad, const at::Tensor& input,
                                  const at::Tensor& weight, const at::Tensor& ids,
                                  const at::Tensor& offsets);

at::Tensor ragged_scores_reference(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias, const at::Tensor& ids,
                                   const at::Tensor& offsets, std::optional<bool> sparse_grad);
RowGradients ragged_scores_backward_reference(const at::Tensor& grad, const at::Tensor& input,
                                              const at::Tensor& weight, const at::Tensor& ids,
                                              const at::Tensor& offsets,
                                              std::array<bool, 3> output_mask);

} // namespace xsoftmax
