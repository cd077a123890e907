#pragma once

// Trees whose leaves are the classes, for losses over trees (tree_losses.h): the same as xsoftmax.LabelTree in Python, with the same buffers.
//
//     auto tree = xsoftmax::LabelTree::from_vectors(class_means, {.arity = 8});

#include <xsoftmax/holder.h>

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

namespace xsoftmax {

/// How LabelTree::from_vectors makes a tree.
struct TreeFromVectors {
  int64_t arity = 10;
  int64_t iterations = 10;   ///< of each K-means
  int64_t max_leaf_size = 0; ///< 0: recursive K-means with `arity` clusters, whose leaves are laid from left to right into a balanced tree (Han
                             ///< et al., 2018, appendix C). Else clusters of at most so many classes, cut by balanced 2-means, below as few layers of at
                             ///< most `arity` children as those take (Yu et al., 2022, section 2.1): the tree of a hierarchical matcher
  bool spherical = true; ///< beside max_leaf_size: centres are normalised, so that directions count; the vectors should be, too

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("arity", arity);
    visitor("iterations", iterations);
    visitor("max_leaf_size", max_leaf_size);
    visitor("spherical", spherical);
  }
};

/// Nodes are numbered breadth-first: node 0 is the root, and the children of a node stand together. A node other than the root stands for the
/// edge that leads to it: edge e ends in node e + 1. Any shape will do: leaves at any depth, nodes with one child, a single node.
class LabelTreeImpl : public torch::nn::Module {
 public:
  /// parents int64 [V], in any numbering, -1 for the root; classes int64 [V], the class of each leaf, -1 for other nodes. Checked: throws
  /// ValueError for two roots or none, a cycle, a parent that is no node, a leaf without a class, a class twice or left out.
  /// classes undefined: the leaves are the classes in the order of their nodes.
  explicit LabelTreeImpl(const torch::Tensor& parents, const torch::Tensor& classes = {});

  /// The nodes from below the root to each class of `ids` [*]: [*, depth], -1 behind the leaf.
  torch::Tensor path(const torch::Tensor& ids) const;
  /// Another tree takes the place of this one.
  void load(torch::serialize::InputArchive& archive) override;
  /// Only the device moves: the tables are int64 whatever the dtype of a loss.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  int64_t num_classes() const { return class_node.size(0); }
  int64_t num_nodes() const { return parent.size(0); }
  int64_t num_edges() const { return num_nodes() - 1; }
  int64_t depth() const { return int64_t(layer_sizes.size()); }
  int64_t arity() const { return group_sizes.empty() ? 0 : *std::max_element(group_sizes.begin(), group_sizes.end()); }
  /// first_child, parent, node_class, class_node: as operators take them.
  std::vector<torch::Tensor> tables() const { return {first_child, parent, node_class, class_node}; }

  torch::Tensor first_child; ///< [V + 1]: node v has the children first_child[v] .. first_child[v + 1] - 1
  torch::Tensor parent; ///< [V], -1 for the root
  torch::Tensor node_class; ///< [V], the class of a leaf, else -1
  torch::Tensor class_node; ///< [N], the leaf of a class
  std::vector<int64_t> layer_sizes, group_sizes; ///< of each layer below the root: its nodes, and the most children of one node

 private:
  void measure();
};

class LabelTree : public Holder<LabelTreeImpl> {
 public:
  using Holder::Holder;
  explicit LabelTree(const torch::Tensor& parents, const torch::Tensor& classes = {}) : Holder(std::make_shared<Impl>(parents, classes)) {}
  explicit LabelTree(...) = delete; // expected: parents [V][, classes [V]]

  /// As the constructor.
  static LabelTree from_parents(const torch::Tensor& parents, const torch::Tensor& classes = {});
  /// The classes of `order`, a permutation, as leaves from left to right, in ceil(log_arity N) layers (Han et al., 2018, appendix C).
  static LabelTree balanced(const torch::Tensor& order, int64_t arity = 10);
  static LabelTree balanced(int64_t num_classes, int64_t arity = 10);
  /// The same, the classes in random order.
  static LabelTree random(int64_t num_classes, int64_t arity = 10, std::optional<at::Generator> generator = std::nullopt);
  /// Near classes near each other: vectors [N, D], floating and finite.
  static LabelTree from_vectors(const torch::Tensor& vectors, const TreeFromVectors& options = {}, std::optional<at::Generator> generator = std::nullopt);
  /// One layer of `subsets` nodes with nearly the same sum of counts [N], below them the classes by falling count (section 5).
  static LabelTree from_frequencies(const torch::Tensor& counts, int64_t subsets);
  /// The tree of the least expected depth under frequencies counts [N] (Huffman, 1952).
  static LabelTree huffman(const torch::Tensor& counts, int64_t arity = 2);
};

} // namespace xsoftmax
