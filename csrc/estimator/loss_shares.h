#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

// Operators that handle ignored targets on a device without a synchronisation, because the host
// does not know which targets are ignored. One kernel launch each.

namespace xsoftmax {

// mean_shares(target int64 [Q], ignore_index, dtype) -> [Q]
//   Returns the weight of each loss in a mean over the targets that are not ignored.
//
//     (1 / (target != ignore_index).sum()).expand(Q)
at::Tensor mean_shares(const at::Tensor& target, int64_t ignore_index, at::ScalarType dtype);
void check_mean_shares(const at::Tensor& target, at::ScalarType dtype);
at::Tensor mean_shares_reference(const at::Tensor& target, int64_t ignore_index,
                                 at::ScalarType dtype);

// scale_loss_gradients(grad [] or [Q], target int64 [Q], ignore_index, grad_input [Q, D],
// grad_scores [Q, W], input [Q, D]) -> (grad_input, grad_scores, input)
//   Scales the gradients that the forward pass computed by the gradient of the losses. Rows of
//   ignored queries and of queries whose factor is 0 are set to 0 in all three results, even if
//   they are not finite.
//
//     factor = torch.where(target == ignore_index, 0, grad)[:, None]
//     grad_input = torch.where(factor == 0, 0, factor * grad_input)
//     grad_scores = torch.where(factor == 0, 0, factor * grad_scores)
//     input = torch.where(factor == 0, 0, input)
//
// Any of the three may have 0 rows; its result then has 0 rows too.
std::tuple<at::Tensor, at::Tensor, at::Tensor> scale_loss_gradients(
    const at::Tensor& grad, const at::Tensor& target, int64_t ignore_index,
    const at::Tensor& grad_input, const at::Tensor& grad_scores, const at::Tensor& input);

void check_scale_loss_gradients(const at::Tensor& grad, const at::Tensor& target,
                                const at::Tensor& grad_input, const at::Tensor& grad_scores,
                                const at::Tensor& input);

} // namespace xsoftmax
