#pragma once

// Loss modules over a class table, over a tree of classes, or over the vectors of two towers. Each
// equals its namesake in Python and has the same parameter names, so the state of one loads into
// the other.
//
//     xsoftmax::samplers::UniformSampler sampler(classes, 512);
//     xsoftmax::nn::SampledSoftmaxLoss loss(width, classes, sampler);
//     loss(hidden, target).backward();

#include <xsoftmax/holder.h>
#include <xsoftmax/options.h>
#include <xsoftmax/samplers.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// Gradients of batches whose activations do not fit into memory.

namespace xsoftmax {

/// A network and its input tensors, which all have the same first dimension.
struct CachedTower {
  /// returns one row per row of its inputs
  std::function<torch::Tensor(const std::vector<torch::Tensor>&)> tower;
  std::vector<torch::Tensor> inputs;
};

/// Computes the gradients of loss(vectors), where `vectors` holds the output [Q, D] of each tower,
/// with the activations of only one chunk of one tower in memory: xsoftmax.cached_step in Python
/// (Gao et al., 2021). Each tower first runs over its chunks without gradients. The loss of all
/// vectors then yields their gradients, and each chunk runs again with gradients.
///
///     const auto value = xsoftmax::cached_step(
///         [&](const auto& vectors) { return loss(vectors[0], vectors[1], item_id); },
///         {{[&](const auto& x) { return query_tower(x[0]); }, {queries}},
///          {[&](const auto& x) { return item_tower(x[0]); }, {items}}},
///         256);
///
/// Dropout uses the same mask in both passes.
///
/// - loss: returns a scalar.
/// - chunk_size: rows per chunk, at least 1.
/// - backward: starts the backward pass of the loss; null: value.backward().
///
/// Returns the loss, without gradient. Throws ValueError for a chunk_size below 1, for inputs with
/// different batch sizes, and for a tower that does not return one row per input row.
torch::Tensor cached_step(
    const std::function<torch::Tensor(const std::vector<torch::Tensor>&)>& loss,
    const std::vector<CachedTower>& towers, int64_t chunk_size,
    const std::function<void(const torch::Tensor&)>& backward = nullptr);

} // namespace xsoftmax

namespace xsoftmax::nn {

/// Options of every loss over a class table.
struct LossOptions {
  /// An existing layer whose rows are the classes and whose parameters the loss shares
  /// (`from_linear` in Python). Empty: the loss creates one.
  torch::nn::Linear linear{nullptr};
  bool bias = false; ///< whether a table that the loss creates has a bias
  torch::Tensor weight = {}; ///< [N], rescales the loss of each class; undefined: no weights
  /// "mean" (weighted, over targets that are not ignored), "sum" or "none"
  std::string reduction = "mean";
  int64_t ignore_index = -100; ///< targets with this value have no loss and no gradient
  double label_smoothing = 0.0; ///< in [0, 1]
  /// Above 0. Logits are softcap * tanh(logit_scale * linear(input) / softcap); see LogitOptions.
  double logit_scale = 1.0;
  double softcap = 0.0; ///< above 0, or 0 for logits of logit_scale * linear(input)
  /// Adds z_loss * (log normaliser)^2 to the loss of each query; in train(), an estimate of it.
  double z_loss = 0.0;
  /// memory of a step of the exact loss on CUDA, in MB; see CrossEntropyOptions
  int64_t workspace_mb = 512;
  /// how the losses of multiple positives are reduced, for target [*, T]; see PositivesOptions
  std::string positives = "mean";
};

/// How candidates are sampled and weighted.
struct SamplingOptions {
  /// "sampled_softmax", "ranking", "nce", ... (see xsoftmax::candidate_loss), or
  /// "complementary_sum", which samples from the classes other than the target. Empty: the
  /// sampler's default estimator.
  std::string estimator = "";
  bool remove_accidental_hits = true;
  /// int64 [H], classes that are always scored, for example at::arange(512) for the first ones. The
  /// sampler draws from the other classes. If it cannot exclude classes, expected counts add up.
  torch::Tensor head = {};
  double log_z = 0.0; ///< for "nce": the value that is subtracted from all scores
  bool learn_log_z = false; ///< whether log_z is a parameter, initialised with that value
  /// whether the table's gradient is row-sparse; nullopt: the cheaper of the two
  std::optional<bool> sparse_grad = std::nullopt;
  /// for a sampler given by name: draws for the batch (shared) or per query
  std::optional<int64_t> num_samples = std::nullopt;
  /// for a sampler given by name; nullopt: the sampler's default
  std::optional<bool> shared = std::nullopt;
};

/// Base class of losses over a table of rows, one for each class or each edge of a tree. Methods
/// that read the whole table first call catch_up(), which applies the pending updates of row
/// optimizers.
class TableLossImpl : public torch::nn::Module {
 public:
  void catch_up() const;
  void train(bool on = true) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Loads the module's state. Entries that losses of another kind do not have, such as the state
  /// of a sampler, may be missing and keep their values.
  void load(torch::serialize::InputArchive& archive) override;
  /// Moves or casts the module. Step counts keep their dtype and stay on the CPU.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor weight; ///< class weights; undefined: none

 protected:
  /// optional: names of modules, buffers and parameters that a checkpoint may lack.
  TableLossImpl(const char* name, int64_t num_classes, const LossOptions& options,
                std::vector<std::string> optional);
  virtual const torch::nn::Linear& table() const = 0;

  const char* name_;
  int64_t num_classes_;
  LossOptions options_;

 private:
  std::vector<std::string> optional_;
};

/// Base class of losses whose table is the module `linear`. Provides the exact loss and
/// predictions.
class LinearLossImpl : public TableLossImpl {
 public:
  LinearLossImpl(const char* name, int64_t in_features, int64_t num_classes,
                 const LossOptions& options);

  /// Returns the exact loss without storing the [Q, N] logits: a scalar, or [*] for reduction
  /// "none".
  ///
  /// - input: [*, D].
  /// - target: int64 [*].
  /// - target_prob: floating [*, T], together with target [*, T]; see xsoftmax::linear_soft_loss.
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target,
                      const std::optional<torch::Tensor>& target_prob = std::nullopt) const;
  /// Returns the log_softmax of the logits, [*, N], or only of ids [*] or [*, K], without storing
  /// [*, N]. The logits are linear(input), transformed as LossOptions say.
  torch::Tensor log_prob(const torch::Tensor& input,
                         const std::optional<torch::Tensor>& ids = std::nullopt);
  /// Returns the entropy of the softmax of each query, [*], without storing [*, N].
  torch::Tensor entropy(const torch::Tensor& input);
  /// Returns (log-probabilities, ids) of the k best classes, both [*, k], best first. exclude: ids
  /// [*, E] to exclude per query, -1 as padding; probabilities remain those among all classes.
  /// Padded with -inf and -1 if fewer than k classes remain.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k,
                                                const torch::Tensor& exclude = {}) const;
  /// Returns the best class of each query: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const;

  /// Changes the number of classes in place. New classes are appended and initialised like
  /// torch::nn::Linear; classes past the new end are removed.
  ///
  /// The parameters remain the same tensors. The remaining rows keep their values and their
  /// optimizer state; new rows start as before their first step. Gradients are dropped. Row
  /// optimizers of this library follow, but optimizers of torch::optim do not: construct new ones.
  ///
  /// The amortised cost is that of the new rows. Samplers rebuild their tables in O(N) if classes
  /// are removed that were not just added, and if classes are added to an index that draws without
  /// replacement.
  ///
  /// - class_weight: weights of the new classes, if the loss has class weights; undefined: 1.
  ///
  /// Before anything changes, throws ValueError for invalid arguments, and TypeError for a sampler
  /// that does not override plan_resize. If memory runs out while a sampler is resized, the tables
  /// may already have their new size; the loss then refuses them until this function is called
  /// again.
  void resize_classes(int64_t num_classes, const torch::Tensor& class_weight = {});

  torch::nn::Linear linear{nullptr}; ///< to share or tie the table, assign linear->weight

 protected:
  /// Returns the samplers that are resized together with the table.
  virtual std::vector<std::shared_ptr<samplers::SamplerImpl>> samplers_of_table() const {
    return {};
  }
  /// Returns the classes that a resize must not remove; undefined: none.
  virtual torch::Tensor fixed_ids() const { return {}; }
  void check_table(const torch::Tensor& input, const torch::Tensor& target = {}) const;
  LogitOptions logit_options() const;
  const torch::nn::Linear& table() const override { return linear; }
};

/// The exact cross-entropy loss, in both train() and eval().
class LinearCrossEntropyLossImpl : public LinearLossImpl {
 public:
  LinearCrossEntropyLossImpl(int64_t in_features, int64_t num_classes,
                             const LossOptions& options = {});
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target,
                        const std::optional<torch::Tensor>& target_prob = std::nullopt);

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<torch::Tensor>())})
};
class LinearCrossEntropyLoss : public Holder<LinearCrossEntropyLossImpl> {
 public:
  using Holder::Holder;
  LinearCrossEntropyLoss(int64_t in_features, int64_t num_classes, const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, options)) {}
  explicit LinearCrossEntropyLoss(...) = delete; // expected: in_features, num_classes[, options]
};

/// Base class of losses that score candidates in train() and are exact in eval().
class CandidateLossImpl : public LinearLossImpl {
 public:
  CandidateLossImpl(const char* name, int64_t in_features, int64_t num_classes,
                    const LossOptions& options);

 protected:
  torch::Tensor candidate_loss(
      const torch::Tensor& input, const torch::Tensor& target, const Proposal& sets,
      const torch::Tensor& log_z = {},
      const std::optional<torch::Tensor>& target_prob = std::nullopt) const;
  /// Returns the batch as samplers take it: queries [Q, D], multiplied by logit_scale, and targets,
  /// with 0 and -1 for ignored queries. soft: the targets have probabilities.
  std::tuple<torch::Tensor, torch::Tensor> counted(const torch::Tensor& input,
                                                   const torch::Tensor& target,
                                                   bool soft = false) const;

  SampledSoftmaxOptions step_; ///< the options that the operator takes
};

/// The softmax loss over a class table, estimated from sampled candidates in train() and exact in
/// eval().
class SampledSoftmaxLossImpl : public CandidateLossImpl {
 public:
  /// Takes ownership of `sampler`. If there is a head, `sampler->excluding(head)` replaces it.
  /// nullptr: the candidates are the head and the negatives of each call.
  SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes,
                         std::shared_ptr<samplers::SamplerImpl> sampler,
                         const SamplingOptions& sampling = {}, const LossOptions& options = {});
  /// Constructs the sampler by name: "uniform", "midx", ... (see xsoftmax::samplers::make_sampler).
  SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes, const std::string& sampler,
                         const SamplingOptions& sampling = {}, const LossOptions& options = {});
  /// Returns the loss: a scalar, or [*] for reduction "none".
  ///
  /// - generator: draws the candidates; nullopt: the default generator of input's device.
  /// - negatives: [P] or [*, P], additional candidates, -1 as padding.
  /// - negative_log_count: the shape of negatives, their log expected counts. nullopt: negatives
  ///   are always scored, and the sampler's expected counts are added to their count of 1.
  /// - target_prob: as in exact, for the estimator "sampled_softmax".
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target,
                        std::optional<at::Generator> generator = std::nullopt,
                        const std::optional<torch::Tensor>& negatives = std::nullopt,
                        const std::optional<torch::Tensor>& negative_log_count = std::nullopt,
                        const std::optional<torch::Tensor>& target_prob = std::nullopt);
  /// Returns the sampled loss, also in eval(). The sampler is used without refreshing it.
  torch::Tensor estimate(const torch::Tensor& input, const torch::Tensor& target,
                         std::optional<at::Generator> generator = std::nullopt,
                         const std::optional<torch::Tensor>& negatives = std::nullopt,
                         const std::optional<torch::Tensor>& negative_log_count = std::nullopt,
                         const std::optional<torch::Tensor>& target_prob = std::nullopt);
  /// Draws candidates: the head and the sampler's sets, for queries [Q, D] and target [Q] as
  /// SamplerImpl::sample takes them.
  Proposal propose(const torch::Tensor& queries, const torch::Tensor& target,
                   std::optional<at::Generator> generator = std::nullopt);

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  using CandidateLossImpl::to;

  std::shared_ptr<samplers::SamplerImpl> sampler;
  /// int64 [H], sorted; not saved, so a checkpoint loads into a loss with any head
  torch::Tensor head;
  torch::Tensor log_z; ///< a parameter if it is learned; otherwise undefined or a constant

 protected:
  std::vector<std::shared_ptr<samplers::SamplerImpl>> samplers_of_table() const override {
    return {sampler};
  }
  torch::Tensor fixed_ids() const override { return head; }
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Generator>())},
                           {3, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {4, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {5, torch::nn::AnyValue(std::optional<torch::Tensor>())})

 private:
  torch::Tensor sampled(const torch::Tensor& input, const torch::Tensor& target, bool prepares,
                        std::optional<at::Generator> generator,
                        const std::optional<torch::Tensor>& negatives,
                        const std::optional<torch::Tensor>& negative_log_count,
                        const std::optional<torch::Tensor>& target_prob);
};
class SampledSoftmaxLoss : public Holder<SampledSoftmaxLossImpl> {
 public:
  using Holder::Holder;
  /// sampler: UniformSampler(num_classes, 512), a pointer, ...
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, const samplers::Sampler& sampler,
                     const SamplingOptions& sampling = {}, const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, sampler.or_null(), sampling,
                                      options)) {}
  /// Constructs the loss without a sampler: candidates are the head and the negatives of each call.
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, std::nullptr_t,
                     const SamplingOptions& sampling = {}, const LossOptions& options = {})
      : SampledSoftmaxLoss(in_features, num_classes, samplers::Sampler(), sampling, options) {}
  /// sampler: "uniform", "midx", ..., with num_samples and shared from SamplingOptions.
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, const std::string& sampler,
                     const SamplingOptions& sampling = {}, const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, sampler, sampling, options)) {}
  /// Takes num_samples as an argument: SampledSoftmaxLoss(64, 10000, "uniform", 512).
  template <std::integral Count> // so that {} is SamplingOptions
  SampledSoftmaxLoss(int64_t in_features, int64_t num_classes, const std::string& sampler,
                     Count num_samples, const SamplingOptions& sampling = {},
                     const LossOptions& options = {})
      : SampledSoftmaxLoss(in_features, num_classes, sampler,
                           with_num_samples(sampling, int64_t(num_samples)), options) {}
  template <std::same_as<LossOptions> Options>
  SampledSoftmaxLoss(int64_t, int64_t, const samplers::Sampler&, // expected: SamplingOptions first
                     const Options&) = delete;
  template <std::same_as<LossOptions> Options>
  SampledSoftmaxLoss(int64_t, int64_t, const std::string&, // expected: SamplingOptions first
                     const Options&) = delete;
  template <std::integral Count>
  SampledSoftmaxLoss(int64_t, int64_t, const samplers::Sampler&, Count, // expected: sampler alone
                     ...) = delete; // expected: num_samples in its constructor
  explicit SampledSoftmaxLoss(...) = delete; // expected: in_features, num_classes, sampler[, ...]

 private:
  static SamplingOptions with_num_samples(SamplingOptions sampling, int64_t num_samples);
};

/// How CANE finds candidates and samples noise.
struct CaneOptions {
  /// int64 [C], candidates for all queries; or set candidate_sampler, or pass them to each call
  torch::Tensor candidates = {};
  samplers::Sampler candidate_sampler = {};
  int64_t num_noises = 1; ///< noise samples per query, from outside the candidates
  /// A sampler of private draws with replacement, tries * num_noises of them, or its name, such as
  /// "log_uniform", which uses four tries. "uniform", the default, needs only one.
  samplers::SamplerOrName noise_sampler = {};
  std::string noise_reduction = "mean_of_logs"; ///< "mean_of_logs" or "log_of_mean"
  /// whether the table's gradient is row-sparse; nullopt: the cheaper of the two
  std::optional<bool> sparse_grad = std::nullopt;
};

/// CANE: scores candidates against noise samples (Han et al., 2018, Algorithm 1) in train(), and is
/// the exact loss in eval(). Does not support label smoothing.
class CaneLossImpl : public CandidateLossImpl {
 public:
  CaneLossImpl(int64_t in_features, int64_t num_classes, const CaneOptions& cane,
               const LossOptions& options = {});
  /// Returns the loss. candidates: [C] or [*, C], -1 as padding, if the options specify none.
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target,
                        const std::optional<torch::Tensor>& candidates = std::nullopt,
                        std::optional<at::Generator> generator = std::nullopt);

  std::shared_ptr<samplers::SamplerImpl> candidate_sampler;
  samplers::ComplementSampler noise{nullptr};

 protected:
  std::vector<std::shared_ptr<samplers::SamplerImpl>> samplers_of_table() const override;
  torch::Tensor fixed_ids() const override { return candidates_; }
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {3, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  torch::Tensor candidates_;
};
class CaneLoss : public Holder<CaneLossImpl> {
 public:
  using Holder::Holder;
  CaneLoss(int64_t in_features, int64_t num_classes, const CaneOptions& cane,
           const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, num_classes, cane, options)) {}
  explicit CaneLoss(...) = delete; // expected: in_features, num_classes, CaneOptions[, LossOptions]
};

} // namespace xsoftmax::nn

// The loss of two towers as a module.
//
//     xsoftmax::TwoTowerOptions options{
//         .num_items = items, .temperature = 0.1, .similarity = "cosine"};
//     xsoftmax::nn::TwoTowerLoss loss(options);
//     loss(query_tower(users), item_tower(items), item_id).backward();

namespace xsoftmax::nn {

using xsoftmax::TwoTowerOptions;

/// Scores each query against its item. The candidates are the items of the batch, items of past
/// batches, and additional negatives. See xsoftmax.TwoTowerLoss in Python, which has the same state
/// names. The counts and the memory are updated in train() only.
class TwoTowerLossImpl : public torch::nn::Module {
 public:
  /// Counts the ids without decay: options.num_items dense ids, or open ids.
  explicit TwoTowerLossImpl(const TwoTowerOptions& options = {});
  /// Uses the given counts; nullptr: no correction for frequencies. learn_temperature: whether the
  /// temperature is a parameter.
  TwoTowerLossImpl(const TwoTowerOptions& options, samplers::StreamingCounts counts,
                   bool learn_temperature = false);

  /// Returns the loss: a scalar, or [Q] for reduction "none".
  ///
  /// - query and item: [Q, D].
  /// - item_id: int64 [Q].
  /// - negatives: vectors and ids, ([S, D], [S]) shared by all queries or ([Q, P, D], [Q, P]).
  /// - weight: [Q].
  torch::Tensor forward(
      const torch::Tensor& query, const torch::Tensor& item, const torch::Tensor& item_id,
      const std::optional<std::tuple<torch::Tensor, torch::Tensor>>& negatives = std::nullopt,
      const std::optional<torch::Tensor>& weight = std::nullopt);

  /// Returns (log-probabilities, rows of item_vectors), both [*, k], best first:
  /// log_softmax(scores, -1).topk(k), where scores are query @ item_vectors.T / temperature, or
  /// cosines if similarity is "cosine".
  ///
  /// - query: [*, D].
  /// - item_vectors: [N, D].
  /// - exclude: rows [*, E] to exclude per query, -1 as padding.
  ///
  /// Padded with -inf and -1 if fewer than k rows remain.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& query,
                                                const torch::Tensor& item_vectors, int64_t k,
                                                const torch::Tensor& exclude = {}) const;

  /// Changes the number of items in place. New items start as never seen; items past the new end
  /// are removed from the counts and the memory. Does nothing if any int64 is an id. Throws
  /// ValueError before anything changes.
  void resize_classes(int64_t num_items);

  /// Moves or casts the module. Ids and counts keep their dtype, as does a temperature that is not
  /// learned.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor temperature; ///< 0-dim: a parameter, or a float64 constant that is not saved
  samplers::StreamingCounts counts{nullptr};
  /// [M, D], [M], and [2]: number of items and of calls so far
  torch::Tensor memory, memory_id, memory_state;

 protected:
  FORWARD_HAS_DEFAULT_ARGS(
      {3, torch::nn::AnyValue(std::optional<std::tuple<torch::Tensor, torch::Tensor>>())},
      {4, torch::nn::AnyValue(std::optional<torch::Tensor>())})

 private:
  std::string options_;
};
class TwoTowerLoss : public Holder<TwoTowerLossImpl> {
 public:
  using Holder::Holder;
  explicit TwoTowerLoss(const TwoTowerOptions& options = {})
      : Holder(std::make_shared<Impl>(options)) {}
  TwoTowerLoss(const TwoTowerOptions& options, samplers::StreamingCounts counts,
               bool learn_temperature = false)
      : Holder(std::make_shared<Impl>(options, std::move(counts), learn_temperature)) {}
  explicit TwoTowerLoss(const Anything&, ...) = delete; // expected: [options[, counts[, ...]]]
};

} // namespace xsoftmax::nn
