#pragma once

#include <xsoftmax/candidates.h>
#include <xsoftmax/loss_options.h>

#include <ATen/core/Tensor.h>

#include <optional>
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
/// weight: sparse COO with these rows (sparse_grad true), or dense (false); none: sparse where R <= N.
at::Tensor candidate_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& private_ids, const std::optional<at::Tensor>& shared_ids,
                            std::optional<bool> sparse_grad = std::nullopt);

/// ragged_scores: candidate_scores with a number of private candidates of its own for each query.
///
///     query = torch.repeat_interleave(torch.arange(Q), offsets.diff())
///     scores = (input[query] * weight[ids]).sum(-1) + bias[ids]
///
/// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; ids [T] int64 in [0, N), those of query q at offsets[q] ..
/// offsets[q + 1] - 1; offsets [Q + 1] int64 from 0 to T, never falling. Returns [T] in float32, or float64 for float64 inputs.
/// Backward as that of candidate_scores, with R = min(T, N) rows, rising.
at::Tensor ragged_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& ids,
                         const at::Tensor& offsets, std::optional<bool> sparse_grad = std::nullopt);

/// candidate_loss: the loss of each query from the scores of its target and of its candidates, which stand in `sets` (xsoftmax/candidates.h).
///
///     adjusted = scores[:, 1:] - log_count                       # a candidate weighs 1 / its expected count
///     adjusted[ids == target] = -inf                             # remove_accidental_hits; but see estimator
///     adjusted[:, independent] += log((M - exp(target_log_count)) / m)     # M independent draws, m of them not hits
///     loss = logsumexp(cat(scores[:, :1], adjusted)) - scores[:, 0]        # estimator "sampled_softmax"
///
/// scores [Q, 1 + C] (float32 or float64): the target, then the candidates of the sets one after another; private sets stand before shared
/// ones, of both the distinct ones first. target [Q] int64. A candidate of log count +inf takes no part. Sets that are distinct weigh
/// 1 / count as they stand. The others are independent draws, with replacement; where all of them are of one set, its q is renormalised to
/// the classes other than the target.
/// options.estimator: "sampled_softmax" (Chen et al., 2025, section 3.2; with remove_accidental_hits=false its Eq. 1), or "ranking", which lowers the
/// target's score by its log expected count in all sets as well (TensorFlow's sampled softmax; -inf corrects nothing) and never renormalises.
/// "ranking", "nce" and CANE keep the hits among independent draws, whatever remove_accidental_hits says: the softmax is their optimum for any
/// number of draws only so.
/// Or, with adjusted_j as above, a_y = scores[:, 0] less the target's log expected count (needed where it appears) and no label smoothing:
///     "nce"                softplus(-a_y) + sum_j softplus(adjusted_j): noise-contrastive estimation with log Z = 0 (Gutmann and Hyvarinen, 2012)
///     "negative_sampling"  softplus(-s_y) + sum_j softplus(s_j): counts do not matter (Mikolov et al., 2013)
///     "one_vs_each"        sum_j softplus(s_j - s_y) / count_j, renormalised as "sampled_softmax" is (Titsias, 2016)
///     "blackout"           -log p_y - sum_j log(1 - p_j), p the softmax of a_y and adjusted (Ji et al., 2016)
///     "importance"         logsumexp(adjusted) - s_y: the normaliser from the draws alone; hits always stay (Bengio and Senecal, 2003)
/// or, with the distinct sets as candidates C, the others as n draws of noise from q, s' = adjusted over C, m_j = adjusted_j + log n over the
/// noise, and m_y = a_y + log n (-inf corrects nothing):
///     "cane"               y in C: mean_j log(e^{s_y} + sum e^{s'} + e^{m_j}) - s_y; else log(sum e^{s'} + e^{m_y}) - s_y
///                          (Han et al., 2018, Algorithm 1; noise from the classes outside C)
///     "cane_log_of_mean"   y in C: log(e^{s_y} + sum e^{s'} + mean_j e^{m_j}) - s_y; else the same without e^{s_y}, and with m_y in the
///                          place of the first draw. One noise: the same loss. More: less variance than "cane"
/// or one that register_estimator was given (xsoftmax/estimators.h).
/// options.label_smoothing e: (1 - e) of the loss above and e of (log normaliser - mean score of all classes), the mean estimated
/// with the weights exp(adjusted - score), 1 for the target, over their sum; "ranking" takes the target's corrected score there too.
/// With no live candidate the softmax losses, "one_vs_each" and "importance" are 0. Returns [Q] in scores' dtype. Backward recomputes from
/// the scores; nothing else is kept.
at::Tensor candidate_loss(const at::Tensor& scores, const at::Tensor& target, const Proposal& sets, const EstimatorOptions& options = {});

/// sampled_softmax_loss: the loss of a class table on sampled candidates, from the hidden state to the reduced loss: candidate_scores and
/// candidate_loss (which say what the arguments mean) in one pass over the rows of the table, forward and backward.
///
///     scores = candidate_scores(input, weight, bias, cat(target[:, None], private ids), shared ids)
///     t = softcap * (logit_scale * scores / softcap).tanh() - log_z                              # without a cap: logit_scale * scores - log_z
///     loss = candidate_loss(t, target, sets, ...) * class_weight[target]                         # 0 where ignored
///     reduction: none; mean: loss.sum() / class_weight[target].sum() over targets that count; sum
///
/// input [*, D] and target [*]; sets in any order; class_weight [N] in any floating dtype or none; log_z 0-dim or none, with a gradient where it
/// asks for one. Targets equal to ignore_index have no loss and no gradient, whatever their queries hold. Returns [*] or a scalar, in float32 or
/// float64. z_loss adds z_loss * (log normaliser)^2 to the loss of each query before its class weight: of the estimators whose loss is a log normaliser
/// less the score of the target ("sampled_softmax", "ranking", "importance", "cane", "cane_log_of_mean"), with that normaliser. With logit_scale, softcap or
/// z_loss the scores of a batch are in memory, [Q, 1 + C]; without them they are not.
///
/// target_prob [*, T], floating, beside target [*, T]: the loss of linear_soft_loss, whose log
/// normaliser is estimated once for a query: from the different classes listed, each with the count
/// 1, and the candidates that are none of them. Estimator "sampled_softmax" alone.
at::Tensor sampled_softmax_loss(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                const Proposal& sets, const SampledSoftmaxOptions& options = {}, const std::optional<at::Tensor>& class_weight = std::nullopt,
                                const std::optional<at::Tensor>& log_z = std::nullopt, const std::optional<at::Tensor>& target_prob = std::nullopt);

/// tower_loss: the loss of queries against vectors that a network has just made, where there is no class table.
///
///     scores = cat([(query * target_vector).sum(1, keepdim=True), (private_vectors @ query.unsqueeze(2)).squeeze(2), query @ vectors.T], 1)
///     loss = candidate_loss(scores, target, sets, ...) * weight                      # weight: 1 where none is given
///     reduction: none; mean: loss.sum() / weight.sum(); sum
///
/// query and target_vector [Q, D], target [Q] int64, any ids; sets in any order, vectors those of each: [S, D] of a set that all queries share, [Q, P, D]
/// of a private one. Ids are compared with targets and nothing else. All vectors have gradients; weight [Q] has none. Returns a scalar (over no query
/// a mean is NaN) or [Q], in float32 or float64.
at::Tensor tower_loss(const at::Tensor& query, const at::Tensor& target_vector, const at::Tensor& target, at::TensorList vectors, const Proposal& sets,
                      const TowerOptions& options = {}, const std::optional<at::Tensor>& weight = std::nullopt);

/// linear_cross_entropy: the exact loss, without the [Q, N] logits.
///
///     t = softcap * (logit_scale * F.linear(input, weight, bias) / softcap).tanh()            # without a cap: logit_scale * F.linear(...)
///     F.cross_entropy(t, target, class_weight, reduction=..., ignore_index=..., label_smoothing=...)
///     + z_loss * t.logsumexp(-1).square(), weighted and reduced as the first term is without label smoothing
///
/// input [Q, D], weight [N, D], bias [N] or none: one of float32, float64, bfloat16, float16; target [Q]: int64 in [0, N) or ignore_index;
/// class_weight [N] or none: of any floating dtype, takes no gradient. A mean over no query is NaN. Returns a scalar or [Q], in float32, or float64 for float64
/// inputs. Gradients are dense. Of logits it holds at most 54 MB; where that is too few queries, 40 MB and a block a thread (4 MB; 64 classes at least). A mean
/// or a sum of float32 or float64 losses makes the gradients that are wanted with the loss: call it under NoGradMode (torch.no_grad) where none will be asked
/// for.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                const std::optional<at::Tensor>& class_weight = std::nullopt, const CrossEntropyOptions& options = {});

/// linear_positives_loss: the exact loss of several positives of each query, target [*, T], without the [Q, N] logits.
///
///     s = the logits t of linear_cross_entropy; n = logsumexp of s over the classes that are no positive of the query
///     "mean": the mean over its positives y of class_weight[y] (softplus(n - s_y) + z_loss * logaddexp(n, s_y)^2)
///     "sum": softplus(n - logsumexp over its positives of s_y) + z_loss * logsumexp(s)^2
///
/// input [*, D], weight [N, D], bias [N] or none, class_weight [N] or none; repeats, and targets equal to ignore_index, are no positives. Reduction as of
/// sampled_softmax_loss. Returns a scalar or [*].
at::Tensor linear_positives_loss(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                 const std::optional<at::Tensor>& class_weight = std::nullopt, const ExactPositivesOptions& options = {});

/// linear_soft_loss: the exact loss of targets with probabilities, without the [Q, N] logits:
/// distillation from the best classes of a teacher.
///
///     log_p = F.log_softmax(F.linear(input, weight, bias), -1)
///     loss = -(target_prob * class_weight[target] * log_p.gather(-1, target)).sum(-1)
///     reduction: none; mean: loss.sum() / number of queries that count; sum
///
/// input [*, D], weight [N, D], bias [N] or none; target [*, T] int64 in [0, N), ignore_index or -1;
/// target_prob [*, T], floating, without gradient, which need not sum to 1; class_weight [N] or none.
/// It equals F.cross_entropy with a target of probabilities [*, N] that are 0 outside the classes
/// listed. Entries of ignore_index or -1 are padding; those and entries of probability 0 add nothing,
/// repeats add up, and a query of padding alone does not count. options: as of linear_cross_entropy,
/// without label smoothing; z_loss enters with the loss of each entry. Returns [*] or a scalar, in
/// float32 or float64.
at::Tensor linear_soft_loss(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& target,
                            const at::Tensor& target_prob, const std::optional<at::Tensor>& class_weight = std::nullopt,
                            const CrossEntropyOptions& options = {});

/// linear_log_prob: log-probabilities of some classes of each query, without the [Q, N] logits.
///
///     F.log_softmax(F.linear(input, weight, bias), -1).gather(-1, ids)
///
/// input [*, D], weight [N, D], bias [N] or none: one floating dtype; ids int64 [*] or [*, K] in
/// [0, N), repeats allowed; none: all classes, [*, N] in memory. Returns the shape of ids, in float32,
/// or float64 for float64 operands; with autograd, whose gradients are dense. options transform the
/// logits before the softmax.
at::Tensor linear_log_prob(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& ids = std::nullopt, const LogitOptions& options = {});

/// linear_entropy: the entropy of the softmax of each query, without the [Q, N] logits.
///
///     log_p = F.log_softmax(F.linear(input, weight, bias), -1); -(log_p.exp() * log_p).sum(-1)
///
/// Arguments as of linear_log_prob. Returns [*]; with autograd. A class of score -inf adds nothing.
at::Tensor linear_entropy(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const LogitOptions& options = {});

/// linear_scores: F.linear(input, weight, bias) with sums and results in float32 for 16-bit operands,
/// under autocast too. Returns [*, N], with autograd.
at::Tensor linear_scores(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

/// linear_topk: the k best classes of each query, without the [Q, N] logits.
///
///     F.log_softmax(t, -1).topk(k)       # t: the logits of linear_cross_entropy; equal scores F.linear(input, weight, bias): the lower id first
///
/// input [Q, D], weight [N, D], bias [N] or none: one floating dtype; 0 <= k <= N. Returns (log-probabilities [Q, k] in float32, or float64
/// for float64 inputs; ids [Q, k] int64), best first. A query whose softmax is no number (a NaN or +inf among its logits, or -inf only) has
/// values of NaN at classes 0 .. k - 1. Has no gradient.
std::tuple<at::Tensor, at::Tensor> linear_topk(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymInt k,
                                               const LogitOptions& options = {});

} // namespace xsoftmax
