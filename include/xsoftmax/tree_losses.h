#pragma once

// Losses over a tree of classes as modules: the same as their namesakes in Python, with the same names of state.
//
//     xsoftmax::nn::BeamTreeLoss loss(width, xsoftmax::LabelTree::from_vectors(class_means), {.num_candidates = 5, .num_noises = 5});

#include <xsoftmax/loss_options.h>
#include <xsoftmax/nn.h>
#include <xsoftmax/trees.h>

namespace xsoftmax {

/// What hierarchical_softmax_loss takes.
struct HierarchicalSoftmaxOptions : ReductionOptions {
  std::optional<bool> sparse_grad = std::nullopt; ///< of the edges, as of the table in SampledSoftmaxOptions

  template <typename Visitor>
  void visit(Visitor& visitor) {
    ReductionOptions::visit(visitor);
    visitor("sparse_grad", sparse_grad);
  }
  bool operator==(const HierarchicalSoftmaxOptions&) const = default;
};

/// What beam_tree_candidates takes.
struct BeamOptions {
  int64_t num_candidates = 1;
  int64_t beam = 1;    ///< the width of the search, at least num_candidates
  bool routed = false; ///< drawn from the best subset of a tree of one layer of subsets

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("num_candidates", num_candidates);
    visitor("beam", beam);
    visitor("routed", routed);
  }
  bool operator==(const BeamOptions&) const = default;
};

/// Options of a training step of BeamTreeLoss: those of the loss and of the search, and how often edges are balanced.
struct BeamTreeStepOptions : SampledSoftmaxOptions, BeamOptions {
  int64_t balance_every = 0;     ///< training steps; 0: edges are never balanced
  bool balances_16_bits = false; ///< edges of 16 bits are balanced as well

  template <typename Visitor>
  void visit(Visitor& visitor) {
    SampledSoftmaxOptions::visit(visitor);
    BeamOptions::visit(visitor);
    visitor("balance_every", balance_every);
    visitor("balances_16_bits", balances_16_bits);
  }
  bool operator==(const BeamTreeStepOptions&) const = default;
};

namespace nn {

/// Base of modules over a tree, of which each keeps a copy: a row of parameters on each edge.
class TreeTableImpl : public TableLossImpl {
 public:
  void load(torch::serialize::InputArchive& archive) override;

  torch::nn::Linear edges{nullptr}; ///< edge e ends in node e + 1 of the tree
  LabelTree tree{nullptr};

 protected:
  /// optional: names of modules and buffers that a checkpoint may lack.
  TreeTableImpl(const char* name, int64_t in_features, const LabelTree& tree, const LossOptions& options, std::vector<std::string> optional);
  /// Returns the tree of a checkpoint, or that of the module where it holds none.
  LabelTree tree_of(torch::serialize::InputArchive& archive) const;
  /// Checks a tree that is about to be loaded: it has as many nodes.
  virtual void check_tree(const LabelTree& loaded) const;
  void check_k(int64_t k) const; // of topk
  const torch::nn::Linear& table() const override { return edges; }
  std::optional<torch::Tensor> bias() const;
};

/// Base of losses over a tree. Losses over one tree share their checkpoints.
class TreeLossImpl : public TreeTableImpl {
 public:
  TreeLossImpl(const char* name, int64_t in_features, LabelTree tree, const LossOptions& options);

  /// The best class: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const { return std::get<1>(topk(input, 1)).squeeze(-1); }
  /// (scores or log-probabilities, ids), both [*, k], best first; -inf and -1 behind the last of fewer. exclude: ids [*, E] that a query does not want, -1 for
  /// none.
  virtual std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k, const torch::Tensor& exclude = {}) const = 0;
  /// log-probabilities of all classes: [*, N].
  virtual torch::Tensor log_prob(const torch::Tensor& input) = 0;

 protected:
  std::optional<torch::Tensor> class_weight() const;
};

/// Hierarchical softmax over any tree (Morin and Bengio, 2005): exact and normalised, O(depth * arity) a query.
class HierarchicalSoftmaxLossImpl : public TreeLossImpl {
 public:
  HierarchicalSoftmaxLossImpl(int64_t in_features, LabelTree tree, const LossOptions& options = {}, std::optional<bool> sparse_grad = std::nullopt);
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);
  /// The loss itself, which is exact.
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target) const;
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k, const torch::Tensor& exclude = {}) const override;
  torch::Tensor log_prob(const torch::Tensor& input) override;

 private:
  torch::Tensor loss(const torch::Tensor& input, const torch::Tensor& target) const;

  HierarchicalSoftmaxOptions step_;
};
class HierarchicalSoftmaxLoss : public Holder<HierarchicalSoftmaxLossImpl> {
 public:
  using Holder::Holder;
  HierarchicalSoftmaxLoss(int64_t in_features, LabelTree tree, const LossOptions& options = {}, std::optional<bool> sparse_grad = std::nullopt)
      : Holder(std::make_shared<Impl>(in_features, std::move(tree), options, sparse_grad)) {}
  explicit HierarchicalSoftmaxLoss(...) = delete; // expected: in_features, LabelTree[, LossOptions[, sparse_grad]]
};

struct BeamTreeOptions {
  int64_t num_candidates = 0;   ///< the best of what the beam finds
  int64_t num_noises = 0;       ///< for each query, from outside the candidates
  std::optional<int64_t> beam = std::nullopt; ///< the width of the search; none: num_candidates
  /// Private independent draws, tries * num_noises of them, or a name, such as "log_uniform", which
  /// has four tries; "uniform", and none, needs one. It follows no
  /// class table.
  samplers::SamplerOrName noise_sampler = {};
  std::string noise_reduction = "mean_of_logs";                   ///< or "log_of_mean"
  bool routed = false;          ///< candidates drawn from the best subset of a tree of one layer of subsets
  std::optional<int64_t> balance_every = std::nullopt; ///< steps; none: 100, more for large trees; 0: never
  std::optional<bool> sparse_grad = std::nullopt; ///< as in SampledSoftmaxOptions
};

/// The beam tree (Han et al., 2018, Algorithm 2): CANE in train(), whose candidates a beam search finds; in eval() the exact loss over all paths.
class BeamTreeLossImpl : public TreeLossImpl {
 public:
  BeamTreeLossImpl(int64_t in_features, LabelTree tree, const BeamTreeOptions& beam, const LossOptions& options = {});
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, std::optional<at::Generator> generator = std::nullopt);
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target) const;
  /// Of all classes: [*, N].
  torch::Tensor scores(const torch::Tensor& input);
  /// The same scores as a plain table: weight [N, D], and bias [N] or undefined.
  std::tuple<torch::Tensor, torch::Tensor> class_table() const;
  torch::Tensor log_prob(const torch::Tensor& input) override;
  /// What a beam of the larger of k and BeamTreeOptions::beam finds, or one of `width`, wider by what is excluded; scores, not normalised.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k, const torch::Tensor& exclude = {}) const override {
    return topk(input, k, std::nullopt, exclude);
  }
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k, std::optional<int64_t> width, const torch::Tensor& exclude = {}) const;
  /// What a step takes as candidates: [*, D] -> int64 [*, num_candidates], -1 where there are fewer.
  torch::Tensor candidates(const torch::Tensor& input, std::optional<at::Generator> generator = std::nullopt) const;
  /// Moves what the children of a node have in common to the edge above it. No score changes; the beam finds more. A loss that waits for its
  /// backward pass keeps its gradient: it depends on sums along whole paths alone.
  void balance();

  samplers::ComplementSampler noise{nullptr};
  torch::Tensor steps; ///< of training

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  void check_tree(const LabelTree& loaded) const override;

  BeamTreeStepOptions step_;
};
class BeamTreeLoss : public Holder<BeamTreeLossImpl> {
 public:
  using Holder::Holder;
  BeamTreeLoss(int64_t in_features, LabelTree tree, const BeamTreeOptions& beam, const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, std::move(tree), beam, options)) {}
  explicit BeamTreeLoss(...) = delete; // expected: in_features, LabelTree, BeamTreeOptions[, LossOptions]
};

} // namespace nn
} // namespace xsoftmax
