#pragma once

// Losses over a class table, or over a tree of classes, as modules: the same as their namesakes in Python, with the same parameter names, so
// the state of one loads into the other.
//
//     xsoftmax::nn::SampledSoftmaxLoss loss(width, classes, xsoftmax::samplers::UniformSampler(classes).ptr(), {.num_samples = 512});
//     loss(hidden, target).backward();

#include <xsoftmax/samplers.h>
#include <xsoftmax/trees.h>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

namespace xsoftmax::nn {

/// What every loss over a class table takes.
struct LossOptions {
  bool bias = false;
  torch::Tensor weight = {};        ///< [N], rescales the loss of each class; undefined: none
  std::string reduction = "mean";   ///< "mean" (weighted, over targets that are not ignored), "sum" or "none"
  int64_t ignore_index = -100;      ///< targets of this value have no loss and no gradient
  double label_smoothing = 0.0;     ///< in [0, 1]
};

/// How candidates are drawn and weighed.
struct SamplingOptions {
  int64_t num_samples = 0;                    ///< draws for the batch (shared) or for each query
  std::optional<bool> shared = std::nullopt;  ///< none: as suits the sampler
  std::string estimator = "";                 ///< "sampled_softmax", "ranking", "nce", ...: see xsoftmax::candidate_loss. Empty: "ranking"
                                              ///< where a sampler follows the table and all draws are private and independent, else
                                              ///< "sampled_softmax"
  bool remove_accidental_hits = true;
  int64_t head_classes = 0;                   ///< so many of the first ids are always scored; the sampler draws from the rest
  torch::Tensor head = {};                    ///< or these ids, int64 [H]
  bool sparse_grad = true;                    ///< row-sparse gradient of the table
};

/// Base: the table as `linear`, the exact loss, prediction.
class LinearLossImpl : public torch::nn::Module {
 public:
  LinearLossImpl(int64_t in_features, int64_t num_classes, const LossOptions& options);

  /// The exact loss, without the [Q, N] logits: input [*, D], target [*] int64; a scalar, or [*] for "none".
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target) const;
  /// log_softmax(linear(input)): [*, N].
  torch::Tensor log_prob(const torch::Tensor& input);
  /// (log-probabilities, ids), both [*, k], best first.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k) const;
  /// The best class: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const;

  torch::nn::Linear linear{nullptr}; ///< share or tie the table by assigning linear->weight
  torch::Tensor weight;              ///< class weights, undefined: none

 protected:
  /// input as [Q, D]; checks that target fits.
  torch::Tensor flatten(const torch::Tensor& input, const torch::Tensor& target) const;

  int64_t num_classes_;
  LossOptions options_;
  int64_t reduction_;
};

/// The exact loss, in train() and eval() alike.
class LinearCrossEntropyLossImpl : public LinearLossImpl {
 public:
  LinearCrossEntropyLossImpl(int64_t in_features, int64_t num_classes, const LossOptions& options = {});
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);
};
TORCH_MODULE(LinearCrossEntropyLoss);

/// Sampled in train(), exact in eval().
class SampledSoftmaxLossImpl : public LinearLossImpl {
 public:
  /// `sampler` draws from num_classes classes; with a head it is replaced by `sampler->excluding(head)`.
  SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes, std::shared_ptr<samplers::SamplerImpl> sampler,
                         const SamplingOptions& sampling, const LossOptions& options = {});
  /// Draws from `generator`, or from the default one of input's device.
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, std::optional<at::Generator> generator = std::nullopt);

  /// The head and the sampler's tables move with the device alone.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// A checkpoint of LinearCrossEntropyLoss, or of a loss whose sampler keeps nothing, loads as well: the sampler stays as it is.
  void load(torch::serialize::InputArchive& archive) override;

  std::shared_ptr<samplers::SamplerImpl> sampler;
  torch::Tensor head; ///< int64 [H], sorted; not in a checkpoint, which so goes with any head

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  SamplingOptions sampling_;
  bool shared_, adaptive_; // adaptive_: the sampler, or one of a union, looks at the queries
};
TORCH_MODULE(SampledSoftmaxLoss);

/// How CANE finds candidates and draws noise.
struct CaneOptions {
  torch::Tensor candidates = {};              ///< int64 [C]: for all queries; or a sampler draws them; or each call says
  std::shared_ptr<samplers::SamplerImpl> candidate_sampler = nullptr;
  int64_t num_candidates = 0;                 ///< draws of the sampler
  std::optional<bool> shared = std::nullopt;  ///< one set for the batch; none: as suits the sampler
  int64_t num_noises = 1;                     ///< for each query, from outside the candidates
  std::shared_ptr<samplers::SamplerImpl> noise_sampler = nullptr; ///< none: uniform
  std::string noise_reduction = "mean_of_logs";                   ///< or "log_of_mean"
  bool sparse_grad = true;                    ///< row-sparse gradient of the table
};

/// Candidates against noises (CANE paper, Algorithm 1) in train(), the exact loss in eval(). No label smoothing.
class CaneLossImpl : public LinearLossImpl {
 public:
  CaneLossImpl(int64_t in_features, int64_t num_classes, const CaneOptions& cane, const LossOptions& options = {});
  /// candidates: [C] or [*, C], -1 where there is none, where the options name none.
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, const std::optional<torch::Tensor>& candidates = std::nullopt,
                        std::optional<at::Generator> generator = std::nullopt);

  std::shared_ptr<samplers::SamplerImpl> candidate_sampler, noise_sampler;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<torch::Tensor>())}, {3, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  torch::Tensor find_candidates(const torch::Tensor& queries, at::IntArrayRef batch, const std::optional<torch::Tensor>& given,
                                std::optional<at::Generator> generator);

  CaneOptions cane_;
  std::shared_ptr<samplers::ComplementSampler> noise_;
  std::string estimator_;
  bool shared_ = true;
};
TORCH_MODULE(CaneLoss);

/// Base of losses over a tree, of which each keeps a copy: a row of parameters on each edge.
class TreeLossImpl : public torch::nn::Module {
 public:
  TreeLossImpl(const char* name, int64_t in_features, LabelTree tree, const LossOptions& options, bool sparse_grad);

  /// The best class: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const { return std::get<1>(topk(input, 1)).squeeze(-1); }
  /// (scores or log-probabilities, ids), both [*, k], best first; -inf and -1 behind the last of fewer.
  virtual std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k) const = 0;
  /// log-probabilities of all classes: [*, N].
  virtual torch::Tensor log_prob(const torch::Tensor& input) = 0;

  torch::nn::Linear edges{nullptr}; ///< edge e ends in node e + 1 of the tree
  LabelTree tree{nullptr};
  torch::Tensor weight;             ///< class weights, undefined: none

 protected:
  torch::Tensor flatten(const torch::Tensor& input, const torch::Tensor& target) const;
  /// The leaf of each target, the root where it is ignored: [Q].
  torch::Tensor leaves(const torch::Tensor& target) const;
  torch::Tensor reduced(const torch::Tensor& loss, const torch::Tensor& target) const;
  void check_k(int64_t k) const; // of topk

  const char* name_;
  LossOptions options_;
  bool sparse_grad_;
};

/// Hierarchical softmax over any tree (Morin and Bengio, 2005): exact and normalised, O(depth * arity) a query.
class HierarchicalSoftmaxLossImpl : public TreeLossImpl {
 public:
  HierarchicalSoftmaxLossImpl(int64_t in_features, LabelTree tree, const LossOptions& options = {}, bool sparse_grad = true);
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k) const override;
  torch::Tensor log_prob(const torch::Tensor& input) override;
};
TORCH_MODULE(HierarchicalSoftmaxLoss);

struct BeamTreeOptions {
  int64_t num_candidates = 0;   ///< the best of what the beam finds
  int64_t num_noises = 0;       ///< for each query, from outside the candidates
  std::optional<int64_t> beam = std::nullopt; ///< the width of the search; none: num_candidates
  std::shared_ptr<samplers::SamplerImpl> noise_sampler = nullptr; ///< none: uniform
  std::string noise_reduction = "mean_of_logs";                   ///< or "log_of_mean"
  bool routed = false;          ///< candidates drawn from the best subset of a tree of one layer of subsets
  std::optional<int64_t> balance_every = std::nullopt; ///< steps; none: 100, more for large trees; 0: never
  bool sparse_grad = true;
};

/// The beam tree (CANE paper, Algorithm 2): CANE in train(), whose candidates a beam search finds; in eval() the exact loss over all paths.
class BeamTreeLossImpl : public TreeLossImpl {
 public:
  BeamTreeLossImpl(int64_t in_features, LabelTree tree, const BeamTreeOptions& beam, const LossOptions& options = {});
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, std::optional<at::Generator> generator = std::nullopt);
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target);
  /// Of all classes: [*, N].
  torch::Tensor scores(const torch::Tensor& input);
  torch::Tensor log_prob(const torch::Tensor& input) override;
  /// What a beam of the larger of k and BeamTreeOptions::beam finds; scores, not normalised.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k) const override;
  /// What a step takes as candidates: [*, D] -> int64 [*, num_candidates], -1 where there are fewer.
  torch::Tensor candidates(const torch::Tensor& input, std::optional<at::Generator> generator = std::nullopt) const;
  /// Moves what the children of a node have in common to the edge above it. No score changes; the beam finds more. A loss that waits for its
  /// backward pass keeps its gradient: it depends on sums along whole paths alone.
  void balance();

  std::shared_ptr<samplers::SamplerImpl> noise_sampler;
  torch::Tensor steps; ///< of training

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  torch::Tensor class_scores(const torch::Tensor& queries);

  BeamTreeOptions beam_;
  std::shared_ptr<samplers::ComplementSampler> noise_;
  std::string estimator_;
  int64_t balance_every_;
};
TORCH_MODULE(BeamTreeLoss);

} // namespace xsoftmax::nn
