#pragma once

// Losses over a class table, over a tree of classes, or over vectors of two towers, as modules: the same as their namesakes in Python, with the same
// parameter names, so the state of one loads into the other.
//
//     xsoftmax::nn::SampledSoftmaxLoss loss(width, classes, xsoftmax::samplers::UniformSampler(classes, 512));
//     loss(hidden, target).backward();

#include <xsoftmax/holder.h>
#include <xsoftmax/loss_options.h>
#include <xsoftmax/samplers.h>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace xsoftmax::nn {

/// What every loss over a class table takes.
struct LossOptions {
  torch::nn::Linear linear{nullptr}; ///< an existing one, whose rows are the classes and whose parameters the loss shares (`from_linear` of Python)
  bool bias = false;                 ///< of a table that the loss makes
  torch::Tensor weight = {};        ///< [N], rescales the loss of each class; undefined: none
  std::string reduction = "mean";   ///< "mean" (weighted, over targets that are not ignored), "sum" or "none"
  int64_t ignore_index = -100;      ///< targets of this value have no loss and no gradient
  double label_smoothing = 0.0;     ///< in [0, 1]
  double logit_scale = 1.0;         ///< above 0: logits are softcap * tanh(logit_scale * linear(input) / softcap); see LogitOptions
  double softcap = 0.0;             ///< above 0; 0: logits are logit_scale * linear(input)
  double z_loss = 0.0;              ///< adds z_loss * (log normaliser)^2 to the loss of each query, in train() of its estimate
  int64_t workspace_mb = 512;       ///< on CUDA: MB of logits that exist at once in a step of the exact loss
  std::string positives = "mean";   ///< how the losses of several positives are reduced, target [*, T]: see PositivesOptions
};

/// How candidates are drawn and weighed.
struct SamplingOptions {
  std::string estimator = "";                 ///< "sampled_softmax", "ranking", "nce", ...: see xsoftmax::candidate_loss; or "complementary_sum",
                                              ///< draws from the classes other than the target. Empty: what suits the sampler
  bool remove_accidental_hits = true;
  torch::Tensor head = {};                    ///< int64 [H], classes that are always scored: at::arange(512) for the first ones. The sampler
                                              ///< draws from the others, or, where it cannot leave classes out, the counts add up
  double log_z = 0.0;                         ///< of "nce", by which all scores are lowered
  bool learn_log_z = false;                   ///< it is a parameter, `log_z`, which begins there
  std::optional<bool> sparse_grad = std::nullopt; ///< row-sparse gradient of the table, or dense; none: what costs less
  std::optional<int64_t> num_samples = std::nullopt; ///< of a sampler that is named: draws for the batch (shared) or for each query
  std::optional<bool> shared = std::nullopt;         ///< of a sampler that is named; none: as suits it
};

/// Base of losses over a table of rows, one for each class or for each edge of a tree. What reads the whole table settles it first: applies the
/// steps that a row optimizer owes its rows.
class TableLossImpl : public torch::nn::Module {
 public:
  void settle() const;
  void train(bool on = true) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// What a loss of another kind need not have, a sampler's state or the like, may be missing, and stays as it is.
  void load(torch::serialize::InputArchive& archive) override;
  /// Counts of steps stay as they are, on the host.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor weight; ///< class weights, undefined: none

 protected:
  /// optional: names of modules, buffers and parameters that a checkpoint may lack.
  TableLossImpl(const char* name, int64_t num_classes, const LossOptions& options, std::vector<std::string> optional);
  virtual const torch::nn::Linear& table() const = 0;

  const char* name_;
  int64_t num_classes_;
  LossOptions options_;

 private:
  std::vector<std::string> optional_;
};

/// Base: the table as `linear`, the exact loss, prediction.
class LinearLossImpl : public TableLossImpl {
 public:
  LinearLossImpl(const char* name, int64_t in_features, int64_t num_classes, const LossOptions& options);

  /// The exact loss, without the [Q, N] logits: input [*, D], target [*] int64; a scalar, or [*] for "none".
  /// target_prob: floating [*, T] beside target [*, T], as of xsoftmax::linear_soft_loss.
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target, const std::optional<torch::Tensor>& target_prob = std::nullopt) const;
  /// log_softmax of the logits, of linear(input) where LossOptions do not transform it, [*, N]; or of ids [*] or [*, K] alone, without [*, N] in memory.
  torch::Tensor log_prob(const torch::Tensor& input, const std::optional<torch::Tensor>& ids = std::nullopt);
  /// The entropy of the softmax of each query, [*], without [*, N] in memory.
  torch::Tensor entropy(const torch::Tensor& input);
  /// (log-probabilities, ids), both [*, k], best first. exclude: ids [*, E] that a query does not want, -1 for none; probabilities stay those among all
  /// classes; -inf and -1 behind the last of fewer than k.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k, const torch::Tensor& exclude = {}) const;
  /// The best class: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const;

  /// Gives the loss another number of classes, in place: new ones come behind the others and begin as torch::nn::Linear makes them, those past the end go.
  /// The parameters stay the same tensors; rows of the first classes and what row optimizers keep for them stay, new ones are as before their first step. A
  /// call costs the new rows, averaged over many; where classes go that have not just come, and where classes come to an index of distinct draws, tables of
  /// samplers are laid out anew, O(N). Gradients are dropped. class_weight: of the new classes, where the loss has class weights; undefined: 1. Optimizers of
  /// torch::optim do not follow: make new ones. Errors, before anything changes: ValueError, of a sampler that does not define plan_resize TypeError. Where
  /// there is no memory for a sampler, the tables may be resized, and the loss refuses them: call this again.
  void resize_classes(int64_t num_classes, const torch::Tensor& class_weight = {});

  torch::nn::Linear linear{nullptr}; ///< share or tie the table by assigning linear->weight

 protected:
  /// Samplers that resize with the table.
  virtual std::vector<std::shared_ptr<samplers::SamplerImpl>> samplers_of_table() const { return {}; }
  /// Classes that must stay; undefined: none.
  virtual torch::Tensor fixed_ids() const { return {}; }
  void check_table(const torch::Tensor& input, const torch::Tensor& target = {}) const;
  LogitOptions logit_options() const;
  const torch::nn::Linear& table() const override { return linear; }
};

/// The exact loss, in train() and eval() alike.
class LinearCrossEntropyLossImpl : public LinearLossImpl {
 public:
  LinearCrossEntropyLossImpl(int64_t in_features, int64_t num_classes, const LossOptions& options = {});
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, const std::optional<torch::Tensor>& target_prob = std::nullopt);

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<torch::Tensor>())})
};
class LinearCrossEntropyLoss : public Holder<LinearCrossEntropyLossImpl> {
 public:
  using Holder::Holder;
  LinearCrossEntropyLoss(int64_t in_features, int64_t num_classes, const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, options)) {}
  explicit LinearCrossEntropyLoss(...) = delete; // expected: in_features, num_classes[, LossOptions]
};

/// What losses share that score candidates in train() and are exact in eval().
class CandidateLossImpl : public LinearLossImpl {
 public:
  CandidateLossImpl(const char* name, int64_t in_features, int64_t num_classes, const LossOptions& options);

 protected:
  torch::Tensor candidate_loss(const torch::Tensor& input, const torch::Tensor& target, const Proposal& sets, const torch::Tensor& log_z = {},
                               const std::optional<torch::Tensor>& target_prob = std::nullopt) const;
  /// The batch as samplers see it: queries [Q, D], multiplied by logit_scale, and targets. soft: of given probabilities.
  std::tuple<torch::Tensor, torch::Tensor> counted(const torch::Tensor& input, const torch::Tensor& target, bool soft = false) const;

  SampledSoftmaxOptions step_; ///< what the operator takes
};

/// Sampled in train(), exact in eval().
class SampledSoftmaxLossImpl : public CandidateLossImpl {
 public:
  /// `sampler` belongs to this loss; beside a head, `sampler->excluding(head)` takes its place. nullptr: candidates are the head and the negatives
  /// that calls give.
  SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes, std::shared_ptr<samplers::SamplerImpl> sampler, const SamplingOptions& sampling = {},
                         const LossOptions& options = {});
  /// A sampler by its name, "uniform", "midx", ... (xsoftmax::samplers::make_sampler).
  SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes, const std::string& sampler, const SamplingOptions& sampling = {},
                         const LossOptions& options = {});
  /// Draws from `generator`, or from the default one of input's device. negatives [P] or [*, P]: further candidates, -1 where there is none; without
  /// negative_log_count (of their shape) they are always there, and the sampler's counts are added. target_prob: as of exact, with estimator
  /// "sampled_softmax".
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, std::optional<at::Generator> generator = std::nullopt,
                        const std::optional<torch::Tensor>& negatives = std::nullopt, const std::optional<torch::Tensor>& negative_log_count = std::nullopt,
                        const std::optional<torch::Tensor>& target_prob = std::nullopt);
  /// The sampled loss, also in eval(), from the sampler as it is, without a refresh.
  torch::Tensor estimate(const torch::Tensor& input, const torch::Tensor& target, std::optional<at::Generator> generator = std::nullopt,
                         const std::optional<torch::Tensor>& negatives = std::nullopt, const std::optional<torch::Tensor>& negative_log_count = std::nullopt,
                         const std::optional<torch::Tensor>& target_prob = std::nullopt);
  /// One draw: the head and what the sampler proposes, for queries [Q, D] and target [Q] as a sampler takes them.
  Proposal propose(const torch::Tensor& queries, const torch::Tensor& target, std::optional<at::Generator> generator = std::nullopt);

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  using CandidateLossImpl::to;

  std::shared_ptr<samplers::SamplerImpl> sampler;
  torch::Tensor head;  ///< int64 [H], sorted; not in a checkpoint, which so goes with any head
  torch::Tensor log_z; ///< a parameter where it is learned, else undefined or a constant

 protected:
  std::vector<std::shared_ptr<samplers::SamplerImpl>> samplers_of_table() const override { return {sampler}; }
  torch::Tensor fixed_ids() const override { return head; }
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Generator>())}, {3, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {4, torch::nn::AnyValue(std::optional<torch::Tensor>())}, {5, torch::nn::AnyValue(std::optional<torch::Tensor>())})

 private:
  torch::Tensor sampled(const torch::Tensor& input, const torch::Tensor& target, bool prepares, std::optional<at::Generator> generator,
                        const std::optional<torch::Tensor>& negatives, const std::optional<torch::Tensor>& negative_log_count,
                        const std::optional<torch::Tensor>& target_prob);
};
class SampledSoftmaxLoss : public Holder<SampledSoftmaxLossImpl> {
 public:
  using Holder::Holder;
  /// sampler: UniformSampler(num_classes, 512), a pointer, ...
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, const samplers::Sampler& sampler, const SamplingOptions& sampling = {},
                     const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, sampler.or_null(), sampling, options)) {}
  /// Without a sampler: candidates are the head and the negatives of each call.
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, std::nullptr_t, const SamplingOptions& sampling = {}, const LossOptions& options = {})
      : SampledSoftmaxLoss(in_features, num_classes, samplers::Sampler(), sampling, options) {}
  /// sampler: "uniform", "midx", ..., with num_samples and shared of SamplingOptions.
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, const std::string& sampler, const SamplingOptions& sampling = {},
                     const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, sampler, sampling, options)) {}
  /// The same, with num_samples as an argument: SampledSoftmaxLoss(64, 10000, "uniform", 512).
  template <std::integral Count> // so that {} is SamplingOptions
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, const std::string& sampler, Count num_samples, const SamplingOptions& sampling = {},
                     const LossOptions& options = {})
      : SampledSoftmaxLoss(in_features, num_classes, sampler, with_num_samples(sampling, int64_t(num_samples)), options) {}
  template <std::same_as<LossOptions> Options>
  SampledSoftmaxLoss(int64_t, int64_t, const samplers::Sampler&, const Options&) = delete; // expected: SamplingOptions before LossOptions
  template <std::same_as<LossOptions> Options>
  SampledSoftmaxLoss(int64_t, int64_t, const std::string&, const Options&) = delete; // expected: SamplingOptions before LossOptions
  template <std::integral Count>
  SampledSoftmaxLoss(int64_t, int64_t, const samplers::Sampler&, Count, ...) = delete; // expected: num_samples in the sampler's constructor
  explicit SampledSoftmaxLoss(...) = delete; // expected: in_features, num_classes, sampler, nullptr or name[, num_samples][, SamplingOptions[, LossOptions]]

 private:
  static SamplingOptions with_num_samples(SamplingOptions sampling, int64_t num_samples);
};

/// How CANE finds candidates and draws noise.
struct CaneOptions {
  torch::Tensor candidates = {};              ///< int64 [C]: for all queries; or a sampler draws them; or each call says
  samplers::Sampler candidate_sampler = {};
  int64_t num_noises = 1;                     ///< for each query, from outside the candidates
  /// Private independent draws, tries * num_noises of them, or a name, such as "log_uniform", which
  /// has four tries; "uniform", and none, needs one.
  samplers::SamplerOrName noise_sampler = {};
  std::string noise_reduction = "mean_of_logs";                   ///< or "log_of_mean"
  std::optional<bool> sparse_grad = std::nullopt; ///< row-sparse gradient of the table, or dense; none: what costs less
};

/// Candidates against noises (Han et al., 2018, Algorithm 1) in train(), the exact loss in eval(). No label smoothing.
class CaneLossImpl : public CandidateLossImpl {
 public:
  CaneLossImpl(int64_t in_features, int64_t num_classes, const CaneOptions& cane, const LossOptions& options = {});
  /// candidates: [C] or [*, C], -1 where there is none, where the options name none.
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, const std::optional<torch::Tensor>& candidates = std::nullopt,
                        std::optional<at::Generator> generator = std::nullopt);

  std::shared_ptr<samplers::SamplerImpl> candidate_sampler;
  samplers::ComplementSampler noise{nullptr};

 protected:
  std::vector<std::shared_ptr<samplers::SamplerImpl>> samplers_of_table() const override;
  torch::Tensor fixed_ids() const override { return candidates_; }
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<torch::Tensor>())}, {3, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  torch::Tensor candidates_;
};
class CaneLoss : public Holder<CaneLossImpl> {
 public:
  using Holder::Holder;
  CaneLoss(int64_t in_features, int64_t num_classes, const CaneOptions& cane, const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, cane, options)) {}
  explicit CaneLoss(...) = delete; // expected: in_features, num_classes, CaneOptions[, LossOptions]
};

} // namespace xsoftmax::nn

#include <xsoftmax/tree_losses.h>
#include <xsoftmax/two_tower.h>
