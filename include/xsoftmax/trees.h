#pragma once

// Trees whose leaves are the classes, for the tree losses below: the same as xsoftmax.LabelTree in
// Python, with the same buffers.
//
//     auto tree = xsoftmax::LabelTree::from_vectors(class_means, {.arity = 8});

#include <xsoftmax/nn.h>

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

namespace xsoftmax {

/// Options of LabelTree::from_vectors.
struct TreeFromVectors {
  int64_t arity = 10;
  int64_t iterations = 10; ///< iterations of each K-means
  /// 0: recursive K-means with `arity` clusters, whose leaves fill a balanced tree from left to
  /// right (Han et al., 2018, appendix C). Above 0: balanced 2-means splits the classes into
  /// clusters of at most this size, below as few layers of at most `arity` children as possible (Yu
  /// et al., 2022, section 2.1). This is the tree of a hierarchical matcher.
  int64_t max_leaf_size = 0;
  /// If max_leaf_size is set: whether centres are normalised, so that only directions matter. The
  /// vectors should then be normalised too.
  bool spherical = true;
  /// If max_leaf_size is set: whether siblings have equal sizes. If not, each class goes to the
  /// closer centre, so that clusters of similar classes stay together (Bonsai; Khandagale et al.,
  /// 2020); paths to small clusters have nodes with a single child, so that all
  /// classes are on the last layer.
  bool balanced = true;

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("arity", arity);
    visitor("iterations", iterations);
    visitor("max_leaf_size", max_leaf_size);
    visitor("spherical", spherical);
    visitor("balanced", balanced);
  }
};

/// A tree whose leaves are the classes. Nodes are numbered breadth-first: node 0 is the root, and
/// the children of a node are consecutive. Each node other than the root is identified with the
/// edge that leads to it: edge e ends in node e + 1. Trees may have any shape: leaves at any depth,
/// nodes with one child, a single node.
class LabelTreeImpl : public torch::nn::Module {
 public:
  /// Builds a tree from parent indices. Throws ValueError for no root or several roots, a cycle, a
  /// parent that is not a node, a leaf without a class, and a class that is repeated or missing.
  ///
  /// - parents: int64 [V], in any numbering, -1 for the root.
  /// - classes: int64 [V], the class of each leaf, -1 for inner nodes. Undefined: the leaves are
  ///   the classes in the order of their nodes.
  explicit LabelTreeImpl(const torch::Tensor& parents, const torch::Tensor& classes = {});

  /// Returns the nodes on the path to each class of `ids` [*], without the root: [*, depth], padded
  /// with -1 after the leaf.
  torch::Tensor path(const torch::Tensor& ids) const;
  /// Replaces this tree by the loaded one.
  void load(torch::serialize::InputArchive& archive) override;
  /// Moves the buffers to another device. They stay int64, whatever the dtype of the loss.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  int64_t num_classes() const { return class_node.size(0); }
  int64_t num_nodes() const { return parent.size(0); }
  int64_t num_edges() const { return num_nodes() - 1; }
  int64_t depth() const { return int64_t(layer_sizes.size()); }
  int64_t arity() const {
    return group_sizes.empty() ? 0 : *std::max_element(group_sizes.begin(), group_sizes.end());
  }
  /// Returns first_child, parent, node_class and class_node, as operators take them.
  std::vector<torch::Tensor> tables() const {
    return {first_child, parent, node_class, class_node};
  }

  /// [V + 1]: node v has the children first_child[v] .. first_child[v + 1] - 1
  torch::Tensor first_child;
  torch::Tensor parent; ///< [V], -1 for the root
  torch::Tensor node_class; ///< [V], the class of a leaf, -1 for inner nodes
  torch::Tensor class_node; ///< [N], the leaf of each class
  /// Per layer below the root: the number of its nodes, and the largest number of children of one
  /// node.
  std::vector<int64_t> layer_sizes, group_sizes;

 private:
  void measure();
};

class LabelTree : public Holder<LabelTreeImpl> {
 public:
  using Holder::Holder;
  explicit LabelTree(const torch::Tensor& parents, const torch::Tensor& classes = {})
      : Holder(std::make_shared<Impl>(parents, classes)) {}
  explicit LabelTree(...) = delete; // expected: parents [V][, classes [V]]

  /// Same as the constructor.
  static LabelTree from_parents(const torch::Tensor& parents, const torch::Tensor& classes = {});
  /// Builds a balanced tree with ceil(log_arity N) layers, whose leaves are the classes of `order`,
  /// a permutation, from left to right (Han et al., 2018, appendix C).
  static LabelTree balanced(const torch::Tensor& order, int64_t arity = 10);
  static LabelTree balanced(int64_t num_classes, int64_t arity = 10);
  /// Builds a balanced tree with the classes in random order.
  static LabelTree random(int64_t num_classes, int64_t arity = 10,
                          std::optional<at::Generator> generator = std::nullopt);
  /// Builds a tree that places similar classes close to each other. vectors: [N, D], floating and
  /// finite.
  static LabelTree from_vectors(const torch::Tensor& vectors, const TreeFromVectors& options = {},
                                std::optional<at::Generator> generator = std::nullopt);
  /// Builds a tree with one layer of `subsets` nodes that have nearly equal sums of counts [N].
  /// Below each node are its classes by descending count (Han et al., 2018, section 5).
  static LabelTree from_frequencies(const torch::Tensor& counts, int64_t subsets);
  /// Builds the tree with the smallest expected depth for frequencies counts [N] (Huffman, 1952).
  static LabelTree huffman(const torch::Tensor& counts, int64_t arity = 2);
};

} // namespace xsoftmax

// Loss modules over a tree of classes: the same as their namesakes in Python, with the same state
// names.
//
//     auto tree = xsoftmax::LabelTree::from_vectors(class_means);
//     xsoftmax::nn::BeamTreeOptions options{.num_candidates = 5, .num_noises = 5};
//     xsoftmax::nn::BeamTreeLoss loss(width, tree, options);

namespace xsoftmax {

/// Options of hierarchical_softmax_loss.
struct HierarchicalSoftmaxOptions : ReductionOptions {
  /// row-sparse gradient of the edges, as for the table in SampledSoftmaxOptions
  std::optional<bool> sparse_grad = std::nullopt;

  template <typename Visitor>
  void visit(Visitor& visitor) {
    ReductionOptions::visit(visitor);
    visitor("sparse_grad", sparse_grad);
  }
  bool operator==(const HierarchicalSoftmaxOptions&) const = default;
};

/// Options of beam_tree_candidates.
struct BeamOptions {
  int64_t num_candidates = 1;
  int64_t beam = 1; ///< beam width of the search, at least num_candidates
  /// whether candidates are sampled from the best subset of a tree with one layer of subsets
  bool routed = false;

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("num_candidates", num_candidates);
    visitor("beam", beam);
    visitor("routed", routed);
  }
  bool operator==(const BeamOptions&) const = default;
};

/// Options of a training step of BeamTreeLoss: those of the loss and of the search, and how often
/// edges are balanced.
struct BeamTreeStepOptions : SampledSoftmaxOptions, BeamOptions {
  int64_t balance_every = 0; ///< training steps between balancing the edges; 0: never
  bool balances_16_bits = false; ///< whether 16-bit edges are also balanced

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

/// Base class of modules over a tree, with a row of parameters for each edge. Each module keeps its
/// own copy of the tree.
class TreeTableImpl : public TableLossImpl {
 public:
  void load(torch::serialize::InputArchive& archive) override;

  torch::nn::Linear edges{nullptr}; ///< edge e ends in node e + 1 of the tree
  LabelTree tree{nullptr};

 protected:
  /// optional: names of modules and buffers that a checkpoint may lack.
  TreeTableImpl(const char* name, int64_t in_features, const LabelTree& tree,
                const LossOptions& options, std::vector<std::string> optional);
  /// Returns the tree of a checkpoint, or the module's tree if the checkpoint has none.
  LabelTree tree_of(torch::serialize::InputArchive& archive) const;
  /// Checks that a tree to be loaded has as many nodes as the module's tree.
  virtual void check_tree(const LabelTree& loaded) const;
  void check_k(int64_t k) const; // checks the k of topk
  const torch::nn::Linear& table() const override { return edges; }
  std::optional<torch::Tensor> bias() const;
};

/// Base class of losses over a tree. Losses over the same tree can load each other's checkpoints.
class TreeLossImpl : public TreeTableImpl {
 public:
  TreeLossImpl(const char* name, int64_t in_features, LabelTree tree, const LossOptions& options);

  /// Returns the best class of each query: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const {
    return std::get<1>(topk(input, 1)).squeeze(-1);
  }
  /// Returns (scores or log-probabilities, ids) of the best k classes, both [*, k], best first.
  /// exclude: ids [*, E] to exclude per query, -1 as padding. Padded with -inf and -1 if fewer than
  /// k are found.
  virtual std::tuple<torch::Tensor, torch::Tensor> topk(
      const torch::Tensor& input, int64_t k, const torch::Tensor& exclude = {}) const = 0;
  /// Returns the log-probabilities of all classes, [*, N].
  virtual torch::Tensor log_prob(const torch::Tensor& input) = 0;

 protected:
  std::optional<torch::Tensor> class_weight() const;
};

/// Hierarchical softmax over any tree (Morin and Bengio, 2005). It is exact and normalised, and
/// costs O(depth * arity) per query.
class HierarchicalSoftmaxLossImpl : public TreeLossImpl {
 public:
  HierarchicalSoftmaxLossImpl(int64_t in_features, LabelTree tree, const LossOptions& options = {},
                              std::optional<bool> sparse_grad = std::nullopt);
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);
  /// Returns the loss itself, which is exact.
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target) const;
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k,
                                                const torch::Tensor& exclude = {}) const override;
  torch::Tensor log_prob(const torch::Tensor& input) override;

 private:
  torch::Tensor loss(const torch::Tensor& input, const torch::Tensor& target) const;

  HierarchicalSoftmaxOptions step_;
};
class HierarchicalSoftmaxLoss : public Holder<HierarchicalSoftmaxLossImpl> {
 public:
  using Holder::Holder;
  HierarchicalSoftmaxLoss(int64_t in_features, LabelTree tree, const LossOptions& options = {},
                          std::optional<bool> sparse_grad = std::nullopt)
      : Holder(std::make_shared<Impl>(in_features, std::move(tree), options, sparse_grad)) {}
  explicit HierarchicalSoftmaxLoss(...) = delete; // expected: in_features, LabelTree[, ...]
};

struct BeamTreeOptions {
  int64_t num_candidates = 0; ///< number of candidates, the best that the beam search finds
  int64_t num_noises = 0; ///< noise samples per query, from outside the candidates
  std::optional<int64_t> beam = std::nullopt; ///< beam width of the search; nullopt: num_candidates
  /// A sampler of private draws with replacement, tries * num_noises of them, or its name, such as
  /// "log_uniform", which uses four tries. "uniform", the default, needs only one. It must not
  /// follow the class table.
  samplers::SamplerOrName noise_sampler = {};
  std::string noise_reduction = "mean_of_logs"; ///< "mean_of_logs" or "log_of_mean"
  /// whether candidates are sampled from the best subset of a tree with one layer of subsets
  bool routed = false;
  /// steps between balancing the edges; nullopt: 100, or more for large trees; 0: never
  std::optional<int64_t> balance_every = std::nullopt;
  std::optional<bool> sparse_grad = std::nullopt; ///< as in SampledSoftmaxOptions
};

/// The beam tree (Han et al., 2018, Algorithm 2): in train(), CANE with candidates from a beam
/// search; in eval(), the exact loss over all paths.
class BeamTreeLossImpl : public TreeLossImpl {
 public:
  BeamTreeLossImpl(int64_t in_features, LabelTree tree, const BeamTreeOptions& beam,
                   const LossOptions& options = {});
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target,
                        std::optional<at::Generator> generator = std::nullopt);
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target) const;
  /// Returns the scores of all classes, [*, N].
  torch::Tensor scores(const torch::Tensor& input);
  /// Returns the same scores as a plain table: weight [N, D], and bias [N] or undefined.
  std::tuple<torch::Tensor, torch::Tensor> class_table() const;
  torch::Tensor log_prob(const torch::Tensor& input) override;
  /// Returns (scores, ids) of the best classes that a beam search finds. Scores are not normalised.
  /// The beam width is `width`, or the larger of k and BeamTreeOptions::beam, and grows by the
  /// number of excluded classes.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k,
                                                const torch::Tensor& exclude = {}) const override {
    return topk(input, k, std::nullopt, exclude);
  }
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k,
                                                std::optional<int64_t> width,
                                                const torch::Tensor& exclude = {}) const;
  /// Returns the candidates of a training step: [*, D] -> int64 [*, num_candidates], -1 as padding.
  torch::Tensor candidates(const torch::Tensor& input,
                           std::optional<at::Generator> generator = std::nullopt) const;
  /// Moves the common part of a node's children to the edge above the node. Scores do not change,
  /// but the beam search finds more of the best classes. It may be called between a forward and a
  /// backward pass, because the gradient depends only on sums along whole paths.
  void balance();

  samplers::ComplementSampler noise{nullptr};
  torch::Tensor steps; ///< number of training steps

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  void check_tree(const LabelTree& loaded) const override;

  BeamTreeStepOptions step_;
};
class BeamTreeLoss : public Holder<BeamTreeLossImpl> {
 public:
  using Holder::Holder;
  BeamTreeLoss(int64_t in_features, LabelTree tree, const BeamTreeOptions& beam,
               const LossOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, std::move(tree), beam, options)) {}
  explicit BeamTreeLoss(...) = delete; // expected: in_features, LabelTree, BeamTreeOptions[, ...]
};

} // namespace nn
} // namespace xsoftmax
