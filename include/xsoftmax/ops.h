#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

// The operators of the library as typed functions. Each is also torch.ops.xsoftmax.NAME and, by its schema, c10::Dispatcher's
// "xsoftmax::NAME"; all work with autograd, on CPU and CUDA tensors. Bad input throws c10::Error: shapes and values ValueError, dtypes
// and devices TypeError, class ids out of range IndexError in Python.

namespace xsoftmax {

/// Keeps the linker from dropping the library, whose operators register when it is loaded: call it once in a program that loads
/// TorchScript modules or calls operators by their schema.
void init();

/// candidate_scores: rows of a class table against queries.
///
///     scores[:, :P] = (input[:, None, :] * weight[private_ids]).sum(-1) + bias[private_ids]
///     scores[:, P:] = input @ weight[shared_ids].T + bias[shared_ids]
///
/// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; private_ids [Q, P] and shared_ids [S], either may be none:
/// int64 in [0, N), repeats allowed. Returns [Q, P + S] in float32, or float64 for float64 inputs.
///
/// Backward: grad_input [Q, D] and one row-sparse gradient for weight (and bias) with R = Q P + S rows whatever the ids are: rows
/// [R] sorted, values [R, D]; the gradient of a class is summed into its first row, its other rows are zero. As the `.grad` of
/// weight: sparse COO with these rows (sparse_grad), or dense.
at::Tensor candidate_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids,
                            bool sparse_grad = true);

/// ragged_scores: candidate_scores with a number of private candidates of its own for each query.
///
///     query = torch.repeat_interleave(torch.arange(Q), offsets.diff())
///     scores = (input[query] * weight[ids]).sum(-1) + bias[ids]
///
/// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; ids [T] int64 in [0, N), those of query q at offsets[q] ..
/// offsets[q + 1] - 1; offsets [Q + 1] int64 from 0 to T, never falling. Returns [T] in float32, or float64 for float64 inputs.
/// Backward as that of candidate_scores, with R = min(T, N) rows, rising.
at::Tensor ragged_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const at::Tensor& ids, const at::Tensor& offsets, bool sparse_grad = true);

/// candidate_loss: the loss of each query from the scores of its target and of its candidates.
///
///     adjusted = scores[:, 1:] - log_count                       # a candidate weighs 1 / its expected count
///     adjusted[ids == target] = -inf                             # remove_accidental_hits; but see estimator
///     adjusted[:, independent] += log((M - exp(target_log_count)) / m)     # M independent draws, m of them not hits
///     loss = logsumexp(cat(scores[:, :1], adjusted)) - scores[:, 0]        # estimator "sampled_softmax"
///
/// scores [Q, 1 + P + S] (float32 or float64): the target, P private candidates, S shared ones, as candidate_scores lays them out.
/// target [Q], private_ids [Q, P], shared_ids [S]: int64. private_log_count [Q, P], shared_log_count [S] or [Q, S], target_log_count [Q]:
/// logarithms of expected counts (M q for M draws), in any floating dtype; absent: counts of 1 (no target_log_count: nothing is
/// renormalised).
/// A candidate of log count +inf takes no part. The first fixed_private private and fixed_shared shared columns are classes that are
/// always there, or draws without replacement: they weigh 1 / count as they stand. The others are independent draws, with replacement;
/// there q is renormalised to the classes other than the target, and target_log_count is the target's log expected count among them
/// (-inf if it cannot be drawn).
/// estimator: "sampled_softmax" (MIDX paper, section 3.2; with remove_accidental_hits=False its Eq. 1), or "ranking", which corrects the
/// target's score by target_log_count as well (TensorFlow's sampled softmax; -inf corrects nothing) and never renormalises. "ranking",
/// "nce" and CANE keep the hits among independent draws, whatever remove_accidental_hits says: the softmax is their optimum for any number
/// of draws only so.
/// Or, with adjusted_j as above, a_y = scores[:, 0] - target_log_count (needed where it appears) and no label smoothing:
///     "nce"                softplus(-a_y) + sum_j softplus(adjusted_j): noise-contrastive estimation with log Z = 0 (Gutmann and Hyvarinen, 2012)
///     "negative_sampling"  softplus(-s_y) + sum_j softplus(s_j): counts do not matter (Mikolov et al., 2013)
///     "one_vs_each"        sum_j softplus(s_j - s_y) / count_j, renormalised as "sampled_softmax" is (Titsias, 2016)
///     "blackout"           -log p_y - sum_j log(1 - p_j), p the softmax of a_y and adjusted (Ji et al., 2016)
///     "importance"         logsumexp(adjusted) - s_y: the normaliser from the draws alone; hits always stay (Bengio and Senecal, 2003)
/// or, with the fixed columns as candidates C, the others as n draws of noise from q, s' = adjusted over C, m_j = adjusted_j + log n over the
/// noise, and m_y = s_y - target_log_count + log n (needed; -inf corrects nothing):
///     "cane"               y in C: mean_j log(e^{s_y} + sum e^{s'} + e^{m_j}) - s_y; else log(sum e^{s'} + e^{m_y}) - s_y
///                          (CANE paper, Algorithm 1; noise from the classes outside C)
///     "cane_log_of_mean"   y in C: log(e^{s_y} + sum e^{s'} + mean_j e^{m_j}) - s_y; else the same without e^{s_y}, and with m_y in the
///                          place of the first draw. One noise: the same loss. More: less variance than "cane"
/// label_smoothing e: (1 - e) of the loss above and e of (log normaliser - mean score of all classes), the mean estimated
/// with the weights exp(adjusted - score), 1 for the target, over their sum; "ranking" takes the target's corrected score there too.
/// With no live candidate the softmax losses, "one_vs_each" and "importance" are 0. Returns [Q] in scores' dtype. Backward recomputes from
/// the scores; nothing else is kept.
at::Tensor candidate_loss(const at::Tensor& scores, const at::Tensor& target, const std::optional<at::Tensor>& private_ids,
                          const std::optional<at::Tensor>& shared_ids,
                          const std::optional<at::Tensor>& private_log_count = std::nullopt,
                          const std::optional<at::Tensor>& shared_log_count = std::nullopt,
                          const std::optional<at::Tensor>& target_log_count = std::nullopt,
                          std::string_view estimator = "sampled_softmax", bool remove_accidental_hits = true,
                          int64_t fixed_private = 0, int64_t fixed_shared = 0, double label_smoothing = 0.0);

/// sampled_softmax_loss: the loss of a class table on sampled candidates, from the hidden state to the reduced loss: candidate_scores and
/// candidate_loss (which say what the arguments mean) in one pass over the rows of the table, forward and backward.
///
///     scores = candidate_scores(input, weight, bias, cat(target[:, None], private_ids), shared_ids)
///     loss = candidate_loss(scores, target, private_ids, shared_ids, ...) * class_weight[target]        # 0 where ignored
///     reduction: none; mean: loss.sum() / class_weight[target].sum() over targets that count; sum
///
/// input [*, D] and target [*]; class_weight [N] in any floating dtype or none. Targets equal to ignore_index have no loss and no gradient.
/// Returns [*] or a scalar, in float32 or float64.
at::Tensor sampled_softmax_loss(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                const at::Tensor& target, const std::optional<at::Tensor>& private_ids,
                                const std::optional<at::Tensor>& shared_ids,
                                const std::optional<at::Tensor>& private_log_count = std::nullopt,
                                const std::optional<at::Tensor>& shared_log_count = std::nullopt,
                                const std::optional<at::Tensor>& target_log_count = std::nullopt,
                                const std::optional<at::Tensor>& class_weight = std::nullopt,
                                std::string_view estimator = "sampled_softmax", bool remove_accidental_hits = true,
                                int64_t fixed_private = 0, int64_t fixed_shared = 0, int64_t reduction = 1,
                                int64_t ignore_index = -100, double label_smoothing = 0.0, bool sparse_grad = true);

/// linear_cross_entropy: the exact loss, without the [Q, N] logits.
///
///     F.cross_entropy(F.linear(input, weight, bias), target, class_weight, reduction=..., ignore_index=..., label_smoothing=...)
///
/// input [Q, D], weight [N, D], bias [N] or none: one of float32, float64, bfloat16, float16; target [Q]: int64 in [0, N) or ignore_index;
/// class_weight [N] or none: of any floating dtype, takes no gradient; reduction 0 (none), 1 (mean; over no query it is
/// NaN) or 2 (sum). Returns a scalar or [Q], in float32, or float64 for float64 inputs. Gradients are dense.
/// Of logits it holds at most 54 MB; where that is too few queries, 40 MB and a block a thread (4 MB; 64 classes at least). A mean or a sum
/// of float32 or float64 losses makes the gradients that are wanted with the loss: call it under NoGradMode (torch.no_grad) where none
/// will be asked for.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                const at::Tensor& target, const std::optional<at::Tensor>& class_weight = std::nullopt,
                                int64_t reduction = 1, c10::SymInt ignore_index = -100, double label_smoothing = 0.0);

/// linear_topk: the k best classes of each query, without the [Q, N] logits.
///
///     F.log_softmax(F.linear(input, weight, bias), -1).topk(k)       # equal scores: the lower id first
///
/// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; 0 <= k <= N. Returns (log-probabilities [Q, k] in float32, or float64
/// for float64 inputs; ids [Q, k] int64), best first. A query whose softmax is no number (a NaN or +inf among its logits, or -inf only) has
/// values of NaN at classes 0 .. k - 1. Has no gradient.
std::tuple<at::Tensor, at::Tensor> linear_topk(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                               c10::SymInt k);

} // namespace xsoftmax
