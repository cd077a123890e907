#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace xsoftmax {

// sampled_softmax_loss: the loss of a class table on sampled candidates, from the hidden state to the reduced loss. A composition of
// candidate_scores and candidate_loss (whose headers say what the arguments mean) that autograd and compilers see through.
//
//     scores = candidate_scores(input, weight, bias, cat(target[:, None], private_ids), shared_ids)
//     loss = candidate_loss(scores, target, private_ids, shared_ids, ...) * class_weight[target]        # 0 where ignored
//     reduction: none; mean: loss.sum() / class_weight[target].sum() over targets that count; sum
//
// input [*, D] and target [*]; class_weight [N] in any floating dtype or none. Targets equal to ignore_index have no loss and no gradient.
// Returns [*] or a scalar, in float32 or float64.
at::Tensor sampled_softmax_loss(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                const at::Tensor& target, const std::optional<at::Tensor>& private_ids,
                                const std::optional<at::Tensor>& shared_ids, const std::optional<at::Tensor>& private_log_count,
                                const std::optional<at::Tensor>& shared_log_count, const std::optional<at::Tensor>& target_log_count,
                                const std::optional<at::Tensor>& class_weight, c10::string_view estimator, bool remove_accidental_hits,
                                int64_t fixed_private, int64_t fixed_shared, int64_t reduction, int64_t ignore_index,
                                double label_smoothing, bool sparse_grad);

} // namespace xsoftmax
