#pragma once

#include <xsoftmax/options.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace xsoftmax {

/// Candidate classes to score, with the expected count of each: how often the proposal that
/// contains the set would draw the class on average. A candidate is weighted by 1 / expected count.
struct CandidateSet {
  at::Tensor ids; ///< int64 [M], shared by the batch, or [Q, M], private to each query
  /// Floating, the shape of ids; or [Q, M] for shared ids whose counts depend on the query. +inf:
  /// the candidate is ignored.
  at::Tensor log_count;
  /// [Q] or [Q, T], log expected counts of the targets in this set only; -inf for a target that the
  /// set cannot contain. Undefined: not computed, for estimators that do not need it.
  at::Tensor target_log_count;
  bool distinct = false; ///< whether no class appears twice in a set (sampled without replacement)
};

/// All candidates of one step, besides the targets. Expected counts refer to the whole proposal: if
/// several sets may hold a class, its count is the sum over these sets.
using Proposal = std::vector<CandidateSet>;

} // namespace xsoftmax

// The library's operators as typed functions. Each is also torch.ops.xsoftmax.NAME in Python, and
// "xsoftmax::NAME" in c10::Dispatcher. All support autograd, on CPU and CUDA tensors. Invalid input
// throws c10::Error. In Python, shapes and values raise ValueError, dtypes and devices TypeError,
// and class ids out of range IndexError.

namespace xsoftmax {

/// Keeps the linker from dropping the library, whose operators register when it is loaded. Call it
/// once in a program that loads TorchScript modules or calls operators by their schema.
void init();

/// candidate_scores: scores rows of a class table for each query.
///
///     scores[:, :P] = (input[:, None, :] * weight[private_ids]).sum(-1) + bias[private_ids]
///     scores[:, P:] = input @ weight[shared_ids].T + bias[shared_ids]
///
/// - input [Q, D], weight [N, D], bias [N] or none: the same floating dtype.
/// - private_ids [Q, P] and shared_ids [S]: int64 in [0, N), repeats allowed; either may be none.
///
/// Returns [Q, P + S] in float32, or float64 for float64 inputs.
///
/// The backward pass computes grad_input [Q, D] and one row-sparse gradient for weight (and bias).
/// This gradient always has R = Q P + S rows, whatever the ids are: sorted rows [R] and values [R,
/// D]. If a class occurs several times, its gradient is summed into its first row, and its other
/// rows are zero. The `.grad` of weight is a sparse COO tensor with these rows (sparse_grad true),
/// or dense (false). With none, it is sparse if R <= N.
at::Tensor candidate_scores(const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& private_ids,
                            const std::optional<at::Tensor>& shared_ids,
                            std::optional<bool> sparse_grad = std::nullopt);

/// ragged_scores: computes candidate_scores with a different number of private candidates per
/// query.
///
///     query = torch.repeat_interleave(torch.arange(Q), offsets.diff())
///     scores = (input[query] * weight[ids]).sum(-1) + bias[ids]
///
/// - input [Q, D], weight [N, D], bias [N] or none: the same floating dtype.
/// - ids [T]: int64 in [0, N). Those of query q are ids[offsets[q] : offsets[q + 1]].
/// - offsets [Q + 1]: int64 from 0 to T, non-decreasing.
///
/// Returns [T] in float32, or float64 for float64 inputs. The backward pass is that of
/// candidate_scores, with R = min(T, N) rows in ascending order.
at::Tensor ragged_scores(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const at::Tensor& ids,
                         const at::Tensor& offsets, std::optional<bool> sparse_grad = std::nullopt);

/// candidate_loss: computes the loss of each query from the scores of its target and its
/// candidates.
///
///     # each candidate is weighted by 1 / its expected count
///     adjusted = scores[:, 1:] - log_count
///     # if remove_accidental_hits, except as noted for estimators below
///     adjusted[ids == target] = -inf
///     # M samples with replacement, of which m are not hits
///     adjusted[:, independent] += log((M - exp(target_log_count)) / m)
///     # estimator "sampled_softmax"
///     loss = logsumexp(cat(scores[:, :1], adjusted)) - scores[:, 0]
///
/// - scores [Q, 1 + C], float32 or float64: the target, then the candidates of the sets one after
///   another. Private sets precede shared ones; within each kind, distinct sets come first.
/// - target [Q], int64.
/// - sets: the candidates. A candidate with a log count of +inf is ignored. Candidates of distinct
///   sets are weighted by 1 / count without further correction. The other sets are samples with
///   replacement; if there is only one such set, its q is renormalised to the classes other than
///   the target.
/// - options.estimator: one of the estimators below, or a name passed to register_estimator.
/// - options.label_smoothing e: the loss is (1 - e) times the loss above, plus e times the
///   difference of the log normaliser and the mean score of all classes. The mean is a weighted
///   average of the scores, with weights exp(adjusted - score), and 1 for the target. "ranking"
///   uses the target's corrected score there too.
///
/// Returns [Q] in the dtype of scores. The softmax losses, "one_vs_each" and "importance" are 0 if
/// all candidates are ignored or removed. The backward pass recomputes from the scores; nothing
/// else is saved.
///
/// Estimators of the softmax:
///
/// - "sampled_softmax": the loss above (Chen et al., 2025, section 3.2). With
///   remove_accidental_hits=false, it is Eq. 1 of that paper.
/// - "ranking": also lowers the target's score by its log expected count in all sets, as
///   TensorFlow's sampled softmax does (-inf: no correction), and never renormalises.
///
/// "ranking", "nce" and CANE keep hits among samples with replacement even if
/// remove_accidental_hits is set. Only then is the softmax their optimum for any number of samples.
///
/// The following estimators do not support label smoothing. adjusted_j is defined above, and s_j is
/// the score of candidate j. s_y is the target's score, and a_y is s_y minus the target's log
/// expected count, which the estimators that use it require.
///
/// - "nce": softplus(-a_y) + sum_j softplus(adjusted_j). Noise-contrastive estimation with log Z =
///   0 (Gutmann and Hyvarinen, 2012).
/// - "negative_sampling": softplus(-s_y) + sum_j softplus(s_j). Ignores the counts (Mikolov et al.,
///   2013).
/// - "one_vs_each": sum_j softplus(s_j - s_y) / count_j, renormalised like "sampled_softmax"
///   (Titsias, 2016).
/// - "blackout": -log p_y - sum_j log(1 - p_j), where p is the softmax of a_y and adjusted (Ji et
///   al., 2016).
/// - "importance": logsumexp(adjusted) - s_y. Estimates the normaliser from the candidates only,
///   and always keeps hits (Bengio and Senecal, 2003).
///
/// CANE uses the distinct sets as the candidates C, and the other sets as n samples of noise from
/// q. With s' = adjusted over C, m_j = adjusted_j + log n over the noise, and m_y = a_y + log n
/// (-inf: no correction):
///
/// - "cane": if y is in C, mean_j log(e^{s_y} + sum e^{s'} + e^{m_j}) - s_y; otherwise log(sum
///   e^{s'} + e^{m_y}) - s_y (Han et al., 2018, Algorithm 1, with noise from the classes outside
///   C).
/// - "cane_log_of_mean": if y is in C, log(e^{s_y} + sum e^{s'} + mean_j e^{m_j}) - s_y; otherwise
///   the same without e^{s_y}, and with m_y in place of the first noise sample. It equals "cane"
///   for n = 1, and has less variance for larger n.
at::Tensor candidate_loss(const at::Tensor& scores, const at::Tensor& target, const Proposal& sets,
                          const EstimatorOptions& options = {});

/// sampled_softmax_loss: computes the reduced loss of a class table from sampled candidates. It
/// combines candidate_scores and candidate_loss, which document the shared arguments, and reads the
/// rows of the table once forward and once backward.
///
///     private = cat([target[:, None], private_ids], 1)
///     scores = candidate_scores(input, weight, bias, private, shared_ids)
///     t = softcap * (logit_scale * scores / softcap).tanh() - log_z
///     # without a cap: t = logit_scale * scores - log_z
///     loss = candidate_loss(t, target, sets, ...) * class_weight[target] # 0 for ignored targets
///     # reduction "none": loss, "sum": loss.sum(),
///     # "mean": loss.sum() / class_weight[target].sum() over targets that are not ignored
///
/// - input [*, D], target [*].
/// - sets: in any order.
/// - class_weight [N]: any floating dtype, or none.
/// - log_z: 0-dim, or none. Receives a gradient if it requires one.
/// - options.ignore_index: targets with this value have no loss and no gradient, whatever values
///   their queries hold.
/// - options.z_loss: adds z_loss * (log normaliser)^2 to the loss of each query, before its class
///   weight. Only for estimators whose loss is a log normaliser minus the score of the target
///   ("sampled_softmax", "ranking", "importance", "cane", "cane_log_of_mean"), with that
///   normaliser.
/// - target_prob [*, T]: floating, together with target [*, T]. Computes the loss of
///   linear_soft_loss, with one estimate of the log normaliser per query. The estimate uses the
///   distinct listed classes, each with a count of 1, and the candidates that are not listed. Only
///   for the estimator "sampled_softmax".
///
/// Returns [*] or a scalar, in float32 or float64. The scores [Q, 1 + C] of the batch are stored
/// only if logit_scale, softcap or z_loss is set.
at::Tensor sampled_softmax_loss(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                const Proposal& sets, const SampledSoftmaxOptions& options = {},
                                const std::optional<at::Tensor>& class_weight = std::nullopt,
                                const std::optional<at::Tensor>& log_z = std::nullopt,
                                const std::optional<at::Tensor>& target_prob = std::nullopt);

/// tower_loss: computes the loss of queries against vectors that a network has just computed,
/// without a class table.
///
///     own = (query * target_vector).sum(1, keepdim=True)
///     private = (private_vectors @ query.unsqueeze(2)).squeeze(2)
///     scores = cat([own, private, query @ vectors.T], 1)
///     loss = candidate_loss(scores, target, sets, ...) * weight    # weight: 1 if none
///     # reduction "none": loss, "sum": loss.sum(), "mean": loss.sum() / weight.sum()
///
/// - query and target_vector [Q, D].
/// - target [Q]: int64, any ids. Ids are only compared with targets.
/// - vectors: those of each set, [S, D] for a set that all queries share, [Q, P, D] for a private
///   one.
/// - sets: in any order.
/// - weight [Q]: has no gradient. All vectors have one.
///
/// Returns a scalar, or [Q] for reduction "none", in float32 or float64. The mean over zero queries
/// is NaN.
at::Tensor tower_loss(const at::Tensor& query, const at::Tensor& target_vector,
                      const at::Tensor& target, at::TensorList vectors, const Proposal& sets,
                      const TowerOptions& options = {},
                      const std::optional<at::Tensor>& weight = std::nullopt);

/// linear_cross_entropy: computes the exact loss without storing the [Q, N] logits.
///
///     t = softcap * (logit_scale * F.linear(input, weight, bias) / softcap).tanh()
///     # without a cap: t = logit_scale * F.linear(input, weight, bias)
///     F.cross_entropy(t, target, class_weight, reduction=..., ignore_index=...,
///                     label_smoothing=...) + z_loss * t.logsumexp(-1).square()
///     # the z_loss term is weighted and reduced like the first one without label smoothing
///
/// - input [Q, D], weight [N, D], bias [N] or none: the same dtype of float32, float64, bfloat16,
///   float16.
/// - target [Q]: int64 in [0, N) or ignore_index.
/// - class_weight [N]: any floating dtype, without gradient; or none.
///
/// Returns a scalar, or [Q] for reduction "none", in float32, or float64 for float64 inputs. The
/// mean over zero queries is NaN. Gradients are dense.
///
/// Logits take at most 54 MB. If too few queries fit, they take 40 MB plus a block of 4 MB per
/// thread (at least 64 classes).
///
/// A mean or sum of float32 or float64 losses computes the gradients together with the loss. Call
/// it under NoGradMode (torch.no_grad) if you will not need them.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                const std::optional<at::Tensor>& class_weight = std::nullopt,
                                const CrossEntropyOptions& options = {});

/// linear_positives_loss: computes the exact loss of multiple positives per query, target [*, T],
/// without storing the [Q, N] logits.
///
///     s = the logits t of linear_cross_entropy
///     n = logsumexp of s over the classes that are not positives of the query
///     # positives "mean": the mean over the query's positives y of
///     class_weight[y] * (softplus(n - s_y) + z_loss * logaddexp(n, s_y)^2)
///     # positives "sum":
///     softplus(n - logsumexp of s_y over the query's positives) + z_loss * logsumexp(s)^2
///
/// - input [*, D], weight [N, D], bias [N] or none, class_weight [N] or none.
/// - target [*, T]: repeats, and entries equal to ignore_index, are not positives.
///
/// The loss is reduced as in sampled_softmax_loss. Returns a scalar or [*].
at::Tensor linear_positives_loss(const at::Tensor& input, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                 const std::optional<at::Tensor>& class_weight = std::nullopt,
                                 const ExactPositivesOptions& options = {});

/// linear_soft_loss: computes the exact loss of targets with probabilities, without storing the [Q,
/// N] logits. It serves distillation from the best classes of a teacher.
///
///     log_p = F.log_softmax(F.linear(input, weight, bias), -1)
///     loss = -(target_prob * class_weight[target] * log_p.gather(-1, target)).sum(-1)
///     # reduction "none": loss, "sum": loss.sum(),
///     # "mean": loss.sum() / number of queries that are not ignored
///
/// - input [*, D], weight [N, D], bias [N] or none, class_weight [N] or none.
/// - target [*, T]: int64 in [0, N), or ignore_index or -1 as padding.
/// - target_prob [*, T]: floating, without gradient; need not sum to 1.
/// - options: as in linear_cross_entropy, without label smoothing. z_loss is added to the loss of
///   each entry.
///
/// The result equals F.cross_entropy with target probabilities [*, N] that are 0 for the classes
/// not listed. Padding and entries with probability 0 contribute nothing, and repeats add up. A
/// query with only padding is ignored. Returns [*] or a scalar, in float32 or float64.
at::Tensor linear_soft_loss(const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& target,
                            const at::Tensor& target_prob,
                            const std::optional<at::Tensor>& class_weight = std::nullopt,
                            const CrossEntropyOptions& options = {});

/// linear_log_prob: computes log-probabilities of given classes per query, without storing the [Q,
/// N] logits.
///
///     F.log_softmax(F.linear(input, weight, bias), -1).gather(-1, ids)
///
/// - input [*, D], weight [N, D], bias [N] or none: the same floating dtype.
/// - ids: int64 [*] or [*, K] in [0, N), repeats allowed; none: all classes, which stores [*, N].
/// - options: transform the logits before the softmax.
///
/// Returns the shape of ids, in float32, or float64 for float64 inputs. Supports autograd, with
/// dense gradients.
at::Tensor linear_log_prob(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& ids = std::nullopt,
                           const LogitOptions& options = {});

/// linear_entropy: computes the entropy of the softmax of each query, without storing the [Q, N]
/// logits.
///
///     log_p = F.log_softmax(F.linear(input, weight, bias), -1)
///     -(log_p.exp() * log_p).sum(-1)
///
/// Arguments are those of linear_log_prob. Returns [*]. Supports autograd. A class with a score of
/// -inf contributes nothing.
at::Tensor linear_entropy(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const LogitOptions& options = {});

/// linear_scores: computes F.linear(input, weight, bias) with sums and results in float32 for
/// 16-bit inputs, also under autocast. Returns [*, N]. Supports autograd.
at::Tensor linear_scores(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias);

/// linear_topk: finds the k best classes of each query, without storing the [Q, N] logits.
///
///     F.log_softmax(t, -1).topk(k)       # t: the logits of linear_cross_entropy
///
/// Among classes with equal scores F.linear(input, weight, bias), the lower id comes first.
///
/// - input [Q, D], weight [N, D], bias [N] or none: the same floating dtype.
/// - k: 0 <= k <= N.
///
/// Returns (log-probabilities [Q, k] in float32, or float64 for float64 inputs; ids [Q, k] int64),
/// best first. A query whose softmax is NaN (NaN or +inf among its logits, or only -inf) has values
/// of NaN and the classes 0 .. k - 1. Has no gradient.
std::tuple<at::Tensor, at::Tensor> linear_topk(const at::Tensor& input, const at::Tensor& weight,
                                               const std::optional<at::Tensor>& bias, c10::SymInt k,
                                               const LogitOptions& options = {});

} // namespace xsoftmax

// An estimator turns the scores of the target and the candidates into the loss of a query. A custom
// estimator is a function of a CandidateBatch in differentiable ATen calls, registered by name.
// Built-in estimators also have a handwritten gradient, and a CPU loop over the row of a query.

namespace xsoftmax {

/// The input of an estimator for a batch of Q queries and C candidates, in float32 or float64. If
/// hits are removed, candidates that equal the target have a log weight of -inf and contribute
/// nothing.
struct CandidateBatch {
  /// [Q] scores of the targets, minus their log expected counts if the estimator corrects the
  /// target
  at::Tensor target;
  at::Tensor score; ///< [Q, C] scores of the candidates
  /// [Q, C]: the sum of e^(score + log_weight) over C estimates the sum of e^s_j over classes j !=
  /// y
  at::Tensor log_weight;
  at::Tensor adjusted; ///< [Q, C] score + log_weight, -inf where log_weight is -inf
  at::Tensor drawn; ///< [C] bool: whether the candidate was sampled with replacement
  /// [Q] number of candidates sampled with replacement that are not removed or ignored, in the
  /// dtype of the scores
  at::Tensor draws;
  at::Tensor covered; ///< [Q] bool: whether the target is in a distinct set
  /// [Q] log expected counts of the targets in all sets; undefined if the estimator does not need
  /// them
  at::Tensor target_log_count;
  double label_smoothing;
};

/// Requirements of an estimator on the candidates.
struct EstimatorTraits {
  bool corrects_target = false; ///< the target's score is lowered by its log expected count
  bool needs_target_count = false; ///< target_log_count is required
  bool renormalizes = false; ///< if hits are removed, q is renormalised to the other classes
  bool weighs = false; ///< candidates are weighted by 1 / expected count rather than 1
  /// remove_accidental_hits removes hits from distinct sets; false: they always stay
  bool drops_distinct_hits = false;
  /// remove_accidental_hits removes hits from samples with replacement; false: they always stay
  bool drops_drawn_hits = false;
  /// with distinct sets, a target outside them replaces the first sample with replacement
  bool replaces_a_sample = false;
  bool smooths = false; ///< supports label smoothing
  /// Samples with replacement represent the classes outside the distinct sets. The estimator needs
  /// candidates of both kinds.
  bool has_noise = false;

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("corrects_target", corrects_target);
    visitor("needs_target_count", needs_target_count);
    visitor("renormalizes", renormalizes);
    visitor("weighs", weighs);
    visitor("drops_distinct_hits", drops_distinct_hits);
    visitor("drops_drawn_hits", drops_drawn_hits);
    visitor("replaces_a_sample", replaces_a_sample);
    visitor("smooths", smooths);
    visitor("has_noise", has_noise);
  }
};

/// Registers an estimator that every loss, in every language, accepts as `estimator=name`. `loss`
/// returns the losses [Q] of a batch, in differentiable ATen calls.
void register_estimator(const std::string& name, const EstimatorTraits& traits,
                        std::function<at::Tensor(const CandidateBatch&)> loss);

} // namespace xsoftmax

// Ranking metrics, the same as xsoftmax.metrics in Python.

/// Ranking metrics.
///
/// - predictions: int64 [Q, at least k], the classes predicted for each query, best first and
///   without repeats; -1 as padding.
/// - truth: int64 [Q], the correct class of each query, or [Q, T] for several, -1 as padding.
///
/// Each metric returns the mean over the queries that have at least one correct class. hit_i is 1
/// if prediction i (counted from 1) is correct and 0 otherwise, and T is the number of correct
/// classes of a query.
///
/// Throws ValueError for wrong shapes, k below 1, a class that is repeated in a row or below -1,
/// and if no query has a correct class; TypeError for wrong dtypes.
namespace xsoftmax::metrics {

/// Returns sum_{i <= k} hit_i / k.
double precision_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k);
/// Returns sum_{i <= k} hit_i / T.
double recall_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k);
/// Returns sum_{i <= k} hit_i / log2(i + 1)  /  sum_{i <= min(T, k)} 1 / log2(i + 1).
double ndcg_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k);
/// Returns sum_q sum_{i <= k} hit_i / p_i, divided by the sum over q of the k largest 1 / p of its
/// correct classes (Jain et al., 2016). propensity: floating [N], in (0, 1].
double psp_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k,
                const at::Tensor& propensity);
/// Returns 1 / (1 + (log n - 1) (b + 1)^a (counts + b)^-a) as float64 [N]. counts: [N], finite and
/// at least 0. n = num_examples: at least 3.
at::Tensor propensity(const at::Tensor& counts, int64_t num_examples, double a = 0.55,
                      double b = 1.5);
/// Returns (candidates == target[..., None]).any(-1).mean().
///
/// - candidates: int64 [*, C], -1 as padding, or [C].
/// - target: int64 [*], of at least one dimension. Targets that are ignore_index or below 0 are
///   ignored.
double coverage(const at::Tensor& candidates, const at::Tensor& target,
                int64_t ignore_index = -100);

} // namespace xsoftmax::metrics

// Progress reports and interruption of long-running work: building trees from vectors, training and
// prediction of XRLinear, refreshes of samplers, building search indices.

namespace xsoftmax {

/// Thrown by work that was interrupted. The state that the work would have changed is unchanged.
class Interrupted : public c10::Error { using Error::Error; };

/// Interrupts the long-running work of all threads, each within one block of its work. Returns
/// immediately. Safe to call from a signal handler:
///
///     std::signal(SIGINT, [](int) { xsoftmax::interrupt(); });
void interrupt() noexcept;

/// Reports the progress of long-running work. It is called on the thread that runs the work, at
/// most ten times a second, with the operator's name and `done` of `total` units of work. Both are
/// 0 if the total is unknown. If it throws, the work stops and the caller receives the exception.
using ProgressHandler = std::function<void(const std::string& work, int64_t done, int64_t total)>;

/// Sets the progress handler of this thread, null for none. Returns the previous handler.
ProgressHandler set_progress_handler(ProgressHandler handler);

} // namespace xsoftmax
