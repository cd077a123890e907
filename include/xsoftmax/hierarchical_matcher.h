#pragma once

// A hierarchical matcher under an encoder: the same as xsoftmax.HierarchicalMatcher in Python, with
// the same names of state.
//
//     xsoftmax::TreeFromVectors clusters{.arity = 16, .max_leaf_size = 100};
//     auto tree = xsoftmax::LabelTree::from_vectors(label_vectors, clusters);
//     xsoftmax::nn::HierarchicalMatcher matcher(width, tree, {.loss = "logistic"});
//     do {
//       ... // matcher(encoder(x), target).backward(); optimizer.step();
//     } while (matcher->next_layer());
//     auto [scores, labels] = matcher->topk(encoder(x), 5);

#include <xsoftmax/tree_losses.h>

namespace xsoftmax {

struct HierarchicalMatcherOptions {
  std::string loss = "squared_hinge"; ///< or "logistic"
  int64_t beam = 10;                  ///< nodes of a layer whose children are scored, at least 1
  std::string reduction = "mean";     ///< over queries: "mean", "sum" or "none"
  bool bias = true;
  std::optional<bool> sparse_grad = std::nullopt; ///< of the edges, as in SamplingOptions

  /// Visits what operators take: the bias shows in the tensors.
  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("loss", loss);
    visitor("beam", beam);
    visitor("reduction", reduction);
    visitor("sparse_grad", sparse_grad);
  }
};

namespace nn {

/// A tree of labels with a linear classifier for each node, trained layer after layer over one
/// encoder (Yu et al., 2022, section 4). The loss of a query is summed over the nodes of the layer at
/// work whose parents the beam reaches, or are above its right labels. After the last layer, `topk`
/// finds the best labels by beam search.
///
/// Errors: ValueError for options and shapes, TypeError for dtypes, IndexError for labels out of
/// range (checked on the CPU). An error changes nothing.
class HierarchicalMatcherImpl : public TreeTableImpl {
 public:
  /// tree: of the labels, at least 2 nodes.
  HierarchicalMatcherImpl(int64_t in_features, const LabelTree& tree, const HierarchicalMatcherOptions& options = {});

  /// Returns the loss on the layer at work: input [*, D], target int64 [*, T], the right labels of
  /// each query, -1 where there are fewer than T; a scalar, or [*] for reduction "none".
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);
  /// Goes on to the next layer, where each node begins with the weights of its parent. Returns
  /// whether there is one.
  bool next_layer();
  /// Sets the rows of the layer at work to scaled sums of their examples, in place of their parents'
  /// weights; the formula is that of Python. input and target: those of the training set.
  void init_from_prototypes(const torch::Tensor& input, const torch::Tensor& target);
  /// Returns (scores, labels) of the best labels that a beam search finds, [*, k], best first. Scores
  /// are products along the path; 0 and -1 where fewer than k are found. beam: at least k; none: the
  /// larger of k and that of the options. exclude: ids [*, E] that a query does not want, -1 for
  /// none. ValueError where a layer is still to be trained.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k, std::optional<int64_t> beam = std::nullopt,
                                                const torch::Tensor& exclude = {}) const;
  /// Returns the best label that the beam finds: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const;
  void load(torch::serialize::InputArchive& archive) override;

  torch::Tensor layer; ///< the layer at work, 1 to tree->depth(), int64 on the CPU

 private:
  HierarchicalMatcherOptions matcher_;
};
class HierarchicalMatcher : public Holder<HierarchicalMatcherImpl> {
 public:
  using Holder::Holder;
  HierarchicalMatcher(int64_t in_features, const LabelTree& tree, const HierarchicalMatcherOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, tree, options)) {}
  explicit HierarchicalMatcher(...) = delete; // expected: in_features, LabelTree[, HierarchicalMatcherOptions]
};

} // namespace nn
} // namespace xsoftmax
