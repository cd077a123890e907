#pragma once

// Extreme multi-label classification with a hierarchical linear model.

#include <xsoftmax/trees.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace xsoftmax {

class BeamLayer;
struct AllowedNodes;
struct Examples;
struct XRLinearTrainOptions;

/// Options of XRLinear::predict and XRLinear::topk, set by chained calls:
/// XRLinearPredictOptions().topk(5).beam(20).
struct XRLinearPredictOptions {
  /// Number of labels per query, at least 0.
  TORCH_ARG(int64_t, topk) = 10;
  /// Number of nodes per layer whose children are scored, at least 1.
  TORCH_ARG(int64_t, beam) = 10;
  /// Transform of a score z: "l1-hinge" to "l6-hinge", e^(-max(0, 1 - z)^p) for "lp-hinge";
  /// "sigmoid"; or "identity". A prefix "log-" on the hinge and sigmoid transforms returns their
  /// logs. One name for all layers, or one per layer, separated by commas. Empty: the model's
  /// transform.
  TORCH_ARG(std::string, transform) = "";
  /// How a transformed score is combined with the score of the parent: "multiply", "add", or "last"
  /// for the transformed score only. One name for all layers, or one per layer, separated by
  /// commas. Empty: "add" for "identity" and transforms to logs, otherwise "multiply".
  TORCH_ARG(std::string, combiner) = "";
  /// int64: restricts the search to these labels. A sparse CSR tensor [n, L]: restricts each query
  /// to the labels of its row, such as the shortlist of another model; all of them are scored,
  /// regardless of the beam. nullopt: all labels.
  TORCH_ARG(std::optional<at::Tensor>, only) = std::nullopt;
  /// float32 [n, d]: dense features, in the columns from dense_begin on. They may be combined with
  /// sparse features.
  TORCH_ARG(std::optional<at::Tensor>, dense) = std::nullopt;
  /// Column of the first dense feature.
  TORCH_ARG(int64_t, dense_begin) = 0;
};

/// The layers of a label tree, with a sparse linear classifier for each child of each node (Yu et
/// al., 2022, section 3). The model is immutable, and threads may use it concurrently.
class XRLinear : public torch::CustomClassHolder {
 public:
  /// Constructs a model from its parts. Throws ValueError, TypeError or IndexError if the parts do
  /// not fit together.
  ///
  /// - features: number of features of a query.
  /// - bias: the value of an additional column that every query has.
  /// - transform: the default of predict().
  /// - labels: int64 [L], the label of each node of the last layer.
  /// - layers: per layer, from the top: first_child, chunk, feature, more, child and value
  ///   (csrc/matcher/linear_layer.h).
  XRLinear(int64_t features, double bias, const std::string& transform, at::Tensor labels,
           std::vector<std::vector<at::Tensor>> layers);
  ~XRLinear() override;

  /// Trains a linear classifier for each node of a tree, layer by layer from the top. The result is
  /// bit for bit the model that xsoftmax.XRLinear.train returns for the same examples, options and
  /// generator. Reports progress and can be interrupted (see ProgressHandler). Throws ValueError,
  /// TypeError or IndexError for invalid examples and options.
  static c10::intrusive_ptr<XRLinear> train(const Examples& examples,
                                            const XRLinearTrainOptions& options,
                                            std::optional<at::Generator> generator = std::nullopt);
  static c10::intrusive_ptr<XRLinear> train(const Examples& examples);

  using Predictions = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

  /// Returns the best labels of each query by beam search: offsets int64 [n + 1], labels int64 and
  /// scores float32, best first in each row. Labels with equal scores are in the order of the last
  /// layer.
  ///
  /// Queries are sparse rows (offsets [n + 1] and columns int32 or int64, values float32), the
  /// dense block of the options, or both.
  ///
  /// If scores are products or sums of positive values, the search adds logs, so the order is
  /// correct even if float32 would round the scores to 0 or 1. Returned scores are never 0, because
  /// sparse formats drop zeros: smaller scores are replaced by the smallest normal numbers, from
  /// 2^-126 up, in order.
  Predictions predict(const at::Tensor& offsets, const at::Tensor& columns,
                      const at::Tensor& values, const XRLinearPredictOptions& options = {}) const;

  /// Returns (scores float32 [n, k], labels int64 [n, k]) of predict() with k = options.topk(),
  /// padded with 0 and -1 if fewer labels are found. exclude: int64 [n, E], labels to exclude per
  /// query, -1 as padding. Choose a beam that leaves room for the excluded labels.
  std::tuple<at::Tensor, at::Tensor> topk(
      const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values,
      const XRLinearPredictOptions& options = {},
      const std::optional<at::Tensor>& exclude = std::nullopt) const;

  /// Calls predict() on a sparse CSR tensor [n, features]. Returns the scores as a sparse CSR
  /// tensor [n, L], with the entries of each row sorted by label.
  at::Tensor predict_csr(const at::Tensor& queries,
                         const XRLinearPredictOptions& options = {}) const;

  /// Writes the model to the folder `path`, atomically. A folder that contains a model and nothing
  /// else is replaced, and processes that have loaded the old model can go on using it. Any other
  /// folder is left alone. notes: any text, stored with the model, and also in notes.json for
  /// people to read; empty: notes().
  void save(const std::string& path, const std::string& notes = "") const;
  /// Throws the error that save(path) would throw for the current contents of `path`. Call it
  /// before a long training run.
  static void check_target(const std::string& path);
  /// Loads and checks a model that save() wrote. Weights are memory-mapped read-only, so processes
  /// share them.
  static c10::intrusive_ptr<XRLinear> load(const std::string& path);

  int64_t features() const { return features_; }
  double bias() const { return bias_; }
  const std::string& transform() const { return transform_; }
  int64_t num_labels() const { return labels_.size(0); }
  /// Returns the notes that were saved with a loaded model.
  const std::string& notes() const { return notes_; }
  int64_t depth() const { return int64_t(parts_.size()); }
  /// Returns copies of the parts of a layer: first_child, chunk, feature, more, child, value.
  std::vector<at::Tensor> layer(int64_t depth) const;
  at::Tensor labels() const { return labels_.clone(); }
  int64_t num_weights() const;

 private:
  /// Returns, per layer, the nodes with a label of `only` below them.
  std::vector<AllowedNodes> allowed_nodes(const at::Tensor& only) const;
  /// The same for a sparse matrix [queries, L], the labels of each query.
  std::vector<AllowedNodes> nodes_of_queries(const at::Tensor& only, int64_t queries) const;

  int64_t features_;
  double bias_;
  std::string transform_, notes_;
  at::Tensor labels_;
  std::vector<int64_t> leaf_; // per label, its node in the last layer
  std::vector<std::vector<at::Tensor>> parts_; // per layer
  std::vector<BeamLayer> layers_;
};

/// Examples as sparse rows, with the labels of each.
struct Examples {
  at::Tensor offsets; ///< int64 [n + 1]: the entries of example i are offsets[i] to offsets[i + 1]
  at::Tensor features; ///< int32: the feature of each entry, in ascending order within an example
  at::Tensor values; ///< float32: the value of each entry
  at::Tensor label_offsets; ///< int64 [n + 1]: the same for labels
  at::Tensor labels; ///< int32: the labels of each example
  int64_t num_features; ///< number of features, from the header of the file
  int64_t num_labels; ///< number of labels, from the header of the file
};

/// Reads examples from a text file in the format of the extreme classification repository. The file
/// has a header "examples features labels", then one line per example: its labels separated by
/// commas, a space, and feature:value pairs. Ids start at 0, features ascend within a line, and
/// values of 0 are dropped. Throws ValueError with the file, the line and the text of the error,
/// and also if the path is a pipe or a device.
Examples read_examples(const std::string& path);

} // namespace xsoftmax

// Training of hierarchical linear models, and label vectors for their trees.
//
//     const auto examples = xsoftmax::read_examples("train.txt");
//     const auto options = xsoftmax::XRLinearTrainOptions().negatives({"tfn+man"});
//     const auto model = xsoftmax::XRLinear::train(examples, options);
//     model->save("model");

namespace xsoftmax {

/// Options of XRLinear::train, set by chained calls. Names and defaults are those of
/// xsoftmax.XRLinear.train in Python. `resume` and `group` exist only in Python.
struct XRLinearTrainOptions {
  /// A tree over the labels, with all labels in its last layer. Null: LabelTree::from_vectors of
  /// label_vectors::pifa(examples), with arity and max_leaf_size.
  TORCH_ARG(LabelTree, tree) = nullptr;
  TORCH_ARG(int64_t, arity) = 16;
  TORCH_ARG(int64_t, max_leaf_size) = 100;
  /// The rows that a node is trained on: "tfn", "man", "user", or several joined by "+". One string
  /// for all layers, or one per layer.
  TORCH_ARG(std::vector<std::string>, negatives) = { "tfn" };
  using Pairs = std::tuple<at::Tensor, at::Tensor>;
  /// For "user": offsets int64 [n + 1] and labels int32, the labels for which each example is a
  /// negative.
  TORCH_ARG(std::optional<Pairs>, user_negatives) = std::nullopt;
  /// For "man": beam width of the search for negatives.
  TORCH_ARG(int64_t, beam) = 10;
  /// "squared_hinge", "hinge" or "logistic".
  TORCH_ARG(std::string, loss) = "squared_hinge";
  TORCH_ARG(double, positive_cost) = 1.0;
  TORCH_ARG(double, negative_cost) = 1.0;
  /// float32, one number per entry of examples.labels, at least 0; multiplies positive_cost.
  TORCH_ARG(std::optional<at::Tensor>, relevance) = std::nullopt;
  TORCH_ARG(double, tolerance) = 0.1;
  TORCH_ARG(int64_t, sweeps) = 100;
  /// Value of an additional feature that every row has; 0: no additional feature.
  TORCH_ARG(double, bias) = 1.0;
  /// Weights with a smaller magnitude are dropped.
  TORCH_ARG(double, threshold) = 0.1;
  TORCH_ARG(std::optional<int64_t>, max_weights) = std::nullopt;
  /// A model with the same tree and features from which training starts.
  TORCH_ARG(c10::intrusive_ptr<XRLinear>, initial) = {};
  /// float16 or float32. nullopt: float16, unless a weight is outside its range.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
};

/// Label vectors as sparse rows [L, width]: (offsets int64, columns int32, values float32), with
/// ascending columns. They equal those of xsoftmax.label_vectors in Python. Pass them to
/// tree_from_vectors.
namespace label_vectors {

using Rows = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Returns normalize(Y.T), of width n: represents each label by the examples that have it.
Rows pii(const Examples& examples);
/// Returns normalize(Y.T @ X): represents each label by the sum of its examples' features. Rows of
/// X should have length 1.
Rows pifa(const Examples& examples);
/// Divides each row by its length, except for rows of zeros. width: an upper bound of the columns,
/// exclusive.
Rows unit_rows(const Rows& rows, int64_t width);

} // namespace label_vectors

/// Builds a LabelTree from sparse rows [L, width], like LabelTree::from_vectors.
/// options.max_leaf_size must be at least 1. Throws ValueError or IndexError for inconsistent rows.
LabelTree tree_from_vectors(const label_vectors::Rows& rows, int64_t width,
                            const TreeFromVectors& options,
                            std::optional<at::Generator> generator = std::nullopt);

} // namespace xsoftmax

// A hierarchical matcher on top of an encoder: the same as xsoftmax.HierarchicalMatcher in Python,
// with the same state names.
//
//     xsoftmax::TreeFromVectors clusters{.arity = 16, .max_leaf_size = 100};
//     auto tree = xsoftmax::LabelTree::from_vectors(label_vectors, clusters);
//     xsoftmax::nn::HierarchicalMatcher matcher(width, tree, {.loss = "logistic"});
//     do {
//       ... // matcher(encoder(x), target).backward(); optimizer.step();
//     } while (matcher->next_layer());
//     auto [scores, labels] = matcher->topk(encoder(x), 5);

namespace xsoftmax {

struct HierarchicalMatcherOptions {
  std::string loss = "squared_hinge"; ///< "squared_hinge" or "logistic"
  int64_t beam = 10; ///< number of nodes per layer whose children are scored, at least 1
  /// The parents whose children a step scores: "tfn" (teacher forcing): those of the correct nodes;
  /// "man" (matcher-aware): those that the beam reaches; "tfn+man": both
  std::string negatives = "tfn+man";
  std::string reduction = "mean"; ///< over queries: "mean", "sum" or "none"
  bool bias = true;
  /// row-sparse gradient of the edges, as in SamplingOptions
  std::optional<bool> sparse_grad = std::nullopt;

  /// Visits the options that operators take. `bias` is omitted, because the tensors show it.
  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("loss", loss);
    visitor("beam", beam);
    visitor("negatives", negatives);
    visitor("reduction", reduction);
    visitor("sparse_grad", sparse_grad);
  }
};

namespace nn {

/// A label tree with a linear classifier for each node, trained layer by layer with one encoder (Yu
/// et al., 2022, section 4). The loss of a query is summed over the nodes of the current layer
/// whose parents are reached by the beam or are ancestors of the query's correct labels (option
/// `negatives`). After the last layer is trained, `topk` finds the best labels by beam search.
///
/// Throws ValueError for options and shapes, TypeError for dtypes, and IndexError for labels out of
/// range (checked on the CPU). An error changes nothing.
class HierarchicalMatcherImpl : public TreeTableImpl {
 public:
  /// tree: over the labels, with at least 2 nodes.
  HierarchicalMatcherImpl(int64_t in_features, const LabelTree& tree,
                          const HierarchicalMatcherOptions& options = {});

  /// Returns the loss of the current layer: a scalar, or [*] for reduction "none". input: [*, D].
  /// target: int64 [*, T], the correct labels of each query, -1 as padding.
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);
  /// Moves on to the next layer, whose nodes are initialised with the weights of their parents.
  /// Returns whether there was another layer.
  bool next_layer();
  /// Initialises the rows of the current layer with scaled sums of their examples instead of the
  /// weights of their parents; Python documents the formula. input and target: the training set.
  void init_from_prototypes(const torch::Tensor& input, const torch::Tensor& target);
  /// Returns (scores, labels) of the best labels by beam search, [*, k], best first. Scores are
  /// products along the path. Padded with 0 and -1 if fewer than k labels are found.
  ///
  /// - beam: at least k; nullopt: the larger of k and the option.
  /// - exclude: ids [*, E] to exclude per query, -1 as padding.
  ///
  /// Throws ValueError before the last layer has been reached.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k,
                                                std::optional<int64_t> beam = std::nullopt,
                                                const torch::Tensor& exclude = {}) const;
  /// Returns the best label that the beam search finds: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const;
  void load(torch::serialize::InputArchive& archive) override;

  torch::Tensor layer; ///< the current layer, from 1 to tree->depth(), int64 on the CPU

 private:
  HierarchicalMatcherOptions matcher_;
};
class HierarchicalMatcher : public Holder<HierarchicalMatcherImpl> {
 public:
  using Holder::Holder;
  HierarchicalMatcher(int64_t in_features, const LabelTree& tree,
                      const HierarchicalMatcherOptions& options = {})
      : Holder(std::make_shared<Impl>(in_features, tree, options)) {}
  explicit HierarchicalMatcher(...) = delete; // expected: in_features, LabelTree[, options]
};

} // namespace nn
} // namespace xsoftmax
