#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

// Handles ignored targets on a device, where the host cannot see which they are: one launch each.

namespace xsoftmax {

// mean_shares(target int64 [Q], ignore_index, dtype) -> [Q]: what each loss counts in a mean over the targets that are not ignored.
//
//     (1 / (target != ignore_index).sum()).expand(Q)
at::Tensor mean_shares(const at::Tensor& target, int64_t ignore_index, at::ScalarType dtype);
void check_mean_shares(const at::Tensor& target, at::ScalarType dtype);
at::Tensor mean_shares_reference(const at::Tensor& target, int64_t ignore_index, at::ScalarType dtype);

// scale_loss_gradients(grad [] or [Q], target int64 [Q], ignore_index, grad_input [Q, D], grad_scores [Q, W], input [Q, D]) -> the last three
//
// Gradients that a forward pass made of its losses, times the gradient of these, and the queries. All of a query that is ignored, or whose factor is 0, is
// zero, whatever it holds.
//
//     factor = torch.where(target == ignore_index, 0, grad)[:, None]
//     torch.where(factor == 0, 0, factor * grad_input), torch.where(factor == 0, 0, factor * grad_scores), torch.where(factor == 0, 0, input)
//
// Any of the three may have no rows, and comes back so.
std::tuple<at::Tensor, at::Tensor, at::Tensor> scale_loss_gradients(const at::Tensor& grad, const at::Tensor& target, int64_t ignore_index,
                                                                    const at::Tensor& grad_input, const at::Tensor& grad_scores, const at::Tensor& input);

void check_scale_loss_gradients(const at::Tensor& grad, const at::Tensor& target, const at::Tensor& grad_input, const at::Tensor& grad_scores,
                                const at::Tensor& input);

} // namespace xsoftmax
